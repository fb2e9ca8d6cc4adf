"""REPAIR (Jordan et al., 2023): give every unit of a merged network the spread its unit had in the networks it is from.

Averaging weights that differ shrinks the variance of activations layer by layer. A unit with mean m and standard
deviation s over some data is rescaled to the averages m* and s* of its parents:

    z -> (z - m) s*/s + m*,        weight -> weight s*/s,        bias -> (bias - m) s*/s + m*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.errors import InputError
from onebasin.functional import (
    BATCH,
    Bound,
    Inputs,
    LayerCall,
    Moments,
    NormCall,
    Observer,
    Renormalise,
    batches,
    frozen_norms,
    refreshed_one,
    replaced,
)
from onebasin.reporting import (
    Axis,
    Cell,
    Column,
    Number,
    Record,
    Result,
    Rule,
    Series,
    Table,
    counted,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, shared_names, trained_parameters


def recalibrate(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int | None = None) -> State:
    """Return the network with running means and variances measured on `inputs`; see `onebasin.norms.refreshed`.

    Args:
        model: the function; left exactly as it was.
        state: its weights.
        inputs: data as in `outputs`; some thousand examples are plenty.
        batch: largest number of examples that are normalised together.

    Raises:
        InputError: no norm with running statistics was used.
    """
    state, norms = refreshed_one(model, state, inputs, batch=batch)
    if not norms:
        raise InputError(
            f"expected a batch norm with running statistics in {type(model).__name__}, and none was used: "
            "there is nothing to recalibrate, repair works for networks without one"
        )
    return state


_FINAL = "it gives the output: no other layer follows"
_FEW = 2  # examples that show the way through the model


@dataclass(frozen=True)
class Layer:
    """A linear or convolutional layer.

    Attributes:
        weight: state-dict name of its weight.
        bias: that of its bias, None without one.
        why: a reason to leave it alone; "" if there is none.
        able: whether it could be rescaled all the same.
    """

    weight: str
    bias: str | None
    why: str = ""
    able: bool = True


def survey(bound: Bound, inputs: Inputs) -> tuple[Layer, ...]:
    """Follow a few examples through the model and list its layers in the order of their first use."""
    return tuple(layer for layer, _ in _followed(bound, inputs))


def output_layers(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs) -> tuple[Layer, ...]:
    """List the layers whose results reach the output without passing another layer; usually one.

    Args:
        model: the function; left exactly as it was.
        state: its weights.
        inputs: some examples, of which two are followed.

    Returns:
        With `why` empty where the rows of a layer can be mixed as its outputs should be; only a run can tell whether
        the output is its result as it is.
    """
    return tuple(
        replace(layer, why="") if layer.able and layer.why == _FINAL else layer
        for layer, final in _followed(Bound(model, state), inputs)
        if final
    )


def _followed(bound: Bound, inputs: Inputs) -> list[tuple[Layer, bool]]:
    """The layers in the order of their first use, and whether their results reach the output directly."""
    with torch.inference_mode(False):  # in that mode autograd keeps no record
        bound = Bound(bound.model, {name: _recordable(value) for name, value in bound.tensors.items()})
        call = tree_map(_recordable, next(iter(batches(inputs, _FEW)))[1])
        watch = _Follow(bound)
        with watch:
            output = bound(call, grad=True)
        final = watch.reaching(output)
    first, trained = shared_names(bound.model), trained_parameters(bound.model)
    layers = []
    for name, bias in watch.biases.items():
        frozen = any(first[own] not in trained for own in (name, bias) if own in first)
        verdict = ("it is frozen", False) if frozen else watch.verdict(name, final)
        layers.append((Layer(name, bias or None, *verdict), name in final))
    return layers


def _recordable(value: Any) -> Any:
    """A copy of a tensor that was made in inference mode; everything else as it is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


