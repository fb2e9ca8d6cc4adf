"""R-hat and effective sample sizes of every single weight, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.inference.diagnostics import MIXED, chain_rows
from onebasin.metrics import ess, rhat
from onebasin.population import Population
from onebasin.reporting import counted

_SHOWN = 10  # of the worst weights, when printed


@dataclass(frozen=True, eq=False)
class WeightDiagnostics:
    """R-hat and effective sample sizes of every weight, as a table when printed.

    A weight that never varies has R-hat NaN, and as effective sample size the number of draws.

    Attributes:
        rhat: tensor name -> R-hat (rank-normalised, split) of each entry, float64 (*shape).
        ess_bulk: the same for the effective sample size in the bulk.
        ess_tail: the same for the smaller of those of the two tails.
        chains: number of chains.
        draws: draws of each.
    """

    rhat: Mapping[str, Tensor]
    ess_bulk: Mapping[str, Tensor]
    ess_tail: Mapping[str, Tensor]
    chains: int
    draws: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(self.rhat)

    @property
    def weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(values.numel() for values in self.rhat.values())

    def table(self) -> dict[str, list[Any]]:
        """Columns with a row per weight: name, index (a tuple), rhat, ess_bulk, ess_tail; as pandas takes them."""
        columns: dict[str, list[Any]] = {"name": [], "index": [], "rhat": [], "ess_bulk": [], "ess_tail": []}
        for name, values in self.rhat.items():
            columns["name"] += [name] * values.numel()
            columns["index"] += [tuple(place) for place in torch.ones_like(values).nonzero().tolist()]
            for kind in ("rhat", "ess_bulk", "ess_tail"):
                columns[kind] += getattr(self, kind)[name].flatten().tolist()
        return columns

    def by_tensor(self) -> dict[str, list[Any]]:
        """Columns with a row per tensor, over those of its weights that vary.

        Of R-hat the median, the 95 % quantile, the largest and the share below 1.05; of effective sample sizes the
        least and the median.
        """
        columns: dict[str, list[Any]] = {}
        for name in self.names:
            moving = ~self.rhat[name].flatten().isnan()
            ratio, bulk, tail = (
                getattr(self, kind)[name].flatten()[moving] for kind in ("rhat", "ess_bulk", "ess_tail")
            )
            row = {
                "name": name,
                "weights": len(ratio),
                "rhat_median": _quantile(ratio, 0.5),
                "rhat_95": _quantile(ratio, 0.95),
                "rhat_max": _quantile(ratio, 1.0),
                "share_mixed": float((ratio < MIXED).double().mean()) if len(ratio) else float("nan"),
                "ess_bulk_min": _quantile(bulk, 0.0),
                "ess_bulk_median": _quantile(bulk, 0.5),
                "ess_tail_min": _quantile(tail, 0.0),
            }
            for key, value in row.items():
                columns.setdefault(key, []).append(value)
        return columns

    def __str__(self) -> str:
        """The tensors, and the worst of the weights."""
        tensors, weights = self.by_tensor(), self.table()
        width = max(len(name) for name in (*self.names, "tensor"))
        head = f"{'tensor':{width}}  weights  R-hat median    95 %     max  below {MIXED}  least ESS (bulk, tail)"
        rows = [
            f"{row[0]:{width}}  {row[1]:7,}  {row[2]:12.3f}  {row[3]:6.3f}  {row[4]:6.3f}  {row[5]:10.1%}  "
            f"{row[6]:9.0f}, {row[8]:8.0f}"
            for row in zip(*tensors.values(), strict=True)
        ]
        order = torch.tensor(weights["rhat"]).nan_to_num(nan=-1.0).sort(descending=True).indices[:_SHOWN].tolist()
        worst = [
            f"{weights['name'][row]}{list(weights['index'][row])}  R-hat {weights['rhat'][row]:.3f}, "
            f"ESS {weights['ess_bulk'][row]:.0f} (bulk), {weights['ess_tail'][row]:.0f} (tail)"
            for row in order
        ]
        return "\n".join(
            [f"{counted(self.chains, 'chain')} of {counted(self.draws, 'draw')}", head, *rows, "worst weights:", *worst]
        )


def _quantile(values: Tensor, share: float) -> float:
    """A quantile without interpolation, NaN of none; torch's own refuses many values."""
    return float(values.sort().values[round(share * (len(values) - 1))]) if len(values) else float("nan")


def weight_diagnostics(population: Population, names: Iterable[str] | None = None) -> WeightDiagnostics:
    """Return R-hat and effective sample sizes of every weight, tensor by tensor.

    Weights of different chains need not agree even when their functions do, since units may have changed places: look
    at `diagnose` for functions, and at weights before and after `align`.

    Args:
        population: draws of several chains (`population.chain`), at least 4 of each; longer chains are cut to the
            shortest.
        names: floating-point tensors to look at; None for all.

    Raises:
        InputError: a chain is too short, or a name is not that of a floating-point tensor.
    """
    rows = chain_rows(population)
    real = [name for name, tensor in population.spec.items() if tensor.dtype.is_floating_point]
    chosen = real if names is None else list(names)
    if wrong := [name for name in chosen if name not in real]:
        raise InputError(f"expected names of floating-point tensors ({', '.join(real[:6])}, ...), found {wrong[0]!r}")
    ratio, bulk, tail = dict[str, Tensor](), dict[str, Tensor](), dict[str, Tensor]()
    for name in chosen:
        draws = population.tensor(name)[rows]
        ratio[name], bulk[name], tail[name] = rhat(draws), ess(draws, "bulk"), ess(draws, "tail")
    return WeightDiagnostics(ratio, bulk, tail, rows.shape[0], rows.shape[1])
