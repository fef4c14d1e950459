"""Triggers fire at hand-worked steps, and a checkpoint in the middle changes nothing."""

import json
from copy import deepcopy

import pytest

from fire_core.errors import UserError
from fire_core.triggers import Above, Cooldown, EveryNSteps, Fall, Plateau, Trigger


def test_every_n_steps_can_begin_early_or_late_and_survives_jumps() -> None:
    """A boundary of every 600 steps that is announced a tenth too early, or half a phase too late."""
    for first, wanted in ((540, [540, 1140, 1740]), (900, [900, 1500])):
        rule = EveryNSteps(600, first)
        assert [step for step in range(20, 2001, 20) if rule(step)] == wanted
    trigger = EveryNSteps(10)
    assert [step for step in (0, 9, 10, 11, 35, 39, 40) if trigger(step)] == [10, 35, 40]
    with pytest.raises(UserError, match="give a whole number"):
        EveryNSteps(2.5)


FIRED = {  # trigger: what it observes in steps 0, 1, ..., None where x is missing, and the steps at which it fires
    Plateau("x", 2): ([5.0, 4.0, None, 4.5, 4.1, 4.2, 4.2, None, 4.2, 4.2, 3.8], [4, 8]),
    Plateau("x", 2): ([None] * 9 + [1.0, 1.0, 1.0] + [None] * 9, [11]),  # waits for a metric that comes late
    Plateau("x", 2, mode="max"): ([0.1, 0.2, 0.2, 0.19, 0.3], [3]),
    Plateau("x", 3, min_change=0.5): ([5.0, 4.8, 4.6, 4.55, 4.0], [3]),
    Above("x", 0.35): ([0.1, 0.4, 0.5, 0.3, 0.4, 0.2, 0.6], [1, 4, 6]),  # again when the value has fallen
    Fall("x", 0.5): ([4.0, 10.0, None, 5.0, 4.9, 2.0, 1.1, 0.9, 3.0], [4, 7]),  # the highest since it fired
    Fall("x", 0.5): ([-1200.0, -900.0, -400.0, -500.0, -601.0], [4]),
    EveryNSteps(3): ([0] * 8, [3, 6]),
    Cooldown(Plateau("x", 2), 5): ([3, 1, 1, 1, 3, 3, 2, 2, 4, 4, 1, 3, 3, 3], [3, 8]),
    Cooldown(EveryNSteps(2), 5): ([0] * 14, [2, 8]),  # what fires in between is lost
    Cooldown(EveryNSteps(2), 4): ([0] * 14, [2, 6, 10]),  # 4 steps later is late enough
}


@pytest.mark.parametrize("cut", [None, 1, 3, 5])
@pytest.mark.parametrize("trigger", FIRED, ids=lambda trigger: type(trigger).__name__)
def test_triggers_fire_at_hand_worked_steps_also_after_a_checkpoint(trigger: Trigger, cut) -> None:
    values, steps = FIRED[trigger]
    running, fired = deepcopy(trigger), []
    for step, value in enumerate(values):
        if step == cut:
            saved, running = json.loads(json.dumps(running.state_dict())), deepcopy(trigger)
            running.load_state_dict(saved)
        if running(step, {"phase": step // 3} if value is None else {"x": value}):
            fired.append(step)
    assert fired == steps
