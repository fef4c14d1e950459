"""Runs that one process trains as a stack take turns, meet, wait and fail each by itself."""

import sys
import time
from functools import partial

import pytest

from harness.runs.stack import meet, pause, take_turns


def add(requests):
    """The sum of all that the runs have brought, for each of them, with their number."""
    return [(sum(number for (number,) in requests), len(requests))] * len(requests)


def test_runs_meet_until_each_has_ended_and_those_out_of_step_fall_in():
    found = {name: [] for name in "abc"}

    def run(name, number, stages):
        for stage in stages:
            found[name].append(meet(stage, add, number))
        return 0

    # c, which asks first for the second stage, goes ahead of the others, and they are in step from then on
    plans = {"a": (1, [0, 1, 0, 1]), "b": (10, [0, 1]), "c": (100, [1, 0, 1])}
    assert take_turns([partial(run, name, *plan) for name, plan in plans.items()]) == 0
    assert found["c"] == [(100, 1), (111, 3), (111, 3)] and found["b"] == [(111, 3), (111, 3)]
    assert found["a"] == [(111, 3), (111, 3), (1, 1), (1, 1)]


def test_a_run_that_waits_does_not_hold_up_the_others_and_wakes_with_its_file(tmp_path):
    began, found = time.monotonic(), []

    def first():
        found.append(meet(0, add, 1))
        done.touch()
        found.append(meet(0, add, 1))
        return 0

    def second():
        while not done.exists():
            pause(60, done)
        found.append(meet(0, add, 10))
        return 0

    done = tmp_path / "DONE"
    assert take_turns([first, second]) == 0
    assert found == [(1, 1), (11, 2), (11, 2)] and time.monotonic() - began < 30


def test_a_run_that_fails_fails_alone_and_what_all_asked_for_fails_for_all():
    found = []

    def failing():
        meet(0, add, 1)
        sys.exit(1)

    def other():
        found.extend([meet(0, add, 2), meet(0, add, 2)])
        with pytest.raises(TypeError):
            meet(0, add, None)
        return 0

    assert take_turns([failing, other]) == 1 and found == [(3, 2), (2, 1)]
