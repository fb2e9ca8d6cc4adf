"""Symmetries of a module: discovered from its traced function, proved by evaluation, applied to weights."""

from onebasin.symmetry.apply import KINDS, ExpandedElement, apply_block, labels, sources
from onebasin.symmetry.axes import Reason
from onebasin.symmetry.discover import discover
from onebasin.symmetry.group import Symmetry, require_symmetry
from onebasin.symmetry.rules.pointwise import passing
from onebasin.symmetry.rules.reduce import reduced, unscaled
from onebasin.symmetry.rules.registry import RULES, rule, rule_for
from onebasin.symmetry.space import FREEDOMS, Element, Grid, Leg, Space
from onebasin.symmetry.verify import Proof, verify

__all__ = [
    "FREEDOMS",
    "KINDS",
    "RULES",
    "Element",
    "ExpandedElement",
    "Grid",
    "Leg",
    "Proof",
    "Reason",
    "Space",
    "Symmetry",
    "apply_block",
    "discover",
    "labels",
    "passing",
    "reduced",
    "require_symmetry",
    "rule",
    "rule_for",
    "sources",
    "unscaled",
    "verify",
]
