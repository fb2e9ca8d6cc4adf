"""Compact densities over weights: fit, refine, compare, draw, predict with, prune."""

from onebasin.posterior.distance import Distance, carried, distance, stitch
from onebasin.posterior.divergence import Divergence, kl, wasserstein2
from onebasin.posterior.families import GAUSSIANS, Family, FitOptions
from onebasin.posterior.fidelity import EXAMPLES, Fidelities, Fidelity, fidelity, some_of, warnings_of
from onebasin.posterior.figures import LayerMap
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
from onebasin.posterior.layout import FlatLayout, flat_layout
from onebasin.posterior.linearise import OutputGaussian, linearise
from onebasin.posterior.moments import Deviations
from onebasin.posterior.narrow import narrow
from onebasin.posterior.orbit import OrbitDensity, orbit_log_density
from onebasin.posterior.output_map import OutputMap
from onebasin.posterior.posterior import FORMAT, Posterior, is_posterior, layer_map, load_posterior, read_parts
from onebasin.posterior.predict import (
    LINEARISED,
    Linearised,
    Networks,
    Predictive,
    PredictOptions,
    Quantity,
    check_classes,
    check_linearised,
    check_nan,
    first_of,
    forward_passes,
    networks_of,
    predict,
    stale_statistics,
)
from onebasin.posterior.prior_shares import PriorShares, prior_shares
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
from onebasin.posterior.refine import fit_scales, refine
from onebasin.posterior.units import Removal, remove_units, resized

__all__ = [
    "CRITERIA",
    "EXAMPLES",
    "FAMILIES",
    "FORMAT",
    "GAUSSIANS",
    "LEVELS",
    "LINEARISED",
    "SCOPES",
    "Block",
    "Covariance",
    "Deviations",
    "Diagonal",
    "Distance",
    "Divergence",
    "Family",
    "Fidelities",
    "Fidelity",
    "FitOptions",
    "FlatLayout",
    "Full",
    "Gaussian",
    "Kronecker",
    "LayerMap",
    "Linearised",
    "LowRank",
    "Masks",
    "Networks",
    "OrbitDensity",
    "OutputGaussian",
    "OutputMap",
    "Partial",
    "Point",
    "Posterior",
    "PredictOptions",
    "Predictive",
    "PriorShares",
    "PruningCurve",
    "Quantity",
    "Removal",
    "carried",
    "check_classes",
    "check_linearised",
    "check_nan",
    "distance",
    "fidelity",
    "first_of",
    "fit",
    "fit_scales",
    "flat_layout",
    "forward_passes",
    "is_posterior",
    "kl",
    "layer_map",
    "linearise",
    "load_posterior",
    "narrow",
    "networks_of",
    "one_of_each",
    "orbit_log_density",
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
