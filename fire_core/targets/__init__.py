"""Target matrices of a network: finding all of them, and choosing some by a rule."""

from fire_core.targets.model_targets import check_module as check_module
from fire_core.targets.model_targets import find_targets as find_targets
from fire_core.targets.model_targets import list_targets as list_targets
from fire_core.targets.model_targets import match_parameters as match_parameters
from fire_core.targets.table import Target as Target
from fire_core.targets.table import TargetTable as TargetTable
from fire_core.targets.table import choose as choose
from fire_core.targets.table import shorten as shorten
