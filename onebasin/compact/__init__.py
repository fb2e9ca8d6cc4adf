"""Posteriors that are small and good: moved, stitched, and judged with the basins in mind."""

from onebasin.compact.basin import Distance, distance
from onebasin.compact.carry import carried
from onebasin.compact.fidelity import Fidelity, fidelity
from onebasin.compact.orbit import OrbitDensity, orbit_log_density
from onebasin.compact.refine import calibrate, refine
from onebasin.compact.shares import PriorShares, prior_shares
from onebasin.compact.stitch import stitch

__all__ = [
    "Distance",
    "Fidelity",
    "OrbitDensity",
    "PriorShares",
    "calibrate",
    "carried",
    "distance",
    "fidelity",
    "orbit_log_density",
    "prior_shares",
    "refine",
    "stitch",
]
