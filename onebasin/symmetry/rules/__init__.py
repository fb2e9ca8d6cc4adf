"""How one family of operations carries axes and factors: one file per family."""

from onebasin.symmetry.rules import address, normalise, pointwise, products, rearrange, reduce
from onebasin.symmetry.rules.registry import rule_for

__all__ = ["address", "normalise", "pointwise", "products", "rearrange", "reduce", "rule_for"]
