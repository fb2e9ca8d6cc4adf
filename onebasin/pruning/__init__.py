"""Which weights, or which whole units, may go?"""

from onebasin.pruning.criteria import CRITERIA
from onebasin.pruning.curve import LEVELS, Point, PruningCurve, pruning_curve
from onebasin.pruning.masks import Masks
from onebasin.pruning.ranking import prune
from onebasin.pruning.resizing import resized
from onebasin.pruning.transfer import transfer
from onebasin.pruning.units import Removal, remove_units

__all__ = [
    "CRITERIA",
    "LEVELS",
    "Masks",
    "Point",
    "PruningCurve",
    "Removal",
    "prune",
    "pruning_curve",
    "remove_units",
    "resized",
    "transfer",
]
