"""Trials of experiments: harness/trial.py."""

import pytest
from training_scripts import compose_config

from fire_core.methods import create
from harness.domains import find
from harness.naming import identity
from harness.trial import part_of, seed_of

TRIALS = [["trial.share=.2", f"trial.repeat={repeat}"] for repeat in (1, 2)]
EXPERIMENT = {"vision": "fig2a_cifar10_resnet18", "language": "fig3_60k"}


def composed(domain, *typed):
    return compose_config(domain, [f"experiment={EXPERIMENT[domain]}", "size=smoke", "method=fire", *typed])


@pytest.mark.parametrize("domain", EXPERIMENT)
def test_trials_share_the_trunk_of_their_seed_and_are_runs_of_their_own(domain):
    numbers, trunks = [], []
    for typed in ([], *TRIALS, ["trial.share=.2"]):
        cfg = composed(domain, *typed)
        found, trunk = identity(find(domain), cfg, create(**cfg.method))
        numbers.append(found)
        trunks.append(trunk)
    assert trunks[0] is not None and all(trunk == trunks[0] for trunk in trunks)
    assert all(a != b for i, a in enumerate(numbers) for b in numbers[:i])
    assert "trial" not in numbers[0]  # older runs keep their folders


def test_share_of_the_training_and_seeds_of_the_repeats():
    plain, first, second = (composed("vision", *typed) for typed in ([], *TRIALS))
    assert [part_of(cfg, 50) for cfg in (plain, first)] == [50, 10] and part_of(first, 1) == 1
    assert seed_of(plain, 0) == seed_of(plain, 1) == seed_of(first, 0) == plain.seed
    assert len({seed_of(cfg, 1) for cfg in (plain, first, second)}) == 3
