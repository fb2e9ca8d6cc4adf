"""Choosing among equal functions: match, align, balance, canonicalise, and what lies between networks."""

from onebasin.alignment.activations import KINDS, ActivationMatch, match_activations
from onebasin.alignment.align import ALIGN_SCALES, REFERENCES, Alignment, align, journal_of
from onebasin.alignment.assignment import Assignment, SpacePlacement, Vertex
from onebasin.alignment.balance import balance, imbalance
from onebasin.alignment.barrier import BarrierReport, barrier, barrier_report
from onebasin.alignment.canonical import FORM, FORM_SCALES, ORDERS, canonicalise, canonicalize
from onebasin.alignment.exchangeability import Exchangeability, Persistence, exchangeability, persistence, uniformity
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.match import MATCH_SCALES, Match, Overlap, match, polish, search, weights_of
from onebasin.alignment.merge import merge, own_statistics
from onebasin.alignment.repair import recalibrate, repair
from onebasin.alignment.scale_posterior import scale_posterior
from onebasin.alignment.transpositions import (
    Transpositions,
    element_with,
    expected_transpositions,
    permutation_with,
    transpositions,
)

__all__ = [
    "ALIGN_SCALES",
    "FORM",
    "FORM_SCALES",
    "KINDS",
    "MATCH_SCALES",
    "ORDERS",
    "REFERENCES",
    "ActivationMatch",
    "Alignment",
    "Assignment",
    "BarrierReport",
    "BlockLayout",
    "Exchangeability",
    "Match",
    "Overlap",
    "Persistence",
    "SpacePlacement",
    "Transpositions",
    "Vertex",
    "align",
    "balance",
    "barrier",
    "barrier_report",
    "canonicalise",
    "canonicalize",
    "element_with",
    "exchangeability",
    "expected_transpositions",
    "imbalance",
    "journal_of",
    "match",
    "match_activations",
    "merge",
    "own_statistics",
    "permutation_with",
    "persistence",
    "polish",
    "recalibrate",
    "repair",
    "scale_posterior",
    "search",
    "transpositions",
    "uniformity",
    "weights_of",
]
