"""Hidden units of any net: finding them, recording them, reading, drawing and writing their weights, replacing them."""

from fire_core.units.graph import Entries, Recorder, UnitLayer, find_unit_layers, incoming, outgoing
from fire_core.units.recycling import LAWS, clear_moments, draw, recycle, why_not

__all__ = [
    "LAWS",
    "Entries",
    "Recorder",
    "UnitLayer",
    "clear_moments",
    "draw",
    "find_unit_layers",
    "incoming",
    "outgoing",
    "recycle",
    "why_not",
]
