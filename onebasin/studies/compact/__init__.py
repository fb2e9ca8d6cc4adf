"""Paper 1, Xiao, Liu & Bamler (arXiv 2401.00611): can a posterior be compressed once units are brought in one order?"""

from __future__ import annotations

from onebasin.studies.compact import dynamics, pruning, sigma, table, transpositions, width
from onebasin.studies.compact.plan import CompactPlan, plan
from onebasin.studies.compact.words import TERMS, summarise
from onebasin.studies.study import Study

__all__ = ["STUDY", "CompactPlan", "plan"]

STUDY = Study(
    "compact",
    "Compact posteriors: what is left of many networks in one mean and one deviation per weight",
    (transpositions.PART, dynamics.PART, table.PART, width.PART, sigma.PART, pruning.PART),
    summarise,
    TERMS,
)
