"""Do the chains agree? R-hat compares them with each other, E-BFMI how they wander through energies."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.chains import check_draws, halves, per_parameter
from onebasin.metrics.ranks import bulk_and_folded_scores


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

    Raises:
        InputError: `values` or `method` does not fit.

    >>> apart = torch.tensor([[0.0, 1.0, 0.0, 1.0], [5.0, 6.0, 5.0, 6.0]])
    >>> bool(rhat(apart, method="split") > 4)
    True
    """
    if method == "rank":
        return per_parameter(values, _rank_reduction)
    if method == "split":
        return per_parameter(values, lambda block: _scale_reduction(halves(block)))
    raise InputError(f'expected method "rank" or "split", found {method!r}; leave it out for "rank"')


def ebfmi(energy: Tensor) -> Tensor:
    """Estimated Bayesian fraction of missing information of each chain, after Betancourt (2016).

    With energies E_1 ... E_n of one chain,

        E-BFMI = mean_t (E_t+1 - E_t)^2 / var(E).

    It is 2 for independent energies; below 0.3 the momenta drawn anew change the energy too little to reach the tails.

    Args:
        energy: total energies (chains, draws).

    Returns:
        float64 (chains,); NaN for a chain that is constant or has a value that is not finite.

    Raises:
        InputError: `energy` does not fit.

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
