"""Is the chain as warm as it should be? Two thermometers, one for momenta and one for positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.chains import BLOCK_VALUES, check_floating


def kinetic_temperature(momentum: Tensor, mass: float | Tensor = 1.0) -> Tensor:
    """Mean of p_i^2 / m_i over the d parameters: T in expectation for momenta p_i ~ N(0, T m_i).

    The variance of one such draw is 2 T^2 / d.

    Args:
        momentum: (..., d).
        mass: a positive number, or one per parameter (d,).

    Returns:
        The temperature of each draw, float64 (...).

    Raises:
        InputError: shapes do not fit, or a mass is not positive.

    >>> kinetic_temperature(torch.tensor([[2.0, 2.0], [1.0, 3.0]]), mass=2.0)
    tensor([2.0000, 2.5000], dtype=torch.float64)
    """
    _check_parameters(momentum)
    masses = torch.as_tensor(mass, dtype=torch.float64, device=momentum.device).detach()
    if masses.shape not in ((), momentum.shape[-1:]) or not bool((masses > 0).all()):
        raise InputError(
            f"expected one positive mass or {momentum.shape[-1]} of them, one per parameter, found "
            f"shape {tuple(masses.shape)} with smallest {float(masses.min()) if masses.numel() else 'none'}; "
            "give masses of shape (d,) for momenta of shape (..., d)"
        )
    return _per_draw(lambda p: (p.square() / masses).mean(dim=1), momentum)


def configurational_temperature(position: Tensor, gradient: Tensor) -> Tensor:
    """Mean of theta_i dU/dtheta_i over the d parameters: T in expectation for draws of exp(-U / T).

    By the virial theorem it holds for every U that grows fast enough, and without knowing its normalisation; for
    a single draw the value scatters, and only its mean over draws is a temperature.

    Args:
        position: theta (..., d).
        gradient: dU/dtheta there (..., d), of the energy that includes the prior.

    Returns:
        The temperature of each draw, float64 (...).

    Raises:
        InputError: shapes do not fit.

    >>> configurational_temperature(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 1.0]))
    tensor(2.5000, dtype=torch.float64)
    """
    _check_parameters(position)
    _check_parameters(gradient)
    if position.shape != gradient.shape:
        raise InputError(
            f"expected positions and gradients of one shape, found {tuple(position.shape)} and "
            f"{tuple(gradient.shape)}; give the gradient at each position"
        )
    return _per_draw(lambda theta, slope: (theta * slope).mean(dim=1), position, gradient)


def _check_parameters(values: Tensor) -> None:
    if values.dim() < 1 or values.shape[-1] < 1:
        raise InputError(
            f"expected a tensor (..., d) with parameters on its last axis, found shape {tuple(values.shape)}; "
            "flatten the parameters of each draw into one axis"
        )
    check_floating(values)


def _per_draw(statistic: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply `statistic`, (draws, d) -> (draws,), to float64 blocks of draws."""
    *shape, parameters = tensors[0].shape
    rows = [tensor.detach().reshape(-1, parameters) for tensor in tensors]
    # Filled in place: small results kept between large blocks would keep the allocator from using their memory again.
    result = rows[0].new_empty(len(rows[0]), dtype=torch.float64)
    step = max(1, BLOCK_VALUES // parameters)
    for start in range(0, len(result), step):
        part = slice(start, start + step)
        result[part] = statistic(*(row[part].to(torch.float64) for row in rows))
    return result.reshape(shape)
