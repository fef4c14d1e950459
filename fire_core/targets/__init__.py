"""Target matrices of a network: finding all of them, and choosing some by a rule."""

from fire_core.targets.model_targets import check_module, find_targets, list_targets, match_parameters
from fire_core.targets.table import Target, TargetTable, choose, names, shorten

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
