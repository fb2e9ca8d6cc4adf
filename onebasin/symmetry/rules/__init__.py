"""How one family of operations carries axes and factors: one file per family."""

from onebasin.symmetry.rules import address, affine, cut, normalise, pointwise, rearrange, reduce, reshape
from onebasin.symmetry.rules.registry import rule_for

__all__ = ["address", "affine", "cut", "normalise", "pointwise", "rearrange", "reduce", "reshape", "rule_for"]
