"""`prune`: from a posterior to masks that keep its most valuable weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.population import Population
from onebasin.posterior import Coordinates, Posterior
from onebasin.posterior.uncertain import uncertain
from onebasin.pruning.criteria import ranks, worth
from onebasin.pruning.masks import Masks
from onebasin.state import State, as_state

Network = Mapping[str, Tensor] | nn.Module
SCOPES = ("global", "tensor")


def prune(
    posterior: Posterior | Network,
    keep: float = 0.2,
    by: str = "snr",
    *,
    per: str = "global",
    names: Collection[str] | None = None,
    seed: int = 0,
) -> Masks:
    """Choose the weights to keep.

    >>> import torch
    >>> masks = prune({"w": torch.tensor([3.0, -1.0, 2.0, 0.5])}, keep=0.5, by="magnitude")
    >>> masks["w"]
    tensor([ True, False,  True, False])

    Args:
        posterior: mean and standard deviation of every weight; a network without them (a State or a module) can be
            pruned by "magnitude" and "random". Uncertain tensors take part, running statistics do not; a tied tensor
            counts once. Of a State alone, ties are seen by shared memory; give the module where a file lost them.
        keep: the part to keep, 0 < keep <= 1. Of D weights floor(keep * D) are kept, exactly.
        by: what decides: "snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random"; see `criteria`.
        per: one ranking of all weights ("global"), or one in every tensor ("tensor"), each cut at its own share.
        names: only these tensors, by name or pattern ("*.weight"); the others get no mask.
        seed: of "random".

    Returns:
        Masks in the basis of the posterior's mean. For another network move them first: `transfer`.
    """
    return Ranking.of(posterior, by, names=names, seed=seed).masks(keep, per)


@dataclass(frozen=True, eq=False)
class Ranking:
    """The weights of some tensors in the order of their worth; masks of any share are cut from it.

    Attributes:
        layout: which tensors, and where each lies in the flat vector (D,).
        worth: what each weight is worth (D,).
        signal: |mean| of each weight (D,).
        by: the criterion.
    """

    layout: Coordinates
    worth: Tensor
    signal: Tensor
    by: str

    @classmethod
    def of(
        cls, posterior: Posterior | Network, by: str, *, names: Collection[str] | None = None, seed: int = 0
    ) -> Ranking:
        """Rank the weights of a posterior or of a network; arguments as in `prune`."""
        if isinstance(posterior, Posterior):
            whole = posterior.layout  # vectors that are not rounded as networks are: a small std would become zero
            mean, std = whole.shaped(posterior.flat_mean), whole.shaped(posterior.flat_std)
        else:
            whole, mean, std = layout_of(posterior), as_state(posterior), None
        layout = _only(whole, names)
        signal = layout.flat(mean).abs()
        return cls(layout, worth(signal, None if std is None else layout.flat(std), by, seed), signal, by)

    @cached_property
    def _ranks(self) -> Tensor:
        return ranks(self.worth, self.signal)

    def masks(self, keep: float, per: str = "global") -> Masks:
        """The masks that keep a share of the weights."""
        if not 0 < keep <= 1:
            raise InputError(f"expected a share with 0 < keep <= 1, found {keep}: give 0.2 to keep a fifth")
        if per not in SCOPES:
            raise InputError(f"expected per out of {', '.join(SCOPES)}, found {per!r}: choose one of them")
        sizes = self.layout.sizes
        if per == "global":
            kept = list((self._ranks < count(keep, self.layout.size)).split(sizes))
        else:
            pieces = zip(self.worth.split(sizes), self.signal.split(sizes), strict=True)
            kept = [ranks(*piece) < count(keep, len(piece[0])) for piece in pieces]
        shapes = [self.layout.spec[name].shape for name in self.layout.names]
        tensors = {n: mask.reshape(shape) for n, mask, shape in zip(self.layout.names, kept, shapes, strict=True)}
        return Masks(tensors, self.layout.tied, {"keep": keep, "by": self.by, "per": per})


def count(keep: float, size: int) -> int:
    """Floor of keep * size; a product that is whole but for rounding counts as whole.

    >>> count(0.05, 407_050), count(0.29, 100)
    (20352, 29)
    """
    return math.floor(round(keep * size, 6))


def layout_of(network: Network) -> Coordinates:
    """The weights of one network: parameters of a module; of a State all but running statistics, ties by memory."""
    state = as_state(network)
    model = network if isinstance(network, nn.Module) else None
    layout = uncertain(Population.from_states([state]), model)
    if model is not None:
        return layout
    tied = shared_memory(state, layout.names)
    return Coordinates(tuple(name for name in layout.names if name not in tied), layout.spec, tied)


def shared_memory(state: State, names: Collection[str]) -> dict[str, str]:
    """Further names of one tensor -> its first name, seen by where the numbers lie."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    tied = {}
    for name in names:
        value = state[name]
        own = first.setdefault((value.data_ptr(), tuple(value.shape), value.stride()), name)
        if own != name:
            tied[name] = own
    return tied


def _only(layout: Coordinates, names: Collection[str] | None) -> Coordinates:
    """The layout of the tensors that were asked for."""
    if names is None:
        return layout
    wanted = [names] if isinstance(names, str) else list(names)
    also = {own: {own, *[name for name, first in layout.tied.items() if first == own]} for own in layout.names}
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for every in also.values() for name in every):
            listed = ", ".join(layout.names[:6])
            raise InputError(f"expected names or patterns of weights ({listed}, ...), found {pattern!r}: choose others")
    chosen = tuple(n for n in layout.names if any(fnmatchcase(m, pattern) for m in also[n] for pattern in wanted))
    return Coordinates(chosen, layout.spec, {name: own for name, own in layout.tied.items() if own in chosen})
