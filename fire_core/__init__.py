"""FIRE and its rivals: move weights to the nearest orthogonal matrix between training phases, and measure it."""

from fire_core.errors import UserError
from fire_core.fire import fire
from fire_core.optim_state import apply_policy
from fire_core.phases import Phase, State, snapshot
from fire_core.polar import Polar, polar
from fire_core.report import Report, Row
from fire_core.targets import Target, TargetTable, find_targets

__all__ = [
    "Phase",
    "Polar",
    "Report",
    "Row",
    "State",
    "Target",
    "TargetTable",
    "UserError",
    "apply_policy",
    "find_targets",
    "fire",
    "polar",
    "snapshot",
]
