"""Runs of four experiments with known numbers, which the tests of figures, tables and of the explorer read."""

import itertools

import pytest
from synthetic_runs import boundary_report, task_lines, warm_start_lines, write_run, write_runs

from analysis.runs import load

LEVELS = {"none": 0.7, "fire": 0.8, "full_reset": 0.82, "shrink_perturb": 0.75, "brand_new": 0.72}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for (label, level), seed in itertools.product(LEVELS.items(), (1, 2, 3)):
        lines = warm_start_lines(level + 0.001 * (label == "fire") * seed, seed)
        write_run(folder, "fig2a_cifar10_resnet18", label, seed, lines, boundary=moved(label))
        tasks = task_lines([0.9 - 0.04 * k * (label == "none") for k in range(20)], seed)
        write_run(folder, "random_label", label, seed, tasks)
        write_run(folder, "fig3_best", label, seed, losses(level, seed), data="a+b")
        write_run(folder, "fig4a_asterix", label, seed, returns(level, seed), data="asterix")
    changed = {"fire-iterations=20": 0.81}
    write_runs(folder, "fig2a_cifar10_resnet18", changed, (1, 2, 3), boundary=moved("fire"))
    return folder


@pytest.fixture(scope="session")
def results(root):
    return load(root)


def moved(label):
    """A full reset moves the three matrices by 2, 3 and 4, and FIRE by these shares of it."""
    told = boundary_report(label)
    for row, share in zip(told["rows"], (0.5, 0.5, 0.25)):
        row["sfe_relative"] = {"none": 0.0, "fire": share}.get(label, 1.0)
        row["sfe"] *= row["sfe_relative"]
    return told


def losses(level, seed):
    first = [{"phase": 0, "step": 10 * i, "val_loss_mix": 5.0, "val_loss_a": 4.0} for i in range(5)]
    start = 6.0 - level + 0.001 * seed
    return first + [{"phase": 1, "step": 50 + 10 * i, "val_loss_mix": start - 0.1 * i} for i in range(10)]


def returns(level, seed):
    first = [{"phase": 0, "step": 100 * i, "eval_return": 10.0 * i} for i in range(6)]
    first[0]["random_return"] = 3.0 * seed
    at = {"phase": 1, "eval_unfinished": 0}
    return first + [{"step": 500 + 100 * i, "eval_return": 100 * level * i + seed} | at for i in range(6)]
