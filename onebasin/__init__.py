"""onebasin: a crowd of neural networks becomes one posterior you can read.

What is listed here is the public interface; anything else may change without notice. Names are imported when they are
first asked for: reading a stored record needs no torch, and no command waits for rooms that it does not enter.
"""

from typing import TYPE_CHECKING

from onebasin.doorway import opened

if TYPE_CHECKING:
    __version__: str
    from onebasin import cluster, compact, errors, metrics, pruning
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
    from onebasin.assess import evaluate
    from onebasin.compact import refine
    from onebasin.discrepancy import discrepancy
    from onebasin.diversity import diversity
    from onebasin.errors import OnebasinError
    from onebasin.inference import LearnedNoise, approximate, diagnose, sample
    from onebasin.population import Population
    from onebasin.posterior import Posterior, fit, load_posterior
    from onebasin.predict.predicting import predict
    from onebasin.pruning import prune
    from onebasin.state import State
    from onebasin.symmetry import Element, Leg, Proof, Space, Symmetry, discover, verify

_HOMES = {
    "align": (
        "align", "balance", "barrier", "barrier_report", "canonicalise", "exchangeability", "match",
        "match_activations", "merge", "transpositions",
    ),
    "assess": ("evaluate",),
    "cluster": ("[cluster]",),
    "compact": ("[compact]", "refine"),
    "discrepancy": ("discrepancy",),
    "diversity": ("diversity",),
    "errors": ("[errors]", "OnebasinError"),
    "inference": ("LearnedNoise", "approximate", "diagnose", "sample"),
    "metrics": ("[metrics]",),
    "population": ("Population",),
    "posterior": ("Posterior", "fit", "load_posterior"),
    "predict.predicting": ("predict",),
    "pruning": ("[pruning]", "prune"),
    "state": ("State",),
    "symmetry": ("Element", "Leg", "Proof", "Space", "Symmetry", "discover", "verify"),
}  # fmt: skip
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
    "cluster",
    "compact",
    "diagnose",
    "discover",
    "discrepancy",
    "diversity",
    "errors",
    "evaluate",
    "exchangeability",
    "fit",
    "load_posterior",
    "match",
    "match_activations",
    "merge",
    "metrics",
    "predict",
    "prune",
    "pruning",
    "refine",
    "sample",
    "transpositions",
    "verify",
]

# Not as names: a type checker that saw __getattr__ would believe in every name.
globals()["__getattr__"], globals()["__dir__"] = opened(__name__, _HOMES, __all__)
