"""Structured pruning: whole units go, and the tensors become smaller.

A unit of a Space stands on several tensors (its row, its bias, its norm, its column in the next layer), and all of
them lose it together. Copies of a fibred space lose equally many units each, not the same ones: the network is first
moved along its orbit so that the units to keep come first in every copy, and then everything behind them is cut off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from onebasin.alignment import balance
from onebasin.errors import InputError, ModelError, SymmetryError
from onebasin.functional import Inputs, call_arguments, evaluation_mode, outputs
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import Masks, count, ranks, shared_memory, signal_to_noise
from onebasin.reporting import (
    SHOWN,
    Axis,
    Column,
    Number,
    Record,
    Result,
    Series,
    Table,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, TensorSpec, as_spec, as_state, check_spec, trained_parameters
from onebasin.symmetry import Element, ExpandedElement, Leg, Space, Symmetry, labels

UNIT_CRITERIA = ("norm", "snr", "random")


def owners(space: Space, leg: Leg, shape: Sequence[int]) -> Tensor:
    """For each entry of a tensor the number copy * n + unit of the unit that owns it through this leg, -1 for none.

    >>> from onebasin.symmetry import Grid
    >>> hidden = Space("hidden", 2, True, (), (), (Leg("out.weight", Grid(1, ((0, 2, 2),), ((2, 1),))),))
    >>> owners(hidden, hidden.legs[0], (1, 4))
    tensor([[0, 0, 1, 1]])
    """
    number = torch.zeros([1] * len(shape), dtype=torch.long)
    outside = torch.zeros([1] * len(shape), dtype=torch.bool)
    places = [*zip(leg.over, [size for _, size in space.parents], strict=True), (leg.grid, space.size)]
    for grid, size in places:
        label = _along(labels(grid, shape[grid.axis]), grid.axis, len(shape))
        outside, number = outside | (label < 0), number * size + label
    for grid in leg.within:
        outside = outside | (_along(labels(grid, shape[grid.axis]), grid.axis, len(shape)) < 0)
    return torch.where(outside, -1, number).expand(tuple(shape))


def _along(values: Tensor, axis: int, axes: int) -> Tensor:
    return values.reshape([-1 if number == axis else 1 for number in range(axes)])


def gone(symmetry: Symmetry, removed: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Tensor name -> True where an entry belongs to a removed unit; `removed` is (copies * n,) for each space."""
    removed_entries: dict[str, Tensor] = {}
    for space in symmetry.spaces:
        for leg in space.legs if space.name in removed else ():
            owner = owners(space, leg, shapes[leg.tensor])
            lost = removed[space.name][owner.clamp_min(0)] & (owner >= 0)
            removed_entries[leg.tensor] = removed_entries[leg.tensor] | lost if leg.tensor in removed_entries else lost
    return removed_entries


def unit_worth(
    state: Mapping[str, Tensor], symmetry: Symmetry, by: str, posterior: Posterior | None = None, seed: int = 0
) -> dict[str, Tensor]:
    """The worth of each unit of each permutable space, float64 (copies * n,).

    "norm" is the norm of all weights of the unit, in the lightest scales of the network, so that it does not depend on
    how a layer shares its scale with the next; 0 for a unit whose scale has no best value because nothing comes in or
    nothing goes out. "snr" is the norm of |weight| / std of the posterior, "random" an order by the seed.
    """
    spaces = [space for space in symmetry.spaces if space.permutable]
    if by == "random":
        stream = torch.Generator().manual_seed(seed)
        return {
            s.name: torch.rand(s.copies * s.size, generator=stream, dtype=torch.float64) for s in spaces
        }  # fmt: skip
    if by not in UNIT_CRITERIA:
        raise InputError(f"expected a criterion out of {', '.join(UNIT_CRITERIA)}, found {by!r}: give 'norm'")
    lightest = balance(state, symmetry) if by == "norm" and symmetry.dimensions else None
    squares = _squares(state if lightest is None or lightest.state is None else lightest.state, by, posterior)
    worth = {space.name: _owned(space, squares) for space in spaces}
    for unit in () if lightest is None else lightest.dead:
        if unit.space in worth:
            space = symmetry[unit.space]
            sizes = [*[size for _, size in space.parents], space.size]
            worth[unit.space].view(sizes)[unit.unit] = 0
    return worth


