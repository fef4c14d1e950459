"""FIRE (Frobenius-Isometry Reinitialization), rival methods, and measures of what they change in a network."""

from importlib.metadata import PackageNotFoundError, version

from fire_core.attach import Attached, attach
from fire_core.errors import UserError
from fire_core.optim_state import reset_optimizer_state
from fire_core.projection import FireSettings, fire, project_
from fire_core.report import Report, Row
from fire_core.solvers.polar import Polar, polar
from fire_core.state import State, snapshot
from fire_core.targets import Target, TargetTable, find_targets
from fire_core.trial import TrialResult, trial

try:
    __version__ = version("fire-core")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Attached",
    "FireSettings",
    "Polar",
    "Report",
    "Row",
    "State",
    "Target",
    "TargetTable",
    "TrialResult",
    "UserError",
    "__version__",
    "attach",
    "find_targets",
    "fire",
    "polar",
    "project_",
    "reset_optimizer_state",
    "snapshot",
    "trial",
]
