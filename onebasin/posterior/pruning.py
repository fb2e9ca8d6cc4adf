"""Pruning by what a posterior knows: criteria, masks, their transfer to other networks, and pruning curves.

What a weight is worth follows from its mean and its standard deviation; the most valuable are kept. Criteria:

- snr: |mean| / std, how surely the weight differs from zero
- signal-plus-noise: |mean| + std, which also keeps weights that matter in some draws (Deo et al. 2025)
- magnitude: |mean|, the plain baseline, and often the best one
- sigma: -std, the least uncertain are kept, which is the rule of paper 1
- sigma-high: +std, the most uncertain are kept; where a prior shrinks unused weights, better than its opposite
- random: a fresh order, which every other criterion has to beat
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from onebasin.alignment import match, match_activations
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.functional import (
    BATCH,
    AnyInputs,
    Data,
    Loss,
    OutputPart,
    losses,
    measured_of,
    norms_used,
    pair_of,
    refreshed_one,
    select_output,
    warn_stale,
)
from onebasin.parallel import Progress, progress_of
from onebasin.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout, flat_layout
from onebasin.posterior.posterior import Posterior
from onebasin.reporting import (
    SHOWN,
    Axis,
    Cell,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Result,
    Series,
    Table,
    as_number,
    encode,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, as_state
from onebasin.storage import make_folder, need_space, read_header, read_tensors, write_tensors
from onebasin.symmetry import Element, Symmetry

Worth = Callable[[Tensor, Tensor], Tensor]  # (|mean|, std), both (D,) float64 -> worth (D,)


def signal_to_noise(signal: Tensor, noise: Tensor) -> Tensor:
    """Signal / noise; without noise a signal counts as infinitely sure, and nothing as nothing.

    >>> signal_to_noise(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))
    tensor([0.5000,    inf, 0.0000])
    """
    return torch.where((signal == 0) & (noise == 0), 0, signal / noise)


_OF_BOTH: dict[str, Worth] = {
    "snr": signal_to_noise,
    "signal-plus-noise": lambda signal, noise: signal + noise,
    "sigma": lambda signal, noise: -noise,
    "sigma-high": lambda signal, noise: noise,
}
CRITERIA = ("snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random")


def worth(mean: Tensor, std: Tensor | None, by: str, seed: int) -> Tensor:
    """The worth of each weight by a criterion, float64 (D,); criteria are listed at the top of this file.

    Raises:
        InputError: the criterion is unknown, needs standard deviations that are not there, or meets NaN.
    """
    signal = mean.double().abs()
    if not bool(torch.isfinite(signal).all()):
        raise InputError("expected finite weights to prune, found NaN or infinity: leave this network out")
    if by == "magnitude":
        return signal
    if by == "random":
        order = torch.randperm(len(signal), generator=torch.Generator().manual_seed(seed))
        return order.to(signal)
    if by not in _OF_BOTH:
        raise InputError(f'expected a criterion out of {", ".join(CRITERIA)}, found {by!r}: give "snr"')
    if std is None:
        raise InputError(
            f"{by} needs standard deviations, found a network without any: give a Posterior, or prune it by magnitude "
            "or random"
        )
    return _OF_BOTH[by](signal, std.double())


def ranks(worth: Tensor, signal: Tensor) -> Tensor:
    """The place of each weight, int64 (D,): 0 for the most valuable.

    Equal worth is decided by |mean|, and equal |mean| by position, so that the same input always gives the same ranks.

    >>> ranks(torch.tensor([1.0, 3.0, 1.0]), torch.tensor([1.0, 1.0, 2.0]))
    tensor([2, 0, 1])
    """
    by_signal = signal.argsort(descending=True, stable=True)
    order = by_signal[worth[by_signal].argsort(descending=True, stable=True)]
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


FORMAT = "onebasin-masks"
VERSION = 1


@dataclass(frozen=True, eq=False, repr=False)
class Masks(Result, Mapping[str, Tensor]):
    """A mapping from the name of a tensor to a bool tensor of its shape, True where the weight is kept.

    >>> masks = Masks({"w": torch.tensor([True, False, True])})
    >>> masks.apply({"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0])})
    {'w': tensor([1., 0., 3.]), 'b': tensor([4.])}
    >>> masks.kept, masks.size, masks["w"].tolist()
    (2, 3, [True, False, True])

    Tensors without a mask are left alone: running statistics, and whatever was not asked for.

    Attributes:
        tensors: name -> mask; a tied tensor stands here once, under its first name.
        tied: further names of a tensor -> its first name.
        facts: how the masks were made, JSON-able.
    """

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = [name for name, mask in self.tensors.items() if mask.dtype is not torch.bool]
        wrong += [first for first in self.tied.values() if first not in self.tensors]
        if wrong:
            raise SpecError(
                f"expected a bool tensor under every name, found none under {wrong[0]!r}: give True where a weight is "
                "kept"
            )

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Masks) or self.tied != other.tied or list(self) != list(other):
            return False
        return all(torch.equal(mask, other[name]) for name, mask in self.tensors.items())

    @classmethod
    def ones(cls, network: Mapping[str, Tensor]) -> Masks:
        """Masks that keep everything, one for each floating-point tensor of a network."""
        return cls(
            {name: torch.ones_like(value, dtype=torch.bool) for name, value in network.items()
             if value.is_floating_point()}
        )  # fmt: skip

    @property
    def kept(self) -> int:
        """Number of weights that are kept."""
        return sum(int(mask.sum()) for mask in self.tensors.values())

    @property
    def size(self) -> int:
        """Number of weights that have a mask."""
        return sum(mask.numel() for mask in self.tensors.values())

    @property
    def share(self) -> float:
        """Part of the masked tensors that is kept."""
        return self.kept / max(1, self.size)

    def record(self) -> Record:
        """A table and bars of what is kept of each tensor."""
        counts = {name: (int(mask.sum()), mask.numel()) for name, mask in self.tensors.items()}
        names = largest_first(counts, lambda name: counts[name][1])
        every = {"all": (self.kept, self.size), **{name: counts[name] for name in names}}
        rows = tuple((name, Number(kept), Number(size), Number(100 * kept / max(1, size)))
                     for name, (kept, size) in every.items())  # fmt: skip
        by = self.facts.get("by")
        chosen = f", chosen by {by}" if by else ""
        text = f"{self.kept:,} of {self.size:,} weights are kept ({self.share:.2%}){chosen}."
        shown = tuple(names[:SHOWN])
        bars = Series(
            "", tuple(range(len(shown))), tuple(100 * counts[name][0] / max(1, counts[name][1]) for name in shown)
        )
        more = "" if len(shown) == len(names) else f" The {len(shown)} largest of {len(names):,} tensors."
        columns = (
            Column("tensor"),
            Column("kept", digits=0),
            Column("of", digits=0),
            Column("share", digits=2, unit="%"),
        )
        return result_record(
            "masks",
            f"Masks of {len(self)} tensors",
            text,
            (
                Table("tensors", "Weights that are kept", columns, rows),
                one_panel("bars", "Which tensors keep their weights?", text + more, "bars", Axis("", names=shown),
                       Axis("weights kept (%)", low=0.0), series=(bars,)),
            ),
            values={"kept": self.kept, "size": self.size, "facts": encode(dict(self.facts)),
                    "tensors": {name: list(pair) for name, pair in counts.items()}},
        )  # fmt: skip

    @overload
    def apply(self, network: Mapping[str, Tensor]) -> State: ...

    @overload
    def apply(self, network: Population) -> Population: ...

    def apply(self, network: Mapping[str, Tensor] | Population) -> State | Population:
        """The network, or every member of the population, with zeros where a mask is False; nothing is changed.

        Raises:
            SpecError: a masked tensor is missing or has another shape.
        """
        if isinstance(network, Population):
            self._check({name: tensor.shape for name, tensor in network.spec.items()})
            return network.map(lambda stacked, start: self._zeroed(stacked))
        self._check({name: tuple(value.shape) for name, value in network.items()})
        return {name: value.detach().clone() for name, value in self._zeroed(network).items()}

    def _zeroed(self, tensors: Mapping[str, Tensor]) -> State:
        whole = self._whole()
        return {
            name: value.detach().masked_fill(~whole[name].to(value.device), 0) if name in whole else value
            for name, value in tensors.items()
        }

    def _whole(self) -> dict[str, Tensor]:
        """The masks under all names, those of tied tensors included."""
        return {**self.tensors, **{name: self.tensors[first] for name, first in self.tied.items()}}

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, mask in self._whole().items():
            if shapes.get(name) != tuple(mask.shape):
                shape = f"shape {shapes[name]}" if name in shapes else "no such tensor"
                raise SpecError(
                    f"expected {name} with shape {tuple(mask.shape)} for its mask, found {shape}: give a network "
                    "of the architecture that the masks were made for"
                )

    def carried(self, element: Element, symmetry: Symmetry) -> Masks:
        """The masks that belong to the network after it was moved.

        masks.carried(g, s).apply(s.apply(g, w)) is s.apply(g, masks.apply(w)), for every network w.

        Args:
            element: what moved the network; orders are followed, factors do not matter to a mask.
            symmetry: the group it belongs to.
        """
        whole = self._whole()
        unmasked = {
            name: torch.ones(tuple(shape), dtype=torch.bool) for name, shape in symmetry.shapes.items()
            if name not in whole
        }  # fmt: skip
        moved = symmetry.apply(element, {**whole, **unmasked}, kind="mask")
        return Masks({name: moved[name] for name in self.tensors}, self.tied, self.facts)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; a file of this name is replaced when the new one is whole."""
        goal = Path(path)
        make_folder(goal.parent)
        need_space(goal.parent, self.size)
        parts = {"names": list(self.tensors), "tied": dict(self.tied), "facts": dict(self.facts)}
        texts = {name: json.dumps(value) for name, value in parts.items()}
        write_tensors(goal, self.tensors, {"onebasin": FORMAT, "version": str(VERSION), **texts})
        return goal

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Masks:
        """Read back what `save` wrote.

        Raises:
            StorageError: when the file is absent, cut off, or holds no masks.
        """
        facts = read_header(Path(path)).metadata
        if facts.get("onebasin") != FORMAT or facts.get("version") != str(VERSION):
            raise StorageError(
                f"expected masks of version {VERSION} in {path}, found another kind of file: write them with Masks.save"
            )
        tensors, _ = read_tensors(Path(path))
        try:
            names, tied, made_by = (json.loads(facts[part]) for part in ("names", "tied", "facts"))
            if not isinstance(names, list) or not isinstance(tied, dict) or not isinstance(made_by, dict):
                raise TypeError("names, tied or facts are of another kind")
            return cls({name: tensors[name] for name in names}, tied, made_by)
        except (KeyError, ValueError, TypeError, RecursionError, SpecError) as error:
            raise StorageError(
                f"expected whole masks in {path}, found parts that do not fit ({error}): save them again"
            ) from error


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
        by: what decides: "snr", "signal-plus-noise", "magnitude", "sigma", "sigma-high", "random"; see `worth`.
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

    layout: FlatLayout
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
            raise InputError(f"expected per out of {', '.join(SCOPES)}, found {per!r}: give 'global'")
        sizes = self.layout.sizes
        if per == "global":
            flags = list((self._ranks < count(keep, self.layout.size)).split(sizes))
        else:
            pieces = zip(self.worth.split(sizes), self.signal.split(sizes), strict=True)
            flags = [ranks(*piece) < count(keep, len(piece[0])) for piece in pieces]
        shapes = [self.layout.spec[name].shape for name in self.layout.names]
        tensors = {n: mask.reshape(shape) for n, mask, shape in zip(self.layout.names, flags, shapes, strict=True)}
        return Masks(tensors, self.layout.tied, {"keep": keep, "by": self.by, "per": per})


def count(keep: float, size: int) -> int:
    """Floor of keep * size; a product that is whole but for rounding counts as whole.

    >>> count(0.05, 407_050), count(0.29, 100)
    (20352, 29)
    """
    return math.floor(round(keep * size, 6))


def layout_of(network: Network) -> FlatLayout:
    """The weights of one network: parameters of a module; of a State all but running statistics, ties by memory."""
    state = as_state(network)
    model = network if isinstance(network, nn.Module) else None
    layout = flat_layout(Population.from_states([state]), model)
    if model is not None:
        return layout
    tied = shared_memory(state, layout.names)
    return FlatLayout(tuple(name for name in layout.names if name not in tied), layout.spec, tied)


def shared_memory(state: State, names: Collection[str]) -> dict[str, str]:
    """Further names of one tensor -> its first name, seen by where the numbers lie."""
    first: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    tied = {}
    for name in names:
        value = state[name]
        first_name = first.setdefault((value.data_ptr(), tuple(value.shape), value.stride()), name)
        if first_name != name:
            tied[name] = first_name
    return tied


def _only(layout: FlatLayout, names: Collection[str] | None) -> FlatLayout:
    """The layout of the tensors that were asked for."""
    if names is None:
        return layout
    wanted = [names] if isinstance(names, str) else list(names)
    also = {
        name_of: {name_of, *[name for name, first in layout.tied.items() if first == name_of]}
        for name_of in layout.names
    }
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for every in also.values() for name in every):
            listed = ", ".join(layout.names[:6])
            raise InputError(
                f"expected names or patterns of weights ({listed}, ...), found {pattern!r}: give '*' for all"
            )
    chosen = tuple(n for n in layout.names if any(fnmatchcase(m, pattern) for m in also[n] for pattern in wanted))
    return FlatLayout(
        chosen, layout.spec, {name: name_of for name, name_of in layout.tied.items() if name_of in chosen}
    )


@overload
def transfer(
    what: Masks, onto: Network, symmetry: Symmetry, reference: Network | None = ..., *,
    scale: str = ..., model: nn.Module | None = ..., inputs: Any = ...,
) -> Masks: ...  # fmt: skip


@overload
def transfer(
    what: Posterior, onto: Network, symmetry: Symmetry, reference: Network | None = ..., *,
    scale: str = ..., model: nn.Module | None = ..., inputs: Any = ...,
) -> Posterior: ...  # fmt: skip


def transfer(
    what: Masks | Posterior,
    onto: Network,
    symmetry: Symmetry,
    reference: Network | None = None,
    *,
    scale: str = "keep",
    model: nn.Module | None = None,
    inputs: Any = None,
) -> Masks | Posterior:
    """Move masks, or the standard deviations of a posterior, from their network to another one.

    Unit 3 of one network is unit 17 of another. The reference is matched to the other network, and what belongs to
    its units goes along; used as it is, a mask would hit weights at random.

    Args:
        what: masks in the basis of `reference`, or a posterior.
        onto: the network that is to be pruned; it is not changed.
        symmetry: found by `discover` for the architecture.
        reference: the network that the masks were made for; of a posterior its mean by default.
        scale: "keep" moves standard deviations with permutations and signs only; "reference" also gives them the
            scales that the other network has, as they must be where the two were trained or rescaled differently. Units
            that a posterior left at its prior have no scale of their own, and get an arbitrary one that way.
        model: match by activations instead of weights (scales are kept then): the function, with
        inputs: the examples to compare units on.

    Returns:
        Masks for `onto`; or of a posterior a diagonal Gaussian around `onto` with the standard deviations of its
        counterparts, which `prune` ranks by any criterion.
    """
    network = as_state(onto)
    if reference is None:
        if not isinstance(what, Posterior):
            raise InputError("masks do not know their network, found no reference: give the network they were made for")
        reference = what.mean
    if (model is None) != (inputs is None):
        raise InputError("matching by activations runs the model on inputs, found only one of them: give both, or none")
    if model is None:
        element = match(network, reference, symmetry, scale=scale).element
    else:
        element = match_activations(model, network, reference, symmetry, inputs).element
    if isinstance(what, Masks):
        return what.carried(element, symmetry)
    layout = what.layout
    std = symmetry.apply(element, {**what.std, **layout.shaped(what.flat_std)}, kind="std")
    gaussian = Gaussian(layout.flat(network), Diagonal(layout.flat(std)))
    return Posterior.equal([gaussian], layout, [network], provenance={"transferred": dict(what.provenance)})


LEVELS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01)  # those of paper 1