def _squares(state: Mapping[str, Tensor], by: str, posterior: Posterior | None) -> dict[str, Tensor]:
    """The part of every weight in the square of its unit's worth; running statistics have none."""
    floating = {name: state[name] for name in trained_parameters(state) if state[name].is_floating_point()}
    weights = {name: value.detach().double().cpu() for name, value in floating.items()}
    if by == "norm":
        return {name: value.square() for name, value in weights.items()}
    if posterior is None:
        raise InputError("snr needs standard deviations, found no posterior: give one, or choose by='norm'")
    std = posterior.layout.shaped(posterior.flat_std)
    return {
        name: signal_to_noise(value.abs(), std[name].cpu()).square() for name, value in weights.items() if name in std
    }  # fmt: skip


def _owned(space: Space, squares: Mapping[str, Tensor]) -> Tensor:
    total = torch.zeros(space.copies * space.size, dtype=torch.float64)
    for leg in space.legs:
        if leg.tensor in squares:
            owner = owners(space, leg, squares[leg.tensor].shape)
            inside = owner >= 0
            total.index_add_(0, owner[inside], squares[leg.tensor][inside])
    return total.sqrt()


LayerWidths = dict[str, Any]  # attribute -> value
Follower = Callable[[Any], LayerWidths | None]  # layer with its new tensors -> its widths; None if they do not tell


def _linear(layer: nn.Linear) -> LayerWidths:
    return {"out_features": layer.weight.shape[0], "in_features": layer.weight.shape[1]}


def _bilinear(layer: nn.Bilinear) -> LayerWidths:
    names = ("out_features", "in1_features", "in2_features")
    return dict(zip(names, layer.weight.shape, strict=True))


def _convolution(layer: _ConvNd) -> LayerWidths:
    """Of a grouped convolution the weight does not tell how many groups are left; its input does, in `_seen`."""
    known: LayerWidths = {"out_channels": layer.weight.shape[0]}
    return known if layer.groups > 1 else {**known, "in_channels": layer.weight.shape[1]}


def _transposed(layer: _ConvTransposeNd) -> LayerWidths | None:
    if layer.groups > 1:
        return None
    return {"in_channels": layer.weight.shape[0], "out_channels": layer.weight.shape[1]}


def _norm(layer: _NormBase) -> LayerWidths:
    tensor = layer.weight if layer.weight is not None else layer.running_mean
    return {} if tensor is None else {"num_features": len(tensor)}


def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> LayerWidths:
    return {"normalized_shape": tuple(layer.weight.shape)}


def _group_norm(layer: nn.GroupNorm) -> LayerWidths | None:
    return {"num_channels": len(layer.weight)} if layer.num_groups == 1 else None


def _embedding(layer: nn.Embedding | nn.EmbeddingBag) -> LayerWidths:
    return {"num_embeddings": layer.weight.shape[0], "embedding_dim": layer.weight.shape[1]}


def _activation(layer: nn.PReLU) -> LayerWidths:
    return {"num_parameters": len(layer.weight)}


def _recurrent(layer: nn.RNNBase) -> LayerWidths | None:
    into, back = layer.weight_ih_l0, layer.weight_hh_l0
    assert isinstance(into, Tensor) and isinstance(back, Tensor)
    return None if layer.proj_size else {"input_size": into.shape[1], "hidden_size": back.shape[1]}


def _cell(layer: nn.RNNCellBase) -> LayerWidths:
    return {"input_size": layer.weight_ih.shape[1], "hidden_size": layer.weight_hh.shape[1]}


