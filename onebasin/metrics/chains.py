"""Diagnostics of Markov chains: R-hat, E-BFMI, effective sample sizes, temperatures of momenta and positions.

Draws are (chains, draws, *shape), and each place of `shape` is a parameter that is judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays

FEWEST_DRAWS = 4  # each half of a chain needs two for a variance
BLOCK_VALUES = 1 << 18  # in float64 2 MiB, of which a statistic holds about a dozen


def check_draws(values: Tensor, shape: str = "(chains, draws, *shape)") -> None:
    """Refuse what is not a tensor of draws."""
    if values.dim() < 2 or values.shape[0] < 1 or values.shape[1] < FEWEST_DRAWS:
        raise InputError(
            f"expected draws of shape {shape} with at least one chain and {FEWEST_DRAWS} draws, "
            f"found shape {tuple(values.shape)}; run the chains longer, or give a single chain as values[None]"
        )
    check_floating(values)


def check_floating(values: Tensor) -> None:
    """Refuse integers, booleans and complex numbers."""
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


def normal_scores(rows: Tensor) -> Tensor:
    """Replace each value of a row by z = Phi^-1((rank - 3/8) / (n + 1/4)); equal values share their mean rank.

    Args:
        rows: (rows, n), without NaN.

    Returns:
        The scores, float64 (rows, n).

    >>> normal_scores(torch.tensor([[3.0, 1.0, 2.0, 2.0]]))
    tensor([[ 1.0491, -1.0491,  0.0000,  0.0000]], dtype=torch.float64)
    """
    ascending, order = rows.sort(dim=1, stable=True)
    return scattered(_scores_in_order(ascending), order)


def bulk_and_folded_scores(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Normal scores of the values and of their distances |x - median| from the median of their row."""
    ascending, order = rows.sort(dim=1, stable=True)
    n = rows.shape[1]
    median = (ascending[:, (n - 1) // 2] + ascending[:, n // 2]) / 2
    # Distances in ascending order of values fall and rise again, and a stable sort merges two runs much faster.
    distances = (ascending - median[:, None]).abs()
    return scattered(_scores_in_order(ascending), order), scattered(normal_scores(distances), order)


def scattered(ordered: Tensor, order: Tensor) -> Tensor:
    """Put column i of `ordered` (rows, n) back to place order[i], undoing a sort."""
    return torch.empty_like(ordered).scatter_(1, order, ordered)


def _scores_in_order(ascending: Tensor) -> Tensor:
    n = ascending.shape[1]
    place = torch.arange(n, device=ascending.device).expand_as(ascending)
    rises = ascending[:, 1:] != ascending[:, :-1]
    first, last = place.clone(), place.clone()  # of the run of equal values around each place
    first[:, 1:] *= rises
    last[:, :-1].masked_fill_(~rises, n - 1)
    first = first.cummax(dim=1).values
    last = last.flip(1).cummin(dim=1).values.flip(1)
    # The mean rank is 1 + (first + last) / 2: few distinct values, so that their scores are looked up.
    ranks = 1 + torch.arange(2 * n - 1, dtype=torch.float64, device=ascending.device) / 2
    scores: Tensor = torch.special.ndtri((ranks - 3 / 8) / (n + 1 / 4))
    return scores[first + last]


@accepts_arrays
def rhat(values: Tensor, method: Literal["rank", "split"] = "rank") -> Tensor:
    """Potential scale reduction: near 1 where chains agree, above 1.01 where they should run longer.

    Chains are split in halves. With n draws in each of the m halves, s_j^2 their variances and x_j their means,

        W = mean_j s_j^2,   B = n var_j x_j,   R-hat = sqrt((B / W + n - 1) / n).

    "rank" is the larger of R-hat of the rank-normalised values (locations) and of the rank-normalised distances from
    the median (scales), after Vehtari, Gelman, Simpson, Carpenter and Bürkner (2021). "split" takes the values as they
    are, and needs a finite variance.

    Args:
        values: draws (chains, draws, *shape). One chain is compared with itself, half against half, which says
            nothing about places it never reached.
        method: "rank" or "split".

    Returns:
        R-hat, float64 (*shape). NaN for a parameter that is constant or has a value that is not finite; infinite where
        every half stands still at a place of its own.

    >>> apart = torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 6.0, 5.0, 6.0]])
    >>> bool(rhat(apart, method="split") > 4)
    True
    """
    if method == "rank":
        return per_parameter(values, _rank_reduction)
    if method == "split":
        return per_parameter(values, lambda block: _scale_reduction(halves(block)))
    raise InputError(f'expected method "rank" or "split", found {method!r}; leave it out for "rank"')


@accepts_arrays
def ebfmi(energy: Tensor) -> Tensor:
    """Estimated Bayesian fraction of missing information of each chain, after Betancourt (2016).

    With energies E_1 ... E_n of one chain,

        E-BFMI = mean_t (E_t+1 - E_t)^2 / var(E).

    It is 2 for independent energies; below 0.3 the momenta drawn anew change the energy too little to reach the tails.

    Args:
        energy: total energies (chains, draws).

    Returns:
        float64 (chains,); NaN for a chain that is constant or has a value that is not finite.

    >>> ebfmi(torch.tensor([[0.0, 1.0, 0.0, 1.0]]))
    tensor([3.], dtype=torch.float64)
    """
    check_draws(energy, "(chains, draws)")
    if energy.dim() != 2:
        raise InputError(
            f"expected one energy per draw, shape (chains, draws), found shape {tuple(energy.shape)}; "
            "sum the energy of all parameters"
        )
    exact = energy.detach().to(torch.float64)
    around = exact - exact[:, :1]  # exactly zero for a constant
    return around.diff(dim=1).square().mean(dim=1) / around.var(dim=1)


def _rank_reduction(block: Tensor) -> Tensor:
    split = halves(block)
    bulk, folded = (_scale_reduction(z.view_as(split)) for z in bulk_and_folded_scores(split.flatten(1)))
    return bulk.fmax(folded)  # two values have one distance from their median: the bulk decides alone


def _scale_reduction(chains: Tensor) -> Tensor:
    """R-hat of (parameters, chains, draws)."""
    draws = chains.shape[-1]
    start = chains[:, :, 0]
    variance, shift = torch.var_mean(chains - start[:, :, None], dim=2)  # exactly zero for a chain that stands still
    means = start - start[:, :1] + shift  # and for equal ones
    return ((draws * means.var(dim=1) / variance.mean(dim=1) + draws - 1) / draws).sqrt()


STANDSTILL = 1e-15  # a smaller range of values counts as constant, as in arviz


@accepts_arrays
def ess(values: Tensor, kind: Literal["bulk", "tail", "mean"] = "bulk") -> Tensor:
    """Effective sample size: with how many independent draws the chains compare.

    Chains are split in halves. With n draws in each of the m halves, C_t their mean autocovariance at lag t (divided by
    n) and V = C_0 + var_j x_j the variance that also counts how far their means x_j are apart,

        rho_t = 1 - (C_0 n / (n - 1) - C_t) / V,   tau = -1 + 2 sum_t rho_t,   ESS = m n / tau.

    The sum is cut by Geyer's initial monotone sequence: pairs rho_2k + rho_2k+1 count while they are positive, none of
    them more than the one before. tau is at least 1 / log10(m n), and antithetic chains may exceed m n.

    After Vehtari et al. (2021), "bulk" asks it of the rank-normalised values, "tail" of the indicators of values up to
    the 5 % and the 95 % quantile, of which the smaller counts, and "mean" of the values as they are.

    Args:
        values: draws (chains, draws, *shape).
        kind: "bulk", "tail" or "mean".

    Returns:
        float64 (*shape). m n for a parameter that is constant, NaN where a value is not finite.

    >>> draws = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    >>> 3000 < float(ess(draws)) < 5000
    True
    """
    statistics = {"bulk": _bulk, "tail": _tail, "mean": lambda block: _effective(halves(block))}
    if kind not in statistics:
        raise InputError(f'expected kind "bulk", "tail" or "mean", found {kind!r}; leave it out for "bulk"')
    return per_parameter(values, statistics[kind])


@accepts_arrays
def mcse(values: Tensor) -> Tensor:
    """Monte-Carlo standard error of the mean over all draws: std / sqrt(ESS), with the ESS of kind "mean".

    Returns:
        float64 (*shape); 0 for a parameter that is constant, NaN where a value is not finite.

    >>> mcse(torch.ones(2, 10, 3))
    tensor([0., 0., 0.], dtype=torch.float64)
    """
    return per_parameter(values, _mean_error)


def _mean_error(block: Tensor) -> Tensor:
    around = block - block[:, :1, :1]  # exactly zero for a constant
    return around.flatten(1).std(dim=1) / _effective(halves(block)).sqrt()


def _bulk(block: Tensor) -> Tensor:
    split = halves(block)
    return _effective(normal_scores(split.flatten(1)).view_as(split))


def _tail(block: Tensor) -> Tensor:
    rows = block.flatten(1)
    last = rows.shape[1] - 1
    sizes = []
    for percent in (5, 95):
        # Values up to a quantile between two neighbours are those up to the lower one: nothing to interpolate.
        quantile = rows.kthvalue(1 + percent * last // 100, dim=1).values
        sizes.append(_effective(halves((block <= quantile[:, None, None]).to(block.dtype))))
    return sizes[0].minimum(sizes[1])


def _effective(chains: Tensor) -> Tensor:
    """Effective sample size of (parameters, chains, draws)."""
    size = chains.shape[1] * chains.shape[2]
    time = _correlation_time(_autocorrelation(chains)).clamp_min(1 / math.log10(size))
    span = chains.amax((1, 2)) - chains.amin((1, 2))
    return (size / time).masked_fill(span < STANDSTILL, size)


def _autocorrelation(chains: Tensor) -> Tensor:
    """rho_t of all chains together, (parameters, draws)."""
    from scipy.fft import next_fast_len

    draws = chains.shape[2]
    length = next_fast_len(2 * draws, real=True)  # zeros after each chain keep its end from meeting its start
    mean = chains.mean(dim=2, keepdim=True)
    spectrum = torch.fft.rfft(chains - mean, n=length)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(dim=1)
    covariance: Tensor = torch.fft.irfft(power, n=length)[:, :draws] / draws
    now = covariance[:, :1]
    return 1 - (now * draws / (draws - 1) - covariance) / (now + mean.var(dim=1))


def _correlation_time(rho: Tensor) -> Tensor:
    """-1 + 2 sum_t rho_t over Geyer's initial monotone sequence of rho (parameters, draws), step by step as in arviz.

    Of the pair at which the sequence ends only the even member counts, and once instead of twice.
    """
    rho = torch.cat([torch.ones_like(rho[:, :1]), rho[:, 1:]], dim=1)
    last = max(0, (rho.shape[1] - 3) // 2)  # later lags are averages over too few draws
    pairs = rho[:, : 2 * last + 2].unflatten(1, (last + 1, 2)).sum(dim=2)
    going = (pairs > 0).cumprod(dim=1).bool()
    end = going.sum(dim=1, keepdim=True).clamp_max(last)  # number of the pair at which the sequence ends
    counted = going & (torch.arange(last + 1, device=rho.device) < end)
    total: Tensor = pairs.cummin(dim=1).values.mul(counted).sum(dim=1)
    even = rho.gather(1, 2 * end)[:, 0]
    even = torch.where(pairs.gather(1, end)[:, 0] < 0, even.clamp_min(0), even)
    return 2 * total + even - 1


@accepts_arrays
def kinetic_temperature(momentum: Tensor, mass: float | Tensor = 1.0) -> Tensor:
    """Mean of p_i^2 / m_i over the d parameters: T in expectation for momenta p_i ~ N(0, T m_i).

    The variance of one such draw is 2 T^2 / d.

    Args:
        momentum: (..., d).
        mass: a positive number, or one per parameter (d,).

    Returns:
        The temperature of each draw, float64 (...).

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


@accepts_arrays
def configurational_temperature(position: Tensor, gradient: Tensor) -> Tensor:
    """Mean of theta_i dU/dtheta_i over the d parameters: T in expectation for draws of exp(-U / T).

    By the virial theorem it holds for every U that grows fast enough, and without knowing its normalisation; for
    a single draw the value scatters, and only its mean over draws is a temperature.

    Args:
        position: theta (..., d).
        gradient: dU/dtheta there (..., d), of the energy that includes the prior.

    Returns:
        The temperature of each draw, float64 (...).

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
