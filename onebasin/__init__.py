"""onebasin: a crowd of neural networks becomes one posterior you can read.

What is listed here is the public interface; anything else may change without notice.
"""

from onebasin import errors, metrics
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
from onebasin.inference import LearnedNoise, approximate, diagnose, sample
from onebasin.population import Population
from onebasin.posterior import Posterior, load_posterior
from onebasin.state import State
from onebasin.symmetry import Element, Leg, Proof, Space, Symmetry, discover, verify

__all__ = [
    "Element",
    "LearnedNoise",
    "Leg",
    "OnebasinError",
    "Population",
    "Posterior",
    "Proof",
    "Space",
    "State",
    "Symmetry",
    "align",
    "approximate",
    "balance",
    "barrier",
    "barrier_report",
    "canonicalise",
    "diagnose",
    "discover",
    "errors",
    "exchangeability",
    "load_posterior",
    "match",
    "match_activations",
    "merge",
    "metrics",
    "sample",
    "transpositions",
    "verify",
]