FOLLOWERS: tuple[tuple[tuple[type[nn.Module], ...], Follower], ...] = (
    ((nn.Linear,), _linear),
    ((nn.Bilinear,), _bilinear),
    ((_ConvTransposeNd,), _transposed),
    ((_ConvNd,), _convolution),
    ((_NormBase,), _norm),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    ((nn.GroupNorm,), _group_norm),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.PReLU,), _activation),
    ((nn.RNNBase,), _recurrent),
    ((nn.RNNCellBase,), _cell),
)


def resized(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs | None, known: Collection[type[nn.Module]] = ()
) -> nn.Module:
    """A copy of a module with the tensors of a smaller network, after `remove_units`.

    Tensors take the values and shapes of the state; widths that torch's own layers keep beside them (`in_features`,
    `out_channels`, `num_features`, `groups`, ...) follow. The copy is run once: that shows whether everything fits,
    and how many groups a convolution has left.

    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> small = {"0.weight": torch.ones(5, 3), "0.bias": torch.ones(5), "2.weight": torch.ones(2, 5),
    ...          "2.bias": torch.ones(2)}
    >>> resized(model, small, torch.zeros(1, 3))[0]
    Linear(in_features=3, out_features=5, bias=True)

    Args:
        model: the module of the old network; left as it was.
        state: all tensors of the smaller one.
        inputs: an example input; None where the copy shall not be run, which is refused where tensors do not tell all
            widths.
        known: classes of your own that hold tensors and take every width from them, so that nothing has to follow.

    Raises:
        InputError: there are no inputs, and the model has grouped convolutions or norms without weights.
        SpecError: names are missing, or there are others.
        ModelError: a layer of a class that is not known here changes its size, or the copy does not run: then the
            code of the model has a width written into it, and the smaller module has to be built by hand.
    """
    _check_names(model, state)
    small = copy.deepcopy(model)
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, layer in small.named_modules():
        changed = _replace(layer, path, state, replaced)
        if changed:
            for name, width in _followed(path, layer, tuple(known)).items():
                setattr(layer, name, width)
    if inputs is not None:
        _run(small, inputs)
    elif unknown := _widths_of_data(small):
        raise InputError(
            f"expected inputs= for {type(model).__name__}, because the tensors of {unknown[0][0]!r} do not tell all of "
            "its widths, found none: give an example input"
        )
    return small