@dataclass(frozen=True)
class Point:
    """One network of a curve.

    Attributes:
        keep: the share that was asked for.
        kept: number of weights that were kept.
        loss: mean loss; for "random" averaged over its orders.
        accuracy: share of right classes, likewise; None where there are no classes.
        spread: standard deviation of the accuracy (or of the loss, without classes) over orders; 0 for one order.
    """

    keep: float
    kept: int
    loss: float
    accuracy: float | None
    spread: float = 0.0


@dataclass(frozen=True, repr=False)
class PruningCurve(Result):
    """Loss and accuracy of a network by the share of its weights that is kept.

    Attributes:
        points: criterion -> one point per level.
        levels: the shares that were kept.
        per: "global" or "tensor".
        examples: how many there were.
        remarks: sentences about numbers that may mislead.
    """

    points: Mapping[str, tuple[Point, ...]]
    levels: tuple[float, ...]
    per: str
    examples: int
    remarks: tuple[str, ...] = ()

    def accuracy(self, by: str) -> tuple[float | None, ...]:
        """Share of right classes at each level."""
        return tuple(point.accuracy for point in self.points[by])

    def loss(self, by: str) -> tuple[float, ...]:
        """Mean loss at each level."""
        return tuple(point.loss for point in self.points[by])

    def record(self) -> Record:
        """A table of levels by criteria, and accuracy and loss by the share that is kept."""
        classes = self._classes
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (f"{100 * level:.4g} %", *(self._number(points[row]) for points in self.points.values()))
            for row, level in enumerate(self.levels)
        )
        half = min(self.levels, key=lambda level: abs(level - 0.2))
        place = self.levels.index(half)
        best = (max if classes else min)(self.points, key=lambda by: self._value(self.points[by][place]))
        value = self._value(self.points[best][place])
        said = f"an accuracy of {value:.2%}" if classes else f"a loss of {value:.4g}"
        text = f"With {half:.4g} of the weights kept, {best} is best, with {said} on {self.examples:,} examples."
        kinds = ("accuracy", "loss") if classes else ("loss",)
        panels = tuple(
            Panel("lines", "", Axis("weights kept (%)", scale="log"),
                  Axis(f"{kind} (%)" if kind == "accuracy" else kind),
                  tuple(self._line(by, kind) for by in self.points))
            for kind in kinds
        )  # fmt: skip
        given: dict[str, Any] = (
            {"digits": 2, "unit": "%", "better": "higher"} if classes else {"digits": 4, "better": "lower"}
        )
        columns = (Column("kept"), *(Column(by, **given) for by in self.points))
        spread = any(point.spread for points in self.points.values() for point in points)
        return result_record(
            "pruning",
            f"Pruning curve of {len(self.points)} criteria",
            (text, *self.remarks),
            (
                Table("curve", f"{kinds[0].capitalize()} by the share of weights kept",
                      columns, rows, "± standard deviation over random orders" if spread else ""),
                Figure("curve-lines", "How much can go?", text, panels),
            ),
            values=json.loads(self.to_json()),
            settings={"per": self.per},
        )  # fmt: skip

    @property
    def _classes(self) -> bool:
        return all(point.accuracy is not None for points in self.points.values() for point in points)

    def _value(self, point: Point) -> float:
        return point.accuracy if self._classes and point.accuracy is not None else point.loss

    def _number(self, point: Point) -> Number:
        factor = 100 if self._classes else 1
        found = as_number(factor * self._value(point))
        return Number(found.value, factor * point.spread if point.spread else None, note=found.note)

    def _line(self, by: str, kind: str) -> Series:
        pairs = sorted(zip(self.levels, self.points[by], strict=True), key=lambda pair: pair[0])
        factor = 100 if kind == "accuracy" else 1
        values = [factor * float(getattr(point, kind)) for _, point in pairs]
        x = tuple(100 * level for level, _ in pairs)
        if not math.isfinite(sum(values)):
            return Series(by, x, tuple(value if math.isfinite(value) else None for value in values))
        band = [factor * point.spread if (kind == "accuracy") == self._classes else 0.0 for _, point in pairs]
        if not any(band):
            return Series(by, x, tuple(values))
        low, high = (tuple(v + side * width for v, width in zip(values, band, strict=True)) for side in (-1, 1))
        return Series(by, x, tuple(values), low, high)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "levels": list(self.levels),
            "per": self.per,
            "examples": self.examples,
            "criteria": {by: [asdict(point) for point in points] for by, points in self.points.items()},
            "remarks": list(self.remarks),
        }

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        """Accuracy in per cent (the loss, without classes): one row per level, one column per criterion."""
        classes = self._classes
        widths = {by: max(9, len(by) + 2) for by in self.points}
        lines = [f"{'kept %':>7}" + "".join(f"{by:>{widths[by]}}" for by in self.points)]
        for row, level in enumerate(self.levels):
            cells = [_cell(points[row], classes, widths[by]) for by, points in self.points.items()]
            lines.append(f"{100 * level:>7.4g}" + "".join(cells))
        lines.insert(1, "-" * len(lines[0]))
        return "\n".join([*lines, *[line for said in self.remarks for line in ("", said)]])


