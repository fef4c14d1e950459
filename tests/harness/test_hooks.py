"""The calls of a method mean the same in all four training scripts."""

import re
from itertools import pairwise

import pytest
import torch
from training_scripts import SCRIPTS, train_here

from fire_core.methods import available

NOTED = {"penalty": "p", "before_step": "g", "after_step": "s", "after_pass": "e", "boundary": "b"}
NONE = ("method=none", "method.first_phase=0")


def run(script, folder, *overrides):
    """Train the smallest run of a script: (metrics, final weights)."""
    train_here(script, folder, "run.trunk=false", *overrides)
    (metrics,) = folder.rglob("metrics.jsonl")
    parts = torch.load(metrics.parent / "checkpoint" / "final.pt", weights_only=True)
    return metrics.read_text(), list(parts["actor" if script == "sac" else "net"].values())


def weights(state):
    return [p for net in state.nets.values() for p in net.parameters()]


@pytest.fixture(scope="module", params=SCRIPTS)
def runs(request, tmp_path_factory):
    """A run that does nothing, and one whose evaluations see zeros for weights: the calls of the latter, in order."""
    script, calls, kept = request.param, [], {}
    plain = run(script, tmp_path_factory.mktemp("plain"), *NONE)

    def note(name):
        def hook(self, state):
            calls.append((NOTED[name], all(net.training for net in state.nets.values())))
            if name in ("before_step", "after_step"):
                assert any(p.grad is not None for p in weights(state))
            return getattr(type(self).__mro__[1], name)(self, state)

        hook.__name__ = name
        return hook

    def before_evaluation(self, state):
        calls.append(("[", True))
        for p in weights(state):
            kept[p] = p.detach().clone()
            p.data.zero_()

    def after_evaluation(self, state):
        calls.append(("]", True))
        for p in weights(state):
            p.data.copy_(kept[p])

    with pytest.MonkeyPatch.context() as patch:
        for hook in (*map(note, NOTED), before_evaluation, after_evaluation):
            patch.setattr(available()["none"], hook.__name__, hook)
        zeros = run(script, tmp_path_factory.mktemp("zeros"), *NONE)
    return script, calls, plain, zeros


def test_every_step_has_one_penalty_and_its_gradients_and_every_evaluation_is_announced_between_steps(runs):
    script, calls, (plain, _), _ = runs
    text = "".join(letter for letter, _ in calls)
    step = "pggs" if script == "sac" else "pgs"  # actor and critics step one after another
    assert re.fullmatch(rf"(({step})|(\[\])|e|b)+", text), text
    assert text.count("b") == 1 and all(training for letter, training in calls if letter == "s")
    assert script != "sac" or text.count("s") == 120 - 30  # from the step after learning starts
    assert ("e" in text) == (script != "language")  # whose smallest run is shorter than a pass
    assert all(after in "[pb" for before, after in pairwise(text) if before == "e")
    if script in ("vision", "sac"):
        assert re.search(r"e(?!\[\])", text) is None
    name = {"vision": "test_accuracy", "language": "val_loss_a"}.get(script, "eval_return")
    assert text.count("[]") == len(re.findall(rf'"(?:before_|after_)?{name}"', plain)) + 1


def test_weights_put_in_for_evaluation_are_seen_there_and_never_change_training(runs):
    _, _, (plain, trained), (zeros, tested) = runs
    for name in ("train_loss", "weight_norm", "td_loss", "gradient_norm", "critic_loss", "actor_loss"):
        pattern = rf'{name}": ([^,}}]+)'
        assert re.findall(pattern, plain) == re.findall(pattern, zeros)
    assert 'weight_norm"' in plain
    assert any(weight.any() for weight in trained) and not any(weight.any() for weight in tested)
    assert zeros != plain and len(zeros.splitlines()) == len(plain.splitlines())