def _widths_of_data(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers that have widths which only the data tell: grouped convolutions, and norms without weights."""
    kinds = (nn.LayerNorm, nn.RMSNorm, _NormBase)
    return [
        (path, layer)
        for path, layer in model.named_modules()
        if (isinstance(layer, _ConvNd) and layer.groups > 1)
        or (isinstance(layer, kinds) and getattr(layer, "weight", None) is None)
    ]


def _check_symmetry(network: State, symmetry: Symmetry) -> None:
    """Refuse the symmetry of another network."""
    for name in dict.fromkeys(leg.tensor for space in symmetry.spaces for leg in space.legs):
        own, known = tuple(network[name].shape) if name in network else None, tuple(symmetry.shapes.get(name, ()))
        if own is None or (known and own != known):
            raise SymmetryError(
                f"expected the symmetry of this network, found one of another, with {name!r} {known} where the network "
                f"has {'no such tensor' if own is None else own}: discover it on this model, as "
                "onebasin.discover(model, inputs)"
            )


def _check_names(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse other names; shapes are free."""
    expected = as_spec(model)
    given = {
        name: expected.get(name, TensorSpec(tuple(value.shape), value.dtype)) for name, value in as_state(state).items()
    }
    check_spec(given, expected, where=f"as a smaller state of {type(model).__name__}, what was given")


def _replace(
    layer: nn.Module, path: str, state: Mapping[str, Tensor], made: dict[int, tuple[nn.Parameter, nn.Parameter]]
) -> bool:
    """Give a layer its own tensors of the state; whether a shape is another one.

    `made` maps the id of an old parameter to it, which keeps the id taken, and to the new one: tied stay tied.
    """
    changed, prefix = False, f"{path}." if path else ""
    for name, old in list(layer._parameters.items()):
        if old is not None:
            value = state[prefix + name].detach()
            changed |= old.shape != value.shape
            new = nn.Parameter(value.clone(), requires_grad=old.requires_grad)
            setattr(layer, name, made.setdefault(id(old), (old, new))[1])
    for name, buffer in list(layer._buffers.items()):
        if buffer is not None and prefix + name in state:
            value = state[prefix + name].detach()
            changed |= buffer.shape != value.shape
            layer._buffers[name] = value.clone()
    return changed


def _followed(path: str, layer: nn.Module, known: tuple[type[nn.Module], ...]) -> LayerWidths:
    if isinstance(layer, known):
        return {}
    follow = next((follow for kinds, follow in FOLLOWERS if isinstance(layer, kinds)), None)
    widths = None if follow is None else follow(layer)
    if widths is None:
        raise ModelError(
            f"expected layers whose widths follow their tensors, found {type(layer).__name__} under {path!r}, which is "
            "unknown or has groups, heads or projections: name its class in known= if its tensors tell its widths, "
            "keep the spaces that stand on it whole, or build the smaller module by hand and load the state"
        )
    return widths


class _Watch:
    """While the copy runs, widths that only the data tell are set as they are met."""

    def __init__(self, small: nn.Module) -> None:
        self.found: list[tuple[nn.Module, LayerWidths]] = []
        self.handles = [layer.register_forward_pre_hook(self._seen) for _, layer in _widths_of_data(small)]

    def _seen(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        value: Tensor = arguments[0]
        widths: LayerWidths
        if isinstance(layer, _ConvNd):
            channels = value.shape[-1 - len(layer.kernel_size)]
            widths = {"in_channels": channels, "groups": max(1, channels // layer.weight.shape[1])}
        elif isinstance(layer, _NormBase):
            widths = {"num_features": value.shape[1]}
        else:
            before: Any = layer.normalized_shape
            widths = {"normalized_shape": tuple(value.shape[-len(before) :])}
        for name, width in widths.items():
            setattr(layer, name, width)
        self.found.append((layer, widths))


def _run(small: nn.Module, inputs: Inputs) -> None:
    """Run the copy once; the widths that this showed stay."""
    arguments, options = call_arguments(inputs)
    watch = _Watch(small)
    try:
        with evaluation_mode(small), torch.no_grad(), torch.random.fork_rng(devices=[]):
            small(*arguments, **options)
    except Exception as error:  # the forward pass of a user can fail in any way
        raise ModelError(
            f"expected a smaller {type(small).__name__} that runs, found one that does not ({type(error).__name__}: "
            f"{error}): a width is written into its code; build the smaller module by hand and load the state"
        ) from error
    finally:
        for handle in watch.handles:
            handle.remove()
    for layer, widths in watch.found:
        for name, width in widths.items():
            setattr(layer, name, width)


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Keep = float | Mapping[str, float | Tensor | Sequence[int]]


@dataclass(frozen=True, eq=False, repr=False)
class Removal(Result):
    """A network without some of its units.

    Attributes:
        state: the smaller network; units keep their order.
        kept: space name -> numbers of the units that are left, (*parents, m), in the old numbering.
        masks: in the shapes of the old network, False on everything that belonged to a removed unit.
        zeroed: the old network with zeros there.
        units: space name -> how many units it had, in all copies together.
    """

    state: State
    kept: Mapping[str, Tensor]
    masks: Masks
    zeroed: State
    units: Mapping[str, int]

    def record(self) -> Record:
        """A table and bars of the units that each space had and has."""
        before = sum(value.numel() for value in self.zeroed.values())
        after = sum(value.numel() for value in self.state.values())
        text = f"{after:,} of {before:,} numbers are left ({after / max(1, before):.2%})."
        names = largest_first(self.kept, lambda name: self.units[name])
        rows = tuple((name, Number(self.units[name]), _counted(self.kept[name]), Number(self.kept[name].numel()))
                     for name in names)  # fmt: skip
        shown = tuple(names[:SHOWN])
        places = tuple(range(len(shown)))
        series = (
            Series("before", places, tuple(float(self.units[name]) for name in shown), dashed=True),
            Series("left", places, tuple(float(self.kept[name].numel()) for name in shown)),
        )
        more = "" if len(shown) == len(names) else f" The {len(shown)} largest of {len(names):,} spaces."
        columns = (Column("space"), Column("units before", digits=0), Column("left in each copy"),
                   Column("units left", digits=0))  # fmt: skip
        return result_record(
            "removal",
            "Units removed from a network",
            text,
            (
                Table("spaces", "Units of each space", columns, rows),
                one_panel("bars", "Which layers lost units?", text + more, "bars", Axis("", names=shown), "units",
                       series=series),
            ),
            values={"numbers": after, "numbers_before": before, "units": dict(self.units),
                    "kept": {name: kept.tolist() for name, kept in self.kept.items()}},
        )  # fmt: skip

    def error(self, model: nn.Module, inputs: Inputs, known: Collection[type[nn.Module]] = ()) -> float:
        """Distance of the smaller network from the old one with its removed units at zero, in float64.

        The largest difference of outputs relative to the largest output. It is of rounding size where units are only
        summed over; not where something depends on their number: the mean of a layer norm, the 1 / sqrt(width) of
        attention. Arguments as in `resized`.
        """
        wide, small = ({n: v.double() if v.is_floating_point() else v for n, v in s.items()}
                       for s in (self.zeroed, self.state))  # fmt: skip
        before = outputs(model, wide, inputs)
        after = outputs(resized(model, self.state, inputs, known), small, inputs)
        return float((after - before).abs().max() / before.abs().max().clamp_min(1e-300))


def remove_units(
    state: Mapping[str, Tensor] | nn.Module,
    symmetry: Symmetry,
    keep: Keep = 0.5,
    by: str = "norm",
    *,
    posterior: Posterior | None = None,
    seed: int = 0,
) -> Removal:
    """Remove whole units of the permutable spaces of a network; its tensors become smaller.

    >>> import onebasin as ob
    >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> smaller = remove_units(model, ob.discover(model, torch.zeros(1, 3)), keep=0.5)
    >>> {name: tuple(value.shape) for name, value in smaller.state.items()}
    {'0.weight': (4, 3), '0.bias': (4,), '2.weight': (2, 4), '2.bias': (2,)}

    Args:
        state: the network; it is not changed.
        symmetry: found by `discover` for its architecture.
        keep: the part of the units to keep in every space, at least one unit each; or a dict from the name of a space
            to its part, or to the numbers of the units to keep, (m,) or (*parents, m): other spaces are left whole.
        by: what decides where numbers do not: "norm", "snr" or "random"; see `owners.unit_worth`.
        posterior: whose standard deviations "snr" takes, in the basis of the network.
        seed: of "random".

    Returns:
        The smaller state, what was kept, and the old network with zeros in place of what went. Build the smaller
        module with `resized`, and see with `Removal.error` whether the function is that of the zeroed network.

    Raises:
        SymmetryError: the symmetry is that of another network, or what a removed unit owns in a tensor is no whole
            slice of it.
    """
    network = as_state(state)
    _check_symmetry(network, symmetry)
    wanted = _wanted(symmetry, keep)
    worth = unit_worth(network, symmetry, by, posterior, seed) if _undecided(wanted) else {}
    kept = {space.name: _kept(space, wanted[space.name], worth) for space in symmetry.spaces if space.name in wanted}
    removed = {name: _removed(symmetry[name], units) for name, units in kept.items()}
    away = gone(symmetry, removed, {name: tuple(value.shape) for name, value in network.items()})
    tied = shared_memory(network, list(away))
    masks = Masks({name: ~lost.to(network[name].device) for name, lost in away.items() if name not in tied}, tied)
    element = _kept_first(symmetry, removed)
    moved, left = symmetry.apply(element, network), masks.carried(element, symmetry)
    small = {
        name: _cut(name, value, left[tied.get(name, name)]) if name in away else value.clone()
        for name, value in moved.items()
    }
    shaped = {name: units.reshape(*[size for _, size in symmetry[name].parents], -1) for name, units in kept.items()}
    units = {name: len(lost) for name, lost in removed.items()}
    return Removal(small, shaped, masks, masks.apply(network), units)


def _wanted(symmetry: Symmetry, keep: Keep) -> dict[str, float | Tensor]:
    """The share, or the numbers, of the units to keep in each space that loses some."""
    every = [space.name for space in symmetry.spaces if space.permutable]
    given = keep if isinstance(keep, Mapping) else dict.fromkeys(every, keep)
    for name in given:
        if not symmetry[name].permutable:
            raise InputError(f"expected spaces whose units may change places, found {name!r}: leave it out of keep")
    return {name: _share(name, share) for name, share in given.items()}


def _share(name: str, given: Any) -> float | Tensor:
    """A share of the units of a space, or their numbers, int64 (..., m)."""
    try:
        numbers = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(torch.nan)
    if numbers.dim() and numbers.dtype in _WHOLE:
        return numbers.long()
    if not numbers.dim() and 0 < float(numbers) <= 1:
        return float(given)
    raise InputError(
        f"expected a share with 0 < keep <= 1 or the numbers of units, found {given!r} for {name!r}: give 0.5 for "
        "half, or a list such as [0, 2]"
    )


def _undecided(wanted: Mapping[str, float | Tensor]) -> bool:
    return any(not isinstance(share, Tensor) for share in wanted.values())


def _kept(space: Space, share: float | Tensor, worth: Mapping[str, Tensor]) -> Tensor:
    """Numbers of the units that are left in each copy, (copies, m), ascending."""
    if isinstance(share, Tensor):
        units = share.long().expand(*[size for _, size in space.parents], -1).reshape(space.copies, -1).sort(1).values
        if not units.shape[1] or bool((units < 0).any() | (units >= space.size).any() | (units.diff() == 0).any()):
            raise InputError(
                f"expected different numbers below {space.size} of the units of {space.name!r} to keep, found "
                f"{share.tolist()}: give each unit once"
            )
        return units
    many = max(1, count(share, space.size))
    rows = [ranks(row, row) for row in worth[space.name].reshape(space.copies, space.size)]
    return torch.stack([(row < many).nonzero()[:, 0] for row in rows])


def _removed(space: Space, units: Tensor) -> Tensor:
    """True for each unit that goes, (copies * n,)."""
    return torch.ones(space.copies, space.size, dtype=torch.bool).scatter(1, units, False).reshape(-1)


def _kept_first(symmetry: Symmetry, removed: Mapping[str, Tensor]) -> Element:
    """The element that moves, in every copy of every space, the units that stay before those that go."""
    orders: dict[str, Tensor] = {}
    for number, space in enumerate(symmetry.spaces):  # parents come first, so their orders are known here
        if space.name in removed:
            origin = ExpandedElement(symmetry, Element(orders, {})).origin(number)[0]
            lost = removed[space.name].reshape(space.copies, space.size)[origin]
            order = lost.int().argsort(dim=1, stable=True)
            orders[space.name] = order.reshape(*[size for _, size in space.parents], space.size)
    return Element(orders, {})


def _cut(name: str, value: Tensor, left: Tensor) -> Tensor:
    """The part of a tensor that is left, when that is a smaller box."""
    for axis in range(value.dim()):
        axes = [other for other in range(value.dim()) if other != axis]
        inside = (left.any(dim=axes) if axes else left).nonzero()[:, 0]
        value, left = value.index_select(axis, inside), left.index_select(axis, inside)
    if not bool(left.all()):
        raise SymmetryError(
            f"expected the removed units to own whole slices of {name}, found parts of slices: keep the spaces that "
            "stand on it whole, by a dict as keep"
        )
    return value


def _counted(kept: Tensor) -> str:
    copies = kept[..., 0].numel()
    return str(kept.shape[-1]) if copies == 1 else f"{kept.shape[-1]} x {copies}"
