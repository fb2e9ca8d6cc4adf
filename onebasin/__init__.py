"""onebasin: many neural networks of one architecture become one posterior that can be read.

What is listed here is the public interface; anything else may change without notice. A name is imported when it is
first asked for, so that reading a stored record needs no torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from onebasin import data, errors, examples, metrics, parallel, reporting, storage
    from onebasin.alignment import (
        Alignment,
        Exchangeability,
        Persistence,
        align,
        balance,
        barrier,
        barrier_report,
        canonicalise,
        canonicalize,
        element_with,
        exchangeability,
        expected_transpositions,
        imbalance,
        match,
        match_activations,
        merge,
        persistence,
        transpositions,
        uniformity,
    )
    from onebasin.errors import OnebasinError
    from onebasin.evaluation import (
        Diversity,
        Estimate,
        Evaluation,
        Resampled,
        Side,
        correlation_of_pairs,
        discrepancy,
        diversity,
        evaluate,
        mean_of_pairs,
        same_run_share,
    )
    from onebasin.functional import global_seed, losses
    from onebasin.inference import (
        LearnedNoise,
        Mixing,
        approximate,
        chain_rows,
        derived,
        diagnose,
        fresh,
        generator,
        mixing,
        sample,
    )
    from onebasin.population import Population, write_archives
    from onebasin.posterior import (
        LEVELS,
        Distance,
        Masks,
        Posterior,
        calibrate,
        carried,
        distance,
        fidelity,
        fit,
        load_posterior,
        orbit_log_density,
        predict,
        prior_shares,
        prune,
        pruning_curve,
        refine,
        remove_units,
        resized,
        stitch,
        transfer,
    )
    from onebasin.state import State, interpolate
    from onebasin.symmetry import Element, Leg, Proof, Space, Symmetry, discover, verify

_HOMES = {
    "alignment": (
        "Alignment",
        "Exchangeability",
        "Persistence",
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
        "match",
        "match_activations",
        "merge",
        "persistence",
        "transpositions",
        "uniformity",
    ),
    "errors": ("OnebasinError",),
    "evaluation": (
        "Diversity",
        "Estimate",
        "Evaluation",
        "Resampled",
        "Side",
        "correlation_of_pairs",
        "discrepancy",
        "diversity",
        "evaluate",
        "mean_of_pairs",
        "same_run_share",
    ),
    "functional": (
        "global_seed",
        "losses",
    ),
    "inference": (
        "LearnedNoise",
        "Mixing",
        "approximate",
        "chain_rows",
        "derived",
        "diagnose",
        "fresh",
        "generator",
        "mixing",
        "sample",
    ),
    "population": (
        "Population",
        "write_archives",
    ),
    "posterior": (
        "Distance",
        "LEVELS",
        "Masks",
        "Posterior",
        "calibrate",
        "carried",
        "distance",
        "fidelity",
        "fit",
        "load_posterior",
        "orbit_log_density",
        "predict",
        "prior_shares",
        "prune",
        "pruning_curve",
        "refine",
        "remove_units",
        "resized",
        "stitch",
        "transfer",
    ),
    "state": (
        "State",
        "interpolate",
    ),
    "symmetry": (
        "Element",
        "Leg",
        "Proof",
        "Space",
        "Symmetry",
        "discover",
        "verify",
    ),
}
_PACKAGES = ("data", "errors", "examples", "metrics", "parallel", "reporting", "storage")
__all__ = [
    "LEVELS",
    "Alignment",
    "Distance",
    "Diversity",
    "Element",
    "Estimate",
    "Evaluation",
    "Exchangeability",
    "LearnedNoise",
    "Leg",
    "Masks",
    "Mixing",
    "OnebasinError",
    "Persistence",
    "Population",
    "Posterior",
    "Proof",
    "Resampled",
    "Side",
    "Space",
    "State",
    "Symmetry",
    "align",
    "approximate",
    "balance",
    "barrier",
    "barrier_report",
    "calibrate",
    "canonicalise",
    "canonicalize",
    "carried",
    "chain_rows",
    "correlation_of_pairs",
    "data",
    "derived",
    "diagnose",
    "discover",
    "discrepancy",
    "distance",
    "diversity",
    "element_with",
    "errors",
    "evaluate",
    "examples",
    "exchangeability",
    "expected_transpositions",
    "fidelity",
    "fit",
    "fresh",
    "generator",
    "global_seed",
    "imbalance",
    "interpolate",
    "load_posterior",
    "losses",
    "match",
    "match_activations",
    "mean_of_pairs",
    "merge",
    "metrics",
    "mixing",
    "orbit_log_density",
    "parallel",
    "persistence",
    "predict",
    "prior_shares",
    "prune",
    "pruning_curve",
    "refine",
    "remove_units",
    "reporting",
    "resized",
    "same_run_share",
    "sample",
    "stitch",
    "storage",
    "transfer",
    "transpositions",
    "uniformity",
    "verify",
    "write_archives",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the package where it is defined."""
    if name == "__version__":
        return version(__name__)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    for package, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{package}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted({*globals(), *__all__})
