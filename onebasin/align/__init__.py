"""Which member of the orbit do we look at?"""

from onebasin.align.crowd.align import Alignment, align
from onebasin.align.exchangeability import exchangeability
from onebasin.align.form.canonical import canonicalise
from onebasin.align.pair.match import Match, match
from onebasin.align.path.connect import barrier
from onebasin.align.path.merge import merge
from onebasin.align.path.report import barrier_report
from onebasin.align.scale.balance import balance
from onebasin.align.senses.activity import ActivationMatch, match_activations
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
