"""Weights of the members of an implicit ensemble: few numbers and shared tensors become one tensor (M, *shape).

`weight` is that of a linear layer (outputs, inputs), of a convolution (outputs, inputs / groups, *kernel) or of a
transposed convolution (inputs, outputs / groups, *kernel).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from onebasin.inference.layers import columns, rows


def scaled_weights(
    layer: nn.Module, weight: Tensor, inputs: Tensor | None = None, outputs: Tensor | None = None
) -> Tensor:
    """The weights W_m = diag(outputs_m) W diag(inputs_m) of every member, (M, *weight.shape).

    With outputs y = s_m * (W (r_m * x)): a layer whose inputs and outputs are multiplied by factors of the member is
    one layer with these weights. Factors of zero and one are masks.

    Args:
        layer: the linear layer or convolution, whose weight may be another.
        weight: what the members share.
        inputs: factors r (M, inputs) of the layer's inputs; None for ones.
        outputs: factors s (M, outputs) of the layer's outputs; None for ones.

    >>> scaled_weights(nn.Linear(2, 2), torch.ones(2, 2), torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([[[1., 0.],
             [3., 0.]]])
    """
    result = weight[None]
    if outputs is not None:
        result = result * vmap(lambda factor: rows(layer, factor))(outputs.to(weight))
    if inputs is not None:
        result = result * vmap(lambda factor: cast(Tensor, columns(layer, factor)))(inputs.to(weight))
    return result


def slot_sums(weight: Tensor, members: int) -> Tensor:
    """The sum over the M slots of a first layer that takes M inputs side by side: (outputs, inputs, *kernel).

    When all slots hold one input, sum_m W_m x = (sum_m W_m) x.

    Args:
        weight: (outputs, M * inputs, *kernel), slots in turn.
        members: M.

    >>> slot_sums(torch.tensor([[1.0, 2.0, 30.0, 40.0]]), 2)
    tensor([[31., 42.]])
    """
    return weight.reshape(len(weight), members, -1, *weight.shape[2:]).sum(1)


def member_rows(tensor: Tensor, members: int) -> Tensor:
    """The rows of each member, which lie in turn on the first axis: (M * n, ...) to (M, n, ...).

    >>> member_rows(torch.arange(4), 2).tolist()
    [[0, 1], [2, 3]]
    """
    return tensor.reshape(members, -1, *tensor.shape[1:])


def block_diagonal(weight: Tensor, columns: int, groups: int = 1) -> Tensor:
    """The weight of fewer groups that computes what this one with more groups does: zeros between the groups.

    Args:
        weight: (rows, columns / f, *kernel) of a layer with f * groups groups.
        columns: how many columns the result has; f follows.
        groups: of the result.

    Returns:
        (rows, columns, *kernel).

    >>> block_diagonal(torch.tensor([[1.0], [2.0]]), columns=2)
    tensor([[1., 0.],
            [0., 2.]])
    """
    rows, width = weight.shape[:2]
    finer = columns // width  # groups in the place of one
    group = torch.arange(rows, device=weight.device) // (rows // (groups * finer))
    place = (group % finer)[:, None] * width + torch.arange(width, device=weight.device)
    index = place.reshape(rows, width, *(1,) * (weight.dim() - 2)).expand_as(weight)
    return weight.new_zeros(rows, columns, *weight.shape[2:]).scatter(1, index, weight)
