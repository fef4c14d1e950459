"""Triggers fire at hand-worked steps, and a checkpoint in the middle changes nothing."""

import json
from collections.abc import Callable

import pytest

from fire_core.errors import UserError
from fire_core.triggers import Above, Cooldown, EveryNSteps, Fall, Plateau, Trigger


def fired(trigger: Trigger, key: str, values: list) -> list[int]:
    """Steps 0, 1, ... at which it fires; None means that the metric is missing in that call."""
    calls = [{} if value is None else {key: value} for value in values]
    return [step for step, observed in enumerate(calls) if trigger(step, observed)]


def test_every_n_steps_can_begin_early_or_late_and_survives_jumps() -> None:
    """A boundary of every 600 steps that is announced a tenth too early, or half a phase too late."""
    for first, wanted in ((540, [540, 1140, 1740]), (900, [900, 1500])):
        rule = EveryNSteps(600, first)
        assert [step for step in range(20, 2001, 20) if rule(step)] == wanted
    trigger = EveryNSteps(10)
    assert [step for step in (0, 9, 10, 11, 35, 39, 40) if trigger(step)] == [10, 35, 40]
    for wrong in (0, 2.5, float("inf"), "3"):
        with pytest.raises(UserError, match="give a whole number"):
            EveryNSteps(wrong)


FIRED = {  # trigger: what it observes, and the steps at which it fires
    Plateau("x", 2): ([5.0, 4.0, None, 4.5, 4.1, 4.2, 4.2, None, 4.2, 4.2, 3.8], [4, 8]),
    Plateau("x", 2, mode="max"): ([0.1, 0.2, 0.2, 0.19, 0.3], [3]),
    Plateau("x", 3, min_change=0.5): ([5.0, 4.8, 4.6, 4.55, 4.0], [3]),
    Above("x", 0.35): ([0.1, 0.4, 0.5, 0.3, 0.4, 0.2, 0.6], [1, 4, 6]),  # again when the value has fallen
    # from the highest value since it last fired
    Fall("x", 0.5): ([4.0, 10.0, None, 5.0, 4.9, 2.0, 1.1, 0.9, 3.0], [4, 7]),
    Cooldown(EveryNSteps(2), 5): ([0] * 14, [2, 8]),  # what fires in between is lost
    Cooldown(EveryNSteps(2), 4): ([0] * 14, [2, 6, 10]),  # 4 steps later is late enough
}


@pytest.mark.parametrize("trigger", FIRED, ids=lambda trigger: type(trigger).__name__)
def test_triggers_fire_at_hand_worked_steps(trigger: Trigger) -> None:
    values, steps = FIRED[trigger]
    assert fired(trigger, "x", values) == steps


def test_a_metric_that_comes_late_is_waited_for() -> None:
    trigger = Plateau("loss", 2)
    assert not any(trigger(step, {"epoch": 1.0}) for step in range(99))
    assert fired(trigger, "loss", [1.0, 1.0, 1.0]) == [2]
    assert not any(trigger(step, {"epoch": 1.0}) for step in range(500))


MAKERS: list[Callable[[], Trigger]] = [
    lambda: EveryNSteps(3),
    lambda: Plateau("x", 2),
    lambda: Above("x", 2.5),
    lambda: Fall("x", 0.5),
    lambda: Cooldown(Plateau("x", 2), 3),
    lambda: Cooldown(EveryNSteps(2), 3),
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cut", [1, 5, 8])
def test_a_checkpoint_in_the_middle_changes_nothing(make: Callable[[], Trigger], cut: int) -> None:
    calls = [{"x": x, "phase": i // 3} for i, x in enumerate([3, 1, 1, 1, 3, 3, 2, 2, 4, 4, 1, 3, 3, 3])]
    whole = make()
    expected = [whole(step, observed) for step, observed in enumerate(calls)]
    assert any(expected) and not all(expected)

    first = make()
    answers = [first(step, observed) for step, observed in enumerate(calls[:cut])]
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    answers += [second(step, observed) for step, observed in enumerate(calls[cut:], cut)]
    assert answers == expected
