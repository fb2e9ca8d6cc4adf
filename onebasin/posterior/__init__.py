"""Posteriors over weights in closed form: Gaussians of several shapes, and mixtures of them."""

from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.diagonal import Diagonal
from onebasin.posterior.divergence import Divergence, kl, wasserstein2
from onebasin.posterior.fitting import fit
from onebasin.posterior.gaussian import Gaussian, Shape
from onebasin.posterior.low_rank import LowRank
from onebasin.posterior.posterior import Posterior, load_posterior

__all__ = [
    "Coordinates",
    "Diagonal",
    "Divergence",
    "Gaussian",
    "LowRank",
    "Posterior",
    "Shape",
    "fit",
    "kl",
    "load_posterior",
    "wasserstein2",
]
