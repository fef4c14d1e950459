"""FIRE (Frobenius-Isometry Reinitialization), rival methods, and measures of what they change in a network."""

from importlib.metadata import PackageNotFoundError, version

from fire_core.attach import Attached as Attached
from fire_core.attach import attach as attach
from fire_core.errors import UserError as UserError
from fire_core.optim_state import reset_optimizer_state as reset_optimizer_state
from fire_core.projection import FireSettings as FireSettings
from fire_core.projection import fire as fire
from fire_core.projection import project_ as project_
from fire_core.report import Report as Report
from fire_core.report import Row as Row
from fire_core.solvers.polar import Polar as Polar
from fire_core.solvers.polar import polar as polar
from fire_core.state import State as State
from fire_core.state import snapshot as snapshot
from fire_core.targets import Target as Target
from fire_core.targets import TargetTable as TargetTable
from fire_core.targets import find_targets as find_targets
from fire_core.trial import TrialResult as TrialResult
from fire_core.trial import trial as trial

try:
    __version__ = version("fire-core")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__", *(k for k, v in [*vars().items()] if "fire_core" in getattr(v, "__module__", ""))]
