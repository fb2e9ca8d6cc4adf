"""Which member of the orbit do we look at?"""

from onebasin.align.activity import ActivationMatch, match_activations
from onebasin.align.align import Alignment, align
from onebasin.align.balance import balance
from onebasin.align.canonical import canonicalise
from onebasin.align.connect import barrier
from onebasin.align.exchangeability import exchangeability
from onebasin.align.match import Match, match
from onebasin.align.merge import merge
from onebasin.align.report import barrier_report
from onebasin.align.transpositions import transpositions

__all__ = [
    "ActivationMatch",
    "Alignment",
    "Match",
    "align",
    "balance",
    "barrier",
    "barrier_report",
    "canonicalise",
    "exchangeability",
    "match",
    "match_activations",
    "merge",
    "transpositions",
]
