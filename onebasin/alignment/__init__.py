"""Choosing among equal functions: match, align, balance, canonicalise, and what lies between networks."""

from onebasin.alignment.activations import KINDS, ActivationMatch, match_activations
from onebasin.alignment.align import ALIGN_SCALES, REFERENCES, Alignment, align, journal_of
from onebasin.alignment.assignment import Assignment, SpacePlacement, Vertex
from onebasin.alignment.balance import balance, imbalance
from onebasin.alignment.barrier import BarrierReport, barrier, barrier_report
from onebasin.alignment.canonical import FORM, FORM_SCALES, ORDERS, canonicalise, canonicalize
from onebasin.alignment.exchangeability import Exchangeability, Persistence, exchangeability, persistence, uniformity
from onebasin.alignment.layout import BlockLayout
from onebasin.alignment.loss_plane import LossPlane, loss_plane
from onebasin.alignment.match import MATCH_SCALES, Match, Overlap, match, polish, search, weights_of
from onebasin.alignment.merge import merge, own_statistics
from onebasin.alignment.population_map import PopulationMap, population_map
from onebasin.alignment.repair import Layer, Repair, output_layers, recalibrate, repair
from onebasin.alignment.scale_posterior import ScalePosterior, scale_posterior
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
    "Layer",
    "LossPlane",
    "Match",
    "Overlap",
    "Persistence",
    "PopulationMap",
    "Repair",
    "ScalePosterior",
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
    "loss_plane",
    "match",
    "match_activations",
    "merge",
    "output_layers",
    "own_statistics",
    "permutation_with",
    "persistence",
    "polish",
    "population_map",
    "recalibrate",
    "repair",
    "scale_posterior",
    "search",
    "transpositions",
    "uniformity",
    "weights_of",
]
