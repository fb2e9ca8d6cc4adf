"""How much the networks of one crowd differ as functions."""

from onebasin.diversity.measure import diversity
from onebasin.diversity.report import Collapse, Diversity, Pair, Side
from onebasin.diversity.spread import Spread

__all__ = ["Collapse", "Diversity", "Pair", "Side", "Spread", "diversity"]
