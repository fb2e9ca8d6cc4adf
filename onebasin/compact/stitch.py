"""The mean of one posterior with the spread of another, brought into one basin first."""

from __future__ import annotations

from dataclasses import replace

from onebasin.compact.basin import onto
from onebasin.compact.carry import carried
from onebasin.errors import InputError
from onebasin.posterior import Gaussian, Posterior
from onebasin.state import check_spec
from onebasin.symmetry import Element, Symmetry


def stitch(
    mean_of: Posterior,
    sigma_of: Posterior,
    symmetry: Symmetry,
    *,
    element: Element | None = None,
    by: str = "weights",
) -> Posterior:
    """A Gaussian with the mean of one posterior and the spread of another, moved onto it first.

    A spread belongs to the basin in which it was found: without the move, the standard deviation of one unit would be
    given to another.

    Args:
        mean_of: gives centre, running statistics and dtype; one Gaussian.
        sigma_of: gives the spread, diagonal or low rank; one Gaussian over the same weights.
        symmetry: of their architecture.
        element: how `sigma_of` is to be moved; by default the match of both means.
        by: what that match compares: "weights" (the means), or "spread" (means and standard deviations).

    Raises:
        InputError: one of them is a mixture, or they are over other weights.
    """
    for which, posterior in (("mean", mean_of), ("spread", sigma_of)):
        if len(posterior.components) > 1:
            raise InputError(
                f"expected one Gaussian to take the {which} of, found a mixture of {len(posterior.components)}: fit a "
                "diagonal or low-rank Gaussian"
            )
    check_spec(sigma_of.spec, mean_of.spec, where="the posterior that gives the spread")
    if mean_of.layout.names != sigma_of.layout.names:
        raise InputError(
            "expected posteriors over the same weights, found other uncertain tensors in the second: fit both with "
            "the same model"
        )
    found = onto(mean_of, sigma_of, symmetry, by=by) if element is None else element
    moved = carried(sigma_of, found, symmetry)
    provenance = {"mean of": dict(mean_of.provenance), "spread of": dict(sigma_of.provenance)}
    gaussian = Gaussian(mean_of.components[0].centre, moved.components[0].shape)
    constant = {"constant_statistics": sorted(mean_of.constant_statistics)} if mean_of.constant_statistics else {}
    return replace(mean_of, components=(gaussian,), provenance={"stitch": provenance, **constant})