class _Follow(Observer):
    """Counts uses of weights, and sees where the result of each layer goes.

    Every result is cut off from what made it and becomes a leaf of autograd's record. So the record of the output
    ends at those results that reach it without passing another layer.
    """

    def __init__(self, bound: Bound) -> None:
        super().__init__(bound.tensors)
        first = shared_names(bound.model)
        self.constant = frozen_norms(bound.model)
        self.tied = {first[name] for name in first if first[name] != name}
        self.biases: dict[str, str | None] = {}  # of each layer, in the order of first use
        self.uses: Counter[str] = Counter()
        self.elsewhere: set[str] = set()
        self.normed: set[str] = set()
        self._made: list[tuple[Tensor, int, str]] = []  # kept, so that a result is known again by identity
        self._leaves: list[tuple[Tensor, str]] = []

    def layer(self, call: LayerCall) -> Tensor:
        self.biases[call.weight] = call.bias
        self.uses.update([call.weight] + ([call.bias] if call.bias else []))
        leaf = call.result.detach().requires_grad_()
        result = leaf.clone()  # an activation may work in place, which a leaf does not allow
        self._leaves.append((leaf, call.weight))
        self._made.append((result, result._version, call.weight))
        return result

    def norm(self, call: NormCall) -> None:
        if call.mean in self.constant:  # it restores nothing: its statistics stay
            return
        for result, version, name in self._made:
            if result is call.input and result._version == version:  # no activation in place came between
                self.normed.add(name)

    def touched(self, name: str) -> None:
        self.elsewhere.add(name)

    def reaching(self, output: Tensor) -> set[str]:
        """Names of the layers whose results reach the output without passing another layer."""
        ends, seen, waiting = set(), set(), [output.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            ends.add(id(getattr(node, "variable", None)))
            waiting += [parent for parent, _ in node.next_functions]
        return {name for leaf, name in self._leaves if id(leaf) in ends}

    def verdict(self, weight: str, final: set[str]) -> tuple[str, bool]:
        """Why a layer should be left alone, and whether it could be rescaled all the same."""
        bias = self.biases[weight]
        own = [weight, bias] if bias else [weight]
        if bias == "":
            return "its bias is computed from other weights", False
        if any(self.uses[name] > 1 or name in self.elsewhere | self.tied for name in own):
            return "its weights are used more than once", False
        if weight in self.normed:
            return "a batch norm follows and restores mean and spread itself", True
        if weight in final:
            return _FINAL, True
        return "", True


Statistics = dict[str, tuple[Tensor, Tensor]]  # name of a weight -> mean (units,) and std (units,) of its layer

_CONSTANT = 1e-6  # a unit whose std is below this share of its mean and its target is rounding noise


@dataclass(frozen=True, eq=False, repr=False)
class Repair(Result):
    """A repaired network and what was done to it.

    Attributes:
        state: the network.
        corrected: names of the weights of layers with mean and spread restored.
        scaled: those of layers without bias, where only the spread is.
        norms: names of the running means of batch norms that were recalibrated.
        left: name of a weight -> why its layer was left alone.
        constant: name of a weight -> number of its units that do not vary, so that only their mean was restored.
        scales: name of a weight -> factor of each of its units (units,).
    """

    state: State
    corrected: tuple[str, ...]
    scaled: tuple[str, ...]
    norms: tuple[str, ...]
    left: Mapping[str, str]
    constant: Mapping[str, int]
    scales: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What was done, in one line."""
        parts = [f"{counted(len(self.corrected), 'layer')} rescaled"] if self.corrected else []
        parts += [f"{len(self.scaled)} without bias scaled only"] if self.scaled else []
        parts += [f"{counted(len(self.norms), 'batch norm')} recalibrated"] if self.norms else []
        parts += [f"{counted(sum(self.constant.values()), 'constant unit')} shifted only"] if self.constant else []
        return ", ".join(parts) or "nothing to repair"

    def record(self) -> Record:
        """What was done to each layer, and by which factors."""
        rows: list[tuple[Cell, ...]] = []
        for name, scale in self.scales.items():
            mean, low, high = (float(value) for value in (scale.mean(), scale.min(), scale.max()))
            done = "mean and spread restored" if name in self.corrected else "spread restored"
            still = f", {self.constant[name]} constant units shifted only" if name in self.constant else ""
            rows.append((name, Number(len(scale)), Number(mean, low=low, high=high), done + still))
        rows += [(name, None, None, "recalibrated") for name in self.norms]
        rows += [(name, None, None, f"left alone: {why}") for name, why in self.left.items()]
        shown = largest_first(self.scales.items(), lambda item: float(item[1].log().abs().max()), _BARS)[:_BARS]
        places = tuple(map(float, range(len(shown))))
        figure = one_panel(
            "factors",
            "By how much were units rescaled?",
            f"{self.summary}. Points are means over the units of a layer, lines run from the least to the largest.",
            "bars",
            Axis("", names=tuple(name for name, _ in shown)),
            Axis("factor of a unit", "log"),
            series=(
                Series(
                    "",
                    places,
                    tuple(float(scale.mean()) for _, scale in shown),
                    tuple(float(scale.min()) for _, scale in shown),
                    tuple(float(scale.max()) for _, scale in shown),
                ),
            ),
            rules=(Rule("unchanged", 1.0),),
        )
        items = (Table("layers", "What was done to each layer?", _LAYERS, tuple(rows)), figure)
        return result_record(
            "repair",
            "Repair of a merged network",
            f"{self.summary}.",
            items if self.scales else items[:1],
            values={
                **{"corrected": self.corrected, "scaled": self.scaled, "norms": self.norms, "left": dict(self.left)},
                **{"constant": dict(self.constant)},
                **{"scales": {name: scale.tolist() for name, scale in self.scales.items()}},
            },
        )


_BARS = 20  # layers of a figure
_LAYERS = (
    Column("layer", "name of its weight"),
    Column("units", digits=0),
    Column("factor", "mean over units, and the least and the largest"),
    Column("what was done"),
)


def unit_statistics(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> Statistics:
    """Mean and standard deviation of what each linear or convolutional layer gives, per unit, in evaluation mode.

    Averaged over examples and positions, exactly also over several batches.
    """
    bound = Bound(model, state)
    watch = _Measure(bound.tensors)
    for _, call in batches(inputs, batch):
        with watch:
            bound.run(call)
    return {name: (moments.mean, moments.std) for name, moments in watch.moments.items()}


def blend(parts: Sequence[Statistics], weights: Sequence[float]) -> Statistics:
    """Weighted sum of means and of standard deviations: the targets for a network averaged with these weights."""
    return {
        name: (
            sum((weight * part[name][0] for part, weight in zip(parts, weights, strict=True)), torch.zeros(())),
            sum((weight * part[name][1] for part, weight in zip(parts, weights, strict=True)), torch.zeros(())),
        )
        for name in parts[0]
    }


def repair(
    model: nn.Module,
    state: Mapping[str, Tensor],
    targets: Statistics,
    inputs: Inputs,
    *,
    layers: Collection[str] | None = None,
    batch: int = BATCH,
) -> Repair:
    """Give every unit of `state` the mean and standard deviation in `targets`.

    One pass from the first layer to the last, in which what a layer gives is corrected before the next layer sees
    it, since a correction upstream changes the statistics downstream. Batch norms are recalibrated in the same pass.
    If the data fit into one batch the result is exact: afterwards the mean and standard deviation of each corrected
    unit over `inputs` are the targets. With several batches each is corrected by its own statistics on the way, as
    in the paper, and their statistics are combined by the law of total variance.

    Args:
        model: the function; left exactly as it was.
        state: the merged network.
        targets: from `unit_statistics` and `blend`.
        inputs: data as in `outputs`, those of the targets.
        layers: names of weights whose layers to correct. By default all but those that give the output, with no
            layer behind them, and those directly followed by a batch norm, which does it itself.
        batch: largest number of examples that are corrected together.
    """
    bound = Bound(model, state)
    plan = survey(bound, inputs)
    chosen = _chosen(plan, layers, targets)
    watch = _Correct(bound, chosen, targets)
    for _, call in batches(inputs, batch):
        with watch:
            bound(call)
    new, constant, scales = dict(watch.statistics()), {}, {}
    for name, layer in chosen.items():
        scale, shift, still = correction(watch.units[name], targets[name], shifted=layer.bias is not None)
        weight = bound.tensors[name].double()
        new[name], scales[name] = weight * _along(scale, weight, 0), scale.cpu()
        if layer.bias is not None:
            new[layer.bias] = bound.tensors[layer.bias].double() * scale + shift
        if still:
            constant[name] = still
    return Repair(
        replaced(model, state, new),
        tuple(name for name, layer in chosen.items() if layer.bias is not None),
        tuple(name for name, layer in chosen.items() if layer.bias is None),
        tuple(mean for mean, _ in watch.moments),
        {layer.weight: layer.why for layer in plan if layer.weight not in chosen},
        constant,
        scales,
    )


def correction(moments: Moments, target: tuple[Tensor, Tensor], *, shifted: bool) -> tuple[Tensor, Tensor, int]:
    """Scale and shift (units,) with z -> z scale + shift, and the number of units that do not vary.

    Those keep their scale. Without a bias (`shifted` False) there is no shift.
    """
    mean, std = moments.mean, moments.std
    varies = std > _CONSTANT * (mean.abs() + target[1])
    scale = torch.where(varies, target[1] / std.where(varies, torch.ones_like(std)), torch.ones_like(std))
    shift = target[0] - scale * mean if shifted else torch.zeros_like(mean)
    return scale, shift, int((~varies).sum())


def _chosen(plan: Sequence[Layer], layers: Collection[str] | None, targets: Statistics) -> dict[str, Layer]:
    """The layers to correct, and a refusal if one that was named cannot be."""
    able = {layer.weight: layer for layer in plan if layer.able and layer.weight in targets}
    if layers is None:
        return {name: layer for name, layer in able.items() if not layer.why}
    if wrong := [name for name in layers if name not in able]:
        why = next((layer.why for layer in plan if layer.weight == wrong[0]), "no layer has a weight of this name")
        raise InputError(
            f"layer {wrong[0]} cannot be corrected ({why}): choose among {', '.join(able) or 'none, there is no such'}"
        )
    return {name: able[name] for name in able if name in layers}


def _along(values: Tensor, like: Tensor, axis: int) -> Tensor:
    """Values (units,) in a shape that multiplies `like` along an axis, on its device."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return values.to(like.device).reshape(shape)


class _Measure(Observer):
    """Takes the statistics of layers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.moments: dict[str, Moments] = {}

    def layer(self, call: LayerCall) -> Tensor:
        self.moments.setdefault(call.weight, Moments()).add(call.result, call.axis)
        return call.result


class _Correct(Renormalise):
    """Takes the statistics of layers, and hands on what they give with the target statistics."""

    def __init__(self, bound: Bound, chosen: Mapping[str, Layer], targets: Statistics) -> None:
        super().__init__(bound.tensors, frozen_norms(bound.model))
        self.chosen, self.targets = chosen, targets
        self.units: dict[str, Moments] = {}

    def layer(self, call: LayerCall) -> Tensor:
        if call.weight not in self.chosen:
            return call.result
        here, total = Moments(), self.units.setdefault(call.weight, Moments())
        for moments in (here, total):
            moments.add(call.result, call.axis)
        scale, shift, _ = correction(here, self.targets[call.weight], shifted=call.bias is not None)
        result = call.result
        return result * _along(scale, result, call.axis).to(result.dtype) + _along(shift, result, call.axis).to(
            result.dtype
        )
