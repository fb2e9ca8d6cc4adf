"""onebasin: a crowd of neural networks becomes one posterior you can read.

What is listed here is the public interface; anything else may change without notice.
"""

from onebasin import errors
from onebasin.align import (
    align,
    balance,
    barrier,
    barrier_report,
    canonicalise,
    exchangeability,
    match,
    match_activations,
    merge,
    transpositions,
)
from onebasin.errors import OnebasinError
from onebasin.population import Population
from onebasin.state import State
from onebasin.symmetry import Element, Leg, Proof, Space, Symmetry, discover, verify

__all__ = [
    "Element",
    "Leg",
    "OnebasinError",
    "Population",
    "Proof",
    "Space",
    "State",
    "Symmetry",
    "align",
    "balance",
    "barrier",
    "barrier_report",
    "canonicalise",
    "discover",
    "errors",
    "exchangeability",
    "match",
    "match_activations",
    "merge",
    "transpositions",
    "verify",
]
