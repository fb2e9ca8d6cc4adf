"""How many independent draws is a chain worth? Effective sample sizes, and the error of a mean."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.chains import halves, per_parameter
from onebasin.metrics.ranks import normal_scores

STANDSTILL = 1e-15  # a smaller range of values counts as constant, as in arviz


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

    Raises:
        InputError: `values` or `kind` does not fit.

    >>> draws = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    >>> 3000 < float(ess(draws)) < 5000
    True
    """
    statistics = {"bulk": _bulk, "tail": _tail, "mean": lambda block: _effective(halves(block))}
    if kind not in statistics:
        raise InputError(f'expected kind "bulk", "tail" or "mean", found {kind!r}; leave it out for "bulk"')
    return per_parameter(values, statistics[kind])


def mcse(values: Tensor) -> Tensor:
    """Monte-Carlo standard error of the mean over all draws: std / sqrt(ESS), with the ESS of kind "mean".

    Args:
        values: draws (chains, draws, *shape).

    Returns:
        float64 (*shape); 0 for a parameter that is constant, NaN where a value is not finite.

    Raises:
        InputError: `values` does not fit.

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
