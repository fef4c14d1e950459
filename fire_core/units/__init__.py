"""Hidden units of any net: finding them, recording them, reading, drawing and writing their weights, replacing them."""

from fire_core.units.graph import Entries as Entries
from fire_core.units.graph import Recorder as Recorder
from fire_core.units.graph import UnitLayer as UnitLayer
from fire_core.units.graph import find_unit_layers as find_unit_layers
from fire_core.units.graph import incoming as incoming
from fire_core.units.graph import outgoing as outgoing
from fire_core.units.recycling import LAWS as LAWS
from fire_core.units.recycling import clear_moments as clear_moments
from fire_core.units.recycling import draw as draw
from fire_core.units.recycling import recycle as recycle
from fire_core.units.recycling import why_not as why_not
