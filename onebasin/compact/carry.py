"""A posterior moved along the orbit: the same density over functions, written in another basin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from onebasin.errors import InputError, SymmetryError
from onebasin.population import Population
from onebasin.posterior import Coordinates, Diagonal, Gaussian, LowRank, Posterior, Shape
from onebasin.state import State
from onebasin.symmetry import Element, Symmetry


def carried(posterior: Posterior, element: Element, symmetry: Symmetry) -> Posterior:
    """Move a posterior by an element: draws of the result are moved draws of the original.

    With weights w -> m w for factors m (and a new order), centres and directions move like weights and standard
    deviations by |m|; running statistics follow their units. The density at a moved network is that of the original
    divided by the product of all |m|, which is 1 for permutations and signs.

    Args:
        posterior: a mixture of diagonal or low-rank Gaussians.
        element: one for all components, or a batch with one for each.
        symmetry: the group it belongs to.

    Raises:
        SymmetryError: the element does not belong to the symmetry, or there are too few or many.
        InputError: a component has a spread of another kind, which would not keep it when moved.
    """
    if element.members not in (None, len(posterior.components)):
        raise SymmetryError(
            f"{element.members} elements cannot move {len(posterior.components)} components; give one for each, or a "
            "single one for all."
        )
    moved, rests = [], []
    for index, (component, rest) in enumerate(zip(posterior.components, posterior.rest, strict=True)):
        own = element if element.members is None else element.member(index)
        gaussian, beside = _moved(component, rest, own, symmetry, posterior.layout)
        moved.append(gaussian)
        rests.append(beside)
    provenance = {**posterior.provenance, "carried": True}
    return replace(posterior, components=tuple(moved), rest=tuple(rests), provenance=provenance)


def _moved(
    component: Gaussian, rest: State, element: Element, symmetry: Symmetry, layout: Coordinates
) -> tuple[Gaussian, State]:
    whole = symmetry.apply(element, _one(layout, component.centre, rest))
    beside = {name: whole[name] for name in layout.others}
    return Gaussian(_vectors(layout, whole), _moved_shape(component.shape, rest, element, symmetry, layout)), beside


def _moved_shape(shape: Shape, rest: State, element: Element, symmetry: Symmetry, layout: Coordinates) -> Shape:
    if not isinstance(shape, Diagonal | LowRank):
        raise InputError(
            f"expected diagonal or low-rank Gaussians to move, found a {shape.kind} one: draw networks from it, move "
            "them, and fit a Gaussian to them"
        )
    spread = _one(layout, shape.scale, rest)
    scale = _vectors(layout, symmetry.apply(element, spread, kind="std"))
    if isinstance(shape, Diagonal):
        return Diagonal(scale)
    if not shape.factor.shape[1]:
        return LowRank(scale, shape.factor)
    columns = Population.from_stacked(_laid_out(layout, shape.factor.T, rest))
    moved = symmetry.apply(element, columns).stacked()
    return LowRank(scale, torch.cat([moved[name].flatten(1) for name in layout.names], 1).T.contiguous())


def _laid_out(layout: Coordinates, flat: Tensor, rest: Mapping[str, Tensor]) -> State:
    """Vectors (n, D) as whole networks in the dtype of the vectors; the rest beside each of them."""
    return layout.laid_out(flat, {name: rest[name].expand(len(flat), *rest[name].shape) for name in layout.others})


def _one(layout: Coordinates, flat: Tensor, rest: Mapping[str, Tensor]) -> State:
    """A vector (D,) as one network."""
    return {name: value[0] for name, value in _laid_out(layout, flat[None], rest).items()}


def _vectors(layout: Coordinates, state: Mapping[str, Tensor]) -> Tensor:
    """The vector (D,) of one network, in its own dtype."""
    return torch.cat([state[name].reshape(-1) for name in layout.names])
