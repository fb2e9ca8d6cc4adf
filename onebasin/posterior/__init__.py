"""Compact densities over weights: fit, refine, compare, draw, predict with, prune."""

from onebasin.posterior.calibrate import PriorShares, prior_shares
from onebasin.posterior.distance import Distance, carried, distance, stitch
from onebasin.posterior.divergence import Divergence, kl, wasserstein2
from onebasin.posterior.fidelity import EXAMPLES, Fidelity, fidelity, some_of, warnings_of
from onebasin.posterior.fit import FAMILIES, fit
from onebasin.posterior.gaussian import (
    Block,
    Covariance,
    Diagonal,
    Full,
    Gaussian,
    Kronecker,
    LowRank,
    Partial,
    one_of_each,
)
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.orbit import OrbitDensity, orbit_log_density
from onebasin.posterior.posterior import FORMAT, Posterior, load_posterior, read_parts
from onebasin.posterior.predictive import (
    Networks,
    Output,
    PredictOptions,
    check_classes,
    check_nan,
    check_output,
    first_of,
    needs,
    networks_of,
    passes,
    predict,
    stale_statistics,
)
from onebasin.posterior.pruning import (
    CRITERIA,
    LEVELS,
    SCOPES,
    Masks,
    Point,
    PruningCurve,
    prune,
    pruning_curve,
    transfer,
)
from onebasin.posterior.refine import calibrate, refine
from onebasin.posterior.units import Removal, remove_units, resized

__all__ = [
    "CRITERIA",
    "EXAMPLES",
    "FAMILIES",
    "FORMAT",
    "LEVELS",
    "SCOPES",
    "Block",
    "Covariance",
    "Diagonal",
    "Distance",
    "Divergence",
    "Fidelity",
    "FlatLayout",
    "Full",
    "Gaussian",
    "Kronecker",
    "LowRank",
    "Masks",
    "Networks",
    "OrbitDensity",
    "Output",
    "Partial",
    "Point",
    "Posterior",
    "PredictOptions",
    "PriorShares",
    "PruningCurve",
    "Removal",
    "calibrate",
    "carried",
    "check_classes",
    "check_nan",
    "check_output",
    "distance",
    "fidelity",
    "first_of",
    "fit",
    "kl",
    "load_posterior",
    "needs",
    "networks_of",
    "one_of_each",
    "orbit_log_density",
    "passes",
    "predict",
    "prior_shares",
    "prune",
    "pruning_curve",
    "read_parts",
    "refine",
    "remove_units",
    "resized",
    "some_of",
    "stale_statistics",
    "stitch",
    "transfer",
    "warnings_of",
    "wasserstein2",
]
