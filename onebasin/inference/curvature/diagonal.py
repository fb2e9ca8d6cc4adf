"""The exact diagonal of the generalised Gauss-Newton matrix: for each weight the sum of its squared derivatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onebasin.inference.curvature.layers import (
    Layer,
    add_to,
    input_rows,
    known_layers,
    output_rows,
    passes,
    tensor_names,
)
from onebasin.inference.curvature.rows import Seen, rows

_ENTRIES = 2**24  # numbers in the derivatives of one layer for some examples


def diagonal(seen: Seen, names: Sequence[str]) -> dict[str, Tensor]:
    """The diagonal over the tensors `names`, float64 vectors.

    Weights of linear and convolution layers take matrix products of what goes through the layer; other tensors take the
    Jacobian of every example.
    """
    layers = {
        name: layer
        for name, layer in (known_layers(seen).items() if names else ())
        if layer.leading and set(tensor_names(name)) & set(names)
    }
    found = {name: value.reshape(-1) for name, value in _of_layers(seen, layers).items()} if layers else {}
    others = [name for name in names if name not in found]
    if others:
        sizes = [seen.sampled[name].numel() for name in others]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=seen.target.layout.device)
        for piece in rows(seen, others):
            total += piece.square().sum(0)
        found |= dict(zip(others, total.split(sizes), strict=True))
    return {name: found[name] for name in names}


def _of_layers(seen: Seen, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for found in passes(seen, layers):
        given = {name: input_rows(layers[name].module, value) for name, value in found.inputs.items()}
        for slopes in found.slopes:
            for name, slope in slopes.items():
                weight, bias = tensor_names(name)
                own = output_rows(layers[name].module, slope)
                add_to(totals, weight, _squares(own, given[name]))
                add_to(totals, bias, own.sum(1).square().sum(0))
    return totals


def _squares(slopes: Tensor, inputs: Tensor) -> Tensor:
    """Sum over n of (sum over t of g a^T)^2, entry by entry (p, q), for slopes (n, t, p) and inputs (n, t, q)."""
    if slopes.shape[1] == 1:
        return slopes[:, 0].square().T @ inputs[:, 0].square()
    size = max(1, _ENTRIES // (slopes.shape[2] * inputs.shape[2]))
    pieces = zip(slopes.split(size), inputs.split(size), strict=True)
    return torch.stack([(own.mT @ given).square().sum(0) for own, given in pieces]).sum(0)
