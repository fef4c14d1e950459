"""Hidden units of any net: finding them (`graph`), recording them (`recorder`), replacing them (`recycling`)."""

from fire_core.units.graph import UnitLayer, find_unit_layers
from fire_core.units.recorder import Recorder
from fire_core.units.recycling import recycle, uniform, why_not

__all__ = ["Recorder", "UnitLayer", "find_unit_layers", "recycle", "uniform", "why_not"]
