"""Which transformations of the weights leave the function unchanged?"""

from onebasin.symmetry.discover import discover
from onebasin.symmetry.element import Element
from onebasin.symmetry.group import Symmetry
from onebasin.symmetry.space import FREEDOMS, Grid, Leg, Space
from onebasin.symmetry.verify import Proof, verify

__all__ = ["FREEDOMS", "Element", "Grid", "Leg", "Proof", "Space", "Symmetry", "discover", "verify"]
