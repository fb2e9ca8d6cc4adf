"""Paper 1, Xiao, Liu & Bamler (arXiv 2401.00611): can a posterior be compressed once units are brought in one order?"""

from __future__ import annotations

from onebasin_papers.compact import dynamics, pruning, sigma, table, transpositions, width
from onebasin_papers.compact.networks import own_settings, perceptron, preset_problem
from onebasin_papers.compact.settings import LEAST, ROWS, TERMS, CompactSettings, preset_settings, summarise
from onebasin_papers.study import Study

__all__ = [
    "LEAST",
    "ROWS",
    "STUDY",
    "CompactSettings",
    "own_settings",
    "perceptron",
    "preset_problem",
    "preset_settings",
]

STUDY = Study(
    "compact",
    "Compact posteriors: what is left of many networks in one mean and one deviation per weight",
    (transpositions.PART, dynamics.PART, table.PART, width.PART, sigma.PART, pruning.PART),
    summarise,
    TERMS,
)
