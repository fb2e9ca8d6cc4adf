"""Kronecker factors of the curvature of linear and convolution layers (KFAC, in its "expand" form).

The block of a weight matrix is  (sum over n, t of g g^T) kron (mean over n, t of a a^T)  with the inputs a and the
slopes g of its layer for example n and place t. The bias has the first factor alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from onebasin.inference.curvature.layers import Layer, add_to, input_rows, output_rows, passes
from onebasin.inference.curvature.rows import Seen


class Factors(NamedTuple):
    """The two factors of a layer.

    Attributes:
        slopes: sum of g g^T (p, p), float64.
        inputs: mean of a a^T (q, q), float64.
    """

    slopes: Tensor
    inputs: Tensor


def kronecker_factors(seen: Seen, layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """The factors of these layers over the whole data; products in float64 keep the rank of few examples."""
    slopes: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for found in passes(seen, layers):
        for name, given in found.inputs.items():
            rows = input_rows(layers[name].module, given).flatten(0, 1).double()
            places = len(rows) / found.examples
            add_to(inputs, name, rows.T @ rows / (places * seen.target.examples))
        for each in found.slopes:
            for name, slope in each.items():
                rows = output_rows(layers[name].module, slope).flatten(0, 1).double()
                add_to(slopes, name, rows.T @ rows)
    return {name: Factors(slopes[name], inputs[name]) for name in layers}
