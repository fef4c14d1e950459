"""Target matrices of a network: finding all of them, and choosing some by a rule."""

from fire_core.targets.rules import choose, find_targets, match_parameters
from fire_core.targets.split import list_targets
from fire_core.targets.table import Target, TargetTable, names, shorten
from fire_core.targets.walk import check_module

__all__ = [
    "Target",
    "TargetTable",
    "check_module",
    "choose",
    "find_targets",
    "list_targets",
    "match_parameters",
    "names",
    "shorten",
]