def pruning_curve(
    model: nn.Module,
    posterior: Posterior | Network,
    data: Data,
    *,
    output: OutputPart = None,
    state: Network | None = None,
    by: Sequence[str] = CRITERIA,
    levels: Sequence[float] = LEVELS,
    per: str = "global",
    names: Collection[str] | None = None,
    repeats: int = 3,
    seed: int = 0,
    loss: Loss = "cross-entropy",
    batch: int = BATCH,
    statistics: AnyInputs = None,
    progress: Progress | bool | None = None,
) -> PruningCurve:
    """Prune one network by several criteria to several levels, each time from the whole network, and evaluate it.

    Args:
        model: the function; left as it was.
        posterior: means and standard deviations that rank the weights, as in `prune`.
        data: inputs and targets to evaluate on, as in `evaluate`.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        state: the network to prune, in the basis of the posterior (see `transfer`); by default the posterior's mean.
        by: the criteria.
        levels: shares to keep.
        per: as in `prune`.
        names: only these tensors are pruned, by name or pattern.
        repeats: orders that "random" averages over.
        seed: seed of the first of them.
        loss: as in `onebasin.losses`.
        batch: largest number of examples in one forward pass.
        statistics: inputs, such as those of training, on which the running statistics of norms are measured for each
            pruned network. False: keep those of the network. None: the same, with a warning and a remark where the
            network is the mean of a Posterior, which has only averages.
        progress: True for a line on stderr with the time left, or a function that is called with (points of the curves
            done, points, criterion).

    Returns:
        Loss and accuracy for each criterion and level. Nothing that was given is changed.
    """
    model = select_output(model, output)
    inputs, targets = pair_of(data, model)
    statistics = measured_of(statistics, model)
    constant = posterior.constant_statistics if isinstance(posterior, Posterior) else frozenset()
    averaged: tuple[str, ...] = ()
    if state is None and isinstance(posterior, Posterior) and statistics is None:
        averaged = norms_used(model, posterior.mean, inputs, constant=constant)
    remedy = "give statistics=, inputs such as those of training (on the command line --statistics), or False"
    remarks = (warn_stale("pruned means of this posterior", averaged, remedy),) if averaged else ()
    if state is None:
        state = posterior.mean if isinstance(posterior, Posterior) else posterior
    network = as_state(state)

    def pruned(masks: Masks) -> State:
        left = masks.apply(network)
        if statistics is None or statistics is False:
            return left
        return refreshed_one(model, left, statistics, constant=constant)[0]

    if repeats < 1 or not _several(by) or not _several(levels):
        raise InputError(
            f"expected at least one criterion and one level, each as a list, and repeats >= 1, found "
            f"by={by!r}, levels={levels!r} and repeats={repeats}: give some, such as levels=[0.5]"
        )
    levels = tuple(float(level) for level in levels)
    progress = progress_of(progress)
    points: dict[str, tuple[Point, ...]] = {}
    examples = 0
    for criterion in by:
        orders = range(repeats if criterion == "random" else 1)
        rankings = [Ranking.of(posterior, criterion, names=names, seed=seed + order) for order in orders]
        row = list[Point]()
        for level in levels:
            if progress is not None:
                progress(len(points) * len(levels) + len(row), len(by) * len(levels), criterion)
            masks = [ranking.masks(level, per) for ranking in rankings]
            scores = [losses(model, pruned(one), inputs, targets, loss=loss, batch=batch) for one in masks]
            right = [1 - score.error for score in scores if score.error is not None]
            examples = scores[0].examples
            row.append(_point(level, masks[0].kept, [score.loss for score in scores], right))
        points[criterion] = tuple(row)
    return PruningCurve(points, levels, per, examples, remarks)


def _several(given: object) -> bool:
    """Whether there is a list with something in it; a text would be a sequence of letters."""
    return isinstance(given, Collection) and not isinstance(given, str) and len(given) > 0


def _point(level: float, kept: int, values: list[float], right: list[float]) -> Point:
    accuracy = math.fsum(right) / len(right) if right else None
    return Point(level, kept, math.fsum(values) / len(values), accuracy, _deviation(right or values))


def _deviation(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _cell(point: Point, classes: bool, width: int) -> str:
    if classes and point.accuracy is not None:
        return f"{100 * point.accuracy:>{width}.2f}"
    return f"{point.loss:>{width}.4g}"
