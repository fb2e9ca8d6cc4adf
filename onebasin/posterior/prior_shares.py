"""Shares of weights that the data did not move: those whose marginal is still the prior.

Mean-field posteriors leave such weights behind (Kurle et al., 2022), and so do samplers of wide networks. N draws from
the prior itself have a standard deviation of prior * (1 ± 1.6 / sqrt(2 N)) (5 to 95 percent), and a mean of
0 ± prior / sqrt(N): a share is only read right beside the one that such draws would give.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from onebasin.errors import InputError
from onebasin.posterior.posterior import Posterior
from onebasin.reporting import (
    SHOWN,
    Axis,
    Column,
    Number,
    Record,
    Result,
    Rule,
    Series,
    Table,
    largest_first,
    one_panel,
    result_record,
)


@dataclass(frozen=True, repr=False)
class PriorShares(Result):
    """Shares of weights whose mean and standard deviation are those of the prior.

    Attributes:
        total: over all uncertain weights.
        tensors: by name.
        expected: the share that independent draws from the prior would give; 1 where no number of draws is known.
        spread: 5 % and 95 % quantile of standard deviation / prior of such draws.
        networks: how many draws; None if unknown.
        tolerance: how close to the prior counts, in prior standard deviations.
    """

    total: float
    tensors: Mapping[str, float]
    expected: float
    spread: tuple[float, float]
    networks: float | None
    tolerance: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "total": self.total,
            "tensors": dict(self.tensors),
            "expected": self.expected,
            "spread": list(self.spread),
            "networks": self.networks,
            "tolerance": self.tolerance,
        }

    def record(self) -> Record:
        """A table and bars of the shares, beside the one that draws from the prior would give."""
        low, high = self.spread
        draws = "exact moments" if self.networks is None else f"{self.networks:g} draws"
        text = (
            f"{self.total:.2%} of the weights are still at the prior; {draws} from the prior would give "
            f"{self.expected:.2%} (std / prior from {low:.3f} to {high:.3f})."
        )
        names = largest_first(self.tensors, lambda name: self.tensors[name])
        rows = tuple((name, Number(100 * share)) for name, share in
                     {"all": self.total, **{name: self.tensors[name] for name in names}}.items())  # fmt: skip
        shown = tuple(names[:SHOWN])
        bars = Series("", tuple(range(len(shown))), tuple(100 * self.tensors[name] for name in shown))
        more = "" if len(shown) == len(names) else f" The {len(shown)} largest of {len(names):,} tensors."
        return result_record(
            "prior-shares",
            "Weights that the data did not move",
            text,
            (
                Table(
                    "shares",
                    "Share of weights at the prior",
                    (Column("tensor"), Column("at the prior", digits=2, unit="%")),
                    rows,
                ),
                one_panel(
                    "bars",
                    "Which tensors are still at the prior?",
                    text + more,
                    "bars",
                    Axis("", names=shown),
                    Axis("weights at the prior (%)", low=0.0, high=105.0),
                    series=(bars,),
                    rules=(Rule("draws from the prior", 100 * self.expected),),
                ),
            ),
            values=self.to_dict(),
        )


def prior_shares(
    posterior: Posterior,
    prior: float | Mapping[str, float],
    *,
    tolerance: float = 0.1,
    networks: float | None = None,
) -> PriorShares:
    """Count the weights with |std / prior - 1| < tolerance and |mean| < tolerance * prior.

    Args:
        posterior: any; its marginal means and standard deviations count.
        prior: standard deviation of the prior N(0, prior^2), or one for each tensor by name or pattern (`*.bias`; the
            last that fits counts).
        tolerance: how close counts as still at the prior.
        networks: how many independent draws the posterior was fitted to, fewer than there were where they are
            correlated; read from the provenance of a fit unless given.
    """
    if not 0 < tolerance < 1:
        raise InputError(f"expected a tolerance between 0 and 1, found {tolerance}: give one such as 0.1")
    number = networks if networks is not None else posterior.provenance.get("fit", {}).get("networks")
    if number is not None and not number > 1:
        raise InputError(f"expected more than 1 network, found {number}: leave networks out if it is not known")
    mean, std, counts, tensors = posterior.mean, posterior.std, 0, {}
    for name, level in _levels(posterior, prior).items():
        close = (std[name].double() / level - 1).abs() < tolerance
        held = close & (mean[name].double().abs() < tolerance * level)
        tensors[name] = float(held.double().mean())
        counts += int(held.sum())
    expected, spread = (1.0, (1.0, 1.0)) if number is None else _by_chance(float(number), tolerance)
    return PriorShares(counts / posterior.layout.size, tensors, expected, spread, number, tolerance)


def _levels(posterior: Posterior, prior: float | Mapping[str, float]) -> dict[str, float]:
    """The prior's standard deviation for each uncertain tensor."""
    given = prior if isinstance(prior, Mapping) else {"*": prior}
    levels = {}
    for name in posterior.layout.names:
        fitting = [value for key, value in given.items() if fnmatchcase(name, key)]
        if not fitting or not (math.isfinite(fitting[-1]) and fitting[-1] > 0):
            raise InputError(
                f"expected a positive prior standard deviation for {name}, found "
                f"{fitting[-1] if fitting else 'none'}: give a number, or one for each tensor by name or pattern"
            )
        levels[name] = float(fitting[-1])
    return levels


def _by_chance(networks: float, tolerance: float) -> tuple[float, tuple[float, float]]:
    """The share that draws from the prior give, and the 5 % and 95 % quantile of their standard deviation.

    Mean and standard deviation of normal draws are independent: (N - 1) s^2 is chi-square, sqrt(N) mean is normal.
    """
    from scipy.stats import chi2

    free = networks - 1
    inside = chi2.cdf(free * (1 + tolerance) ** 2, free) - chi2.cdf(free * (1 - tolerance) ** 2, free)
    centred = math.erf(tolerance * math.sqrt(networks / 2))
    quantiles = [math.sqrt(chi2.ppf(level, free) / free) for level in (0.05, 0.95)]
    return float(inside) * centred, (quantiles[0], quantiles[1])
