"""Laplace approximations that laplace-torch fitted, as posteriors of onebasin; laplace-torch itself is not imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.inference.target import ParameterLayout
from onebasin.posterior import Block, Covariance, Diagonal, Full, Gaussian, Kronecker, Partial, Posterior


def from_laplace(fitted: Any, model: nn.Module) -> Posterior:
    """A fitted DiagLaplace, KronLaplace or FullLaplace, or its last-layer form, as a posterior of one component.

    Mean and covariance are those of the object, with its prior precision, noise and temperature as they are now.

    Args:
        fitted: what `laplace.Laplace(model, ...)` returned, after `fit`.
        model: the model it was fitted to; gives what is not uncertain.
    """
    try:
        precision, mean = fitted.posterior_precision, fitted.mean.detach()
    except AttributeError as error:
        raise InputError(
            f"expected a fitted Laplace object of laplace-torch with a posterior_precision, found "
            f"{type(fitted).__name__} ({error}): call its fit(loader) first, and use diag, kron or full"
        ) from error
    layout = ParameterLayout.of(model)
    names = _names(fitted, layout)
    sizes = [layout.spec[name].size for name in names]
    if mean.shape != (sum(sizes),):
        raise InputError(
            f"expected a Laplace object with a mean ({sum(sizes)},) for the weights of {type(model).__name__}, found "
            f"{tuple(mean.shape)}: call its fit(loader) first, and give the model it was fitted to"
        )
    shape = _shape(precision, sizes, mean.dtype)
    flat = layout.join({name: value.detach() for name, value in model.named_parameters()})
    places = layout.split(torch.arange(layout.size, device=layout.device))
    chosen = torch.cat([places[name].reshape(-1) for name in names])
    centre = flat.index_copy(0, chosen, mean.to(flat))
    whole = shape if len(names) == len(layout.names) else Partial(shape, chosen, layout.size)
    facts = {"method": "laplace-torch", "class": type(fitted).__name__}
    return Posterior.equal([Gaussian(centre, whole)], layout, [layout.buffers_of(model)], provenance=facts)


def _names(fitted: Any, layout: ParameterLayout) -> list[str]:
    """The tensors that the object is about, in the order of its vector."""
    if not hasattr(fitted.model, "last_layer"):
        return list(layout.names)
    prefix = fitted.model._last_layer_name
    names = [f"{prefix}.{name}" if prefix else name for name, _ in fitted.model.last_layer.named_parameters()]
    missing = [name for name in names if name not in layout.names]
    if missing:
        raise InputError(
            f"expected the last layer of the Laplace object among the model's parameters, found {missing[0]}, which is "
            "not: give the model it was fitted to, with all parameters requiring a gradient"
        )
    return names


def _shape(precision: Any, sizes: list[int], dtype: torch.dtype) -> Covariance:
    """The shape with this precision: a vector, a matrix, or decomposed Kronecker factors."""
    if isinstance(precision, Tensor):
        wide = precision.detach().double()
        return Full(Full.from_precision(wide).factor.to(dtype)) if wide.dim() == 2 else Diagonal(wide.rsqrt().to(dtype))
    if not hasattr(precision, "eigenvalues"):
        raise InputError(
            f"expected a diagonal, Kronecker-factored or full precision, found {type(precision).__name__}: fit with "
            'hessian_structure="diag", "kron" or "full"'
        )
    deltas = precision.deltas.detach().double().reshape(-1).expand(len(precision.eigenvalues))
    found = zip(precision.eigenvectors, precision.eigenvalues, deltas, strict=True)
    blocks = [_block(list(vectors), list(values), delta, precision.damping) for vectors, values, delta in found]
    if [block.scale.numel() for block in blocks] != sizes:
        raise InputError(
            f"expected one Kronecker block for each tensor, of sizes {sizes}, found "
            f"{[block.scale.numel() for block in blocks]}: give the model it was fitted to"
        )
    return Kronecker([Block(block.left, block.right, block.scale.to(dtype)) for block in blocks])


def _block(vectors: list[Tensor], values: list[Tensor], delta: Tensor, damping: bool) -> Block:
    """The covariance of one tensor; a bias has one factor, and damping adds the prior to the factors."""
    wide = [own.detach().double() for own in values]
    sides = [side.detach() for side in vectors]
    if len(wide) == 1:
        return Block(sides[0], None, (wide[0] + delta).rsqrt()[:, None])
    if damping:
        return Block(sides[0], sides[1], torch.outer(*(own + delta.sqrt() for own in wide)).rsqrt())
    return Block(sides[0], sides[1], (torch.outer(*wide) + delta).rsqrt())
