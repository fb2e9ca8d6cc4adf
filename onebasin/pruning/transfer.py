"""Masks and standard deviations of one network, moved into the basis of another before they are used there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor, nn

from onebasin.align import match, match_activations
from onebasin.errors import InputError
from onebasin.posterior import Diagonal, Gaussian, Posterior
from onebasin.pruning.masks import Masks
from onebasin.state import as_state
from onebasin.symmetry import Symmetry

Network = Mapping[str, Tensor] | nn.Module


@overload
def transfer(
    what: Masks, onto: Network, symmetry: Symmetry, reference: Network | None = ..., *,
    scale: str = ..., model: nn.Module | None = ..., inputs: Any = ...,
) -> Masks: ...  # fmt: skip


@overload
def transfer(
    what: Posterior, onto: Network, symmetry: Symmetry, reference: Network | None = ..., *,
    scale: str = ..., model: nn.Module | None = ..., inputs: Any = ...,
) -> Posterior: ...  # fmt: skip


def transfer(
    what: Masks | Posterior,
    onto: Network,
    symmetry: Symmetry,
    reference: Network | None = None,
    *,
    scale: str = "keep",
    model: nn.Module | None = None,
    inputs: Any = None,
) -> Masks | Posterior:
    """Move masks, or the standard deviations of a posterior, from their network to another one.

    Unit 3 of one network is unit 17 of another. The reference is matched to the other network, and what belongs to
    its units goes along; used as it is, a mask would hit weights at random.

    Args:
        what: masks in the basis of `reference`, or a posterior.
        onto: the network that is to be pruned; it is not changed.
        symmetry: found by `discover` for the architecture.
        reference: the network that the masks were made for; of a posterior its mean by default.
        scale: "keep" moves standard deviations with permutations and signs only; "reference" also gives them the
            scales that the other network has, as they must be where the two were trained or rescaled differently. Units
            that a posterior left at its prior have no scale of their own, and get an arbitrary one that way.
        model: match by activations instead of weights (scales are kept then): the function, with
        inputs: the examples to compare units on.

    Returns:
        Masks for `onto`; or of a posterior a diagonal Gaussian around `onto` with the standard deviations of its
        counterparts, which `prune` ranks by any criterion.
    """
    network = as_state(onto)
    if reference is None:
        if not isinstance(what, Posterior):
            raise InputError("masks do not know their network, found no reference: give the network they were made for")
        reference = what.mean
    if (model is None) != (inputs is None):
        raise InputError("matching by activations runs the model on inputs, found only one of them: give both, or none")
    if model is None:
        element = match(network, reference, symmetry, scale=scale).element
    else:
        element = match_activations(model, network, reference, symmetry, inputs).element
    if isinstance(what, Masks):
        return what.carried(element, symmetry)
    layout = what.layout
    std = symmetry.apply(element, {**what.std, **layout.shaped(what.flat_std)}, kind="std")
    gaussian = Gaussian(layout.flat(network), Diagonal(layout.flat(std)))
    return Posterior.equal([gaussian], layout, [network], provenance={"transferred": dict(what.provenance)})
