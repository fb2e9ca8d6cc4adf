"""Draws of Markov chains as a tensor: what fits, how it is walked through in blocks, how chains are split.

Everywhere the shape is (chains, draws, *shape), and each place of `shape` is a parameter that is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from onebasin.errors import InputError

FEWEST_DRAWS = 4  # each half of a chain needs two for a variance
BLOCK_VALUES = 1 << 18  # in float64 2 MiB, of which a statistic holds about a dozen


def check_draws(values: Tensor, shape: str = "(chains, draws, *shape)") -> None:
    """Refuse what is not a tensor of draws.

    Raises:
        InputError: `values` has no axes of chains and draws, no chain, too few draws, or is not real and floating.
    """
    if values.dim() < 2 or values.shape[0] < 1 or values.shape[1] < FEWEST_DRAWS:
        raise InputError(
            f"expected draws of shape {shape} with at least one chain and {FEWEST_DRAWS} draws, "
            f"found shape {tuple(values.shape)}; run the chains longer, or give a single chain as values[None]"
        )
    check_floating(values)


def check_floating(values: Tensor) -> None:
    """Refuse integers, booleans and complex numbers.

    Raises:
        InputError: `values` is of such a type.
    """
    if not values.is_floating_point():
        raise InputError(
            f"expected a floating tensor, found {values.dtype}; convert it with .double() if that is meant"
        )


def per_parameter(values: Tensor, statistic: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `statistic` to every parameter, in blocks of parameters that bound the memory.

    Args:
        values: draws (chains, draws, *shape), of any floating dtype.
        statistic: float64 draws (parameters, chains, draws) -> (parameters,).

    Returns:
        The statistic, float64 (*shape); NaN for a parameter with a value that is not finite.

    Raises:
        InputError: `values` does not fit, see `check_draws`.

    >>> per_parameter(torch.arange(24.0).reshape(1, 4, 2, 3), lambda block: block.amax((1, 2)))
    tensor([[18., 19., 20.],
            [21., 22., 23.]], dtype=torch.float64)
    """
    check_draws(values)
    chains, draws, *shape = values.shape
    parameters = values.detach().reshape(chains, draws, math.prod(shape))
    result = parameters.new_empty(parameters.shape[2], dtype=torch.float64)
    step = max(1, BLOCK_VALUES // (chains * draws))
    for start in range(0, len(result), step):
        part = parameters[:, :, start : start + step].permute(2, 0, 1)
        block = part.to(torch.float64, memory_format=torch.contiguous_format)
        finite = block.isfinite().flatten(1).all(dim=1)
        result[start : start + step] = statistic(block).masked_fill_(~finite, torch.nan)
    return result.reshape(shape)


def halves(block: Tensor) -> Tensor:
    """Split chains (parameters, chains, draws) into (parameters, 2 chains, draws // 2).

    A chain that drifts disagrees with itself; an odd chain loses the draw in its middle.

    >>> halves(torch.arange(5.0).reshape(1, 1, 5))
    tensor([[[0., 1.],
             [3., 4.]]])
    """
    half = block.shape[-1] // 2
    return torch.cat([block[..., :half], block[..., -half:]], dim=1)
