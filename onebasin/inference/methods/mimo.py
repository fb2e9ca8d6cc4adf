"""MIMO: one network with M inputs and M outputs is trained to be M networks (Havasi et al., 2021).

The first layer has M slots, weights W_1 ... W_M for M inputs side by side, and the last layer M heads:

    trunk( sum_m W_m x_m + b ),        head m answers for x_m.

In training the slots see examples that are shuffled independently, but for a share of the rows in which all slots see
the same one. As a predictor all slots see the same input, and sum_m W_m x = (sum_m W_m) x: member m is head m on a
trunk whose first layer is the sum of the slots, an ordinary network. Members of a chain share all but the last layer,
statistics of batch norms included, which are those of training, as in the reference.

No wider module is built: the model itself is called with inputs and first weights side by side. That this is the same
as the sum of the slots if all see the same input is proved, in float64 with random weights on training inputs; models
that use their inputs elsewhere, or in another order, are refused.

The prior acts on each slot as on the first layer, and on each head with the share 1 / M, since the log likelihood is
the mean over heads. At the start the slots add up to the first layer of the start network, and the first head is its.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_unflatten

from onebasin.errors import InputError
from onebasin.functional import Call, moved, one_tensor, random_twin, tracked
from onebasin.inference.implicit import MemberMap, MemberTensor, Unrolled, check_members, member_plan
from onebasin.inference.kernel import ChainPlan
from onebasin.inference.layers import WEIGHTED, WeightLayer, few, ran, weight_layers
from onebasin.inference.seeds import Streams, generator
from onebasin.inference.target import MixedTargets, Target, log_likelihoods
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

_CLOSE = 1e-9  # of the outputs' largest entry: float64 leaves room for the order of sums only
_ORDER = ":order"  # which example each slot sees, among the buffers


@dataclass(frozen=True, kw_only=True)
class MIMO(TrainedMethod):
    """MIMO: one network with several inputs and outputs that is trained to be several networks.

    Attributes:
        members: slots and heads, and networks of each training, which are its draws.
        repetition: how often each example of a mini-batch stands in each slot of a step.
        input_repetition_probability: share of the rows in which all slots see the same example.
    """

    name: ClassVar[str] = "mimo"
    members: int = 3
    repetition: int = 1
    input_repetition_probability: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_members(self.members, repetition=self.repetition)
        if not 0 <= self.input_repetition_probability <= 1:
            raise InputError(
                "expected an input_repetition_probability from 0 to 1, found "
                f"{self.input_repetition_probability}: give such a number, for example 0"
            )

    def plan(self, target: Target) -> ChainPlan:
        """Train slots, trunk and heads, then draw each head on its trunk."""
        layers = weight_layers(target, self.name)
        if (self.batch or target.examples) > target.piece and target.examples > target.piece:
            raise InputError(
                f"expected mini-batches of at most piece={target.piece} examples to shuffle, found "
                f"batch={self.batch} of {target.examples}: give batch=100"
            )
        rows = min(self.batch or target.examples, target.examples)
        if self.members > rows:
            raise InputError(
                f"expected at least as many examples in a mini-batch as members, which see different ones, found "
                f"{rows} for {self.members} members: give members={max(2, rows)}, and batches of at least as many"
            )
        first, last = ends(target, layers)
        members = Slots(
            target=target,
            members=self.members,
            first=first,
            last=last,
            axis=input_axis(target, first, self.members),
            repetition=self.repetition,
            same=self.input_repetition_probability,
        )
        return member_plan(self, members, self.members)


def ends(target: Target, layers: tuple[WeightLayer, ...]) -> tuple[WeightLayer, WeightLayer]:
    """The layers that get slots and heads; raises where the first and the last layer that run cannot have them."""
    assert target.outputs is not None  # there are layers
    model = target.outputs.model
    norms = tuple(type(module) for module in tracked(model).values())
    order = [name for name, _, _ in ran(model, few(target), (*WEIGHTED, *norms))]
    weighted = [name for name in order if isinstance(model.get_submodule(name), WEIGHTED)]
    known = {layer.name: layer for layer in layers}
    if len(set(weighted)) < 2:
        raise InputError(
            f"expected at least two layers for mimo, one for the inputs of the members and one for their outputs, "
            f"found one ({weighted[0] or type(model).__name__!r}): add a layer, or use onebasin.Ensemble()"
        )
    for name, place in ((weighted[0], "first"), (weighted[-1], "last")):
        if name not in known or weighted.count(name) > 1:
            raise InputError(
                f"expected a first and a last layer with weights of their own for mimo, found {name!r}, the {place}, "
                "frozen, tied or running twice: train it, or use onebasin.BatchEnsemble()"
            )
    if order[-1] != weighted[-1]:
        raise InputError(
            f"expected no batch norm behind the last layer, where each head would need its own, found {order[-1]}: "
            "remove it, or use onebasin.BatchEnsemble()"
        )
    return known[weighted[0]], known[weighted[-1]]


def input_axis(target: Target, first: WeightLayer, members: int) -> int:
    """The axis along which inputs are laid side by side; raises unless slots with equal inputs add up.

    Shown for random weights and statistics, so that it holds whatever training makes of them.
    """
    assert target.outputs is not None  # there are layers
    stream = generator(0, "mimo", "proof")
    wide = random_twin(target.outputs.model, stream)
    leaves, structure = tree_flatten(moved(few(target), next(wide.parameters()).device, torch.float64))
    if len(leaves) != 1:
        raise InputError(f"expected a model with one input tensor for mimo, found {len(leaves)}: use another method")
    weight = first.module.get_parameter("weight")
    slots = torch.randn((members, *weight.shape), generator=stream, dtype=torch.float64).to(weight.device)
    name = f"{first.name}.weight" if first.name else "weight"
    expected = _outputs(wide, {name: slots.sum(0)}, tree_unflatten(leaves, structure))
    if not (isinstance(first.module, _ConvNd) and first.module.groups > 1):
        for axis in (1, -1):
            given = tree_unflatten([torch.cat([leaves[0]] * members, axis)], structure)
            try:
                found = _outputs(wide, {name: beside(first.module, slots)}, given)
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue  # the model does not take inputs of that shape
            if found.shape == expected.shape and (found - expected).abs().max() <= _CLOSE * expected.abs().max():
                return axis
    raise InputError(
        f"expected a model whose inputs go into its first layer, {first.name}, alone, so that several can be laid side "
        "by side, found one where slots with equal inputs do not add up (inputs that are used elsewhere, other shapes, "
        "grouped channels, tied weights): use onebasin.BatchEnsemble()"
    )


def _outputs(model: nn.Module, weights: State, call: Call) -> Tensor:
    with torch.no_grad():
        return one_tensor(model, functional_call(model, weights, call[0], call[1]))


def beside(layer: nn.Module, slots: Tensor) -> Tensor:
    """The weight for inputs side by side, from those of the slots (M, *shape)."""
    if isinstance(layer, _ConvNd) and layer.transposed:
        return slots.flatten(0, 1)
    return slots.movedim(0, 1).flatten(1, 2)


@dataclass(eq=False, kw_only=True)
class Slots(MemberMap):
    """Slots of the first layer, a trunk, and heads.

    Attributes:
        first: the layer with slots.
        last: the layer with heads.
        axis: along which inputs are laid side by side.
        repetition: how often an example stands in each slot.
        same: share of the rows in which all slots see the same example.
    """

    first: WeightLayer
    last: WeightLayer
    axis: int
    repetition: int = 1
    same: float = 0.0

    def __post_init__(self) -> None:
        layout = self.target.layout
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name == self.first.weight:
                self.tensors[name] = MemberTensor((self.members, *shape), of=name)
            elif name in (self.last.weight, self.last.bias):
                self.tensors[name] = MemberTensor((self.members, *shape), True, name, 1 / self.members)
            else:
                self.tensors[name] = MemberTensor(shape, of=name)

    @cached_property
    def statistics(self) -> set[str]:
        """None: the trunk is one."""
        return set()

    def initial(self, shared: State, streams: Streams) -> tuple[State, State]:
        """Slots w / M + e_m / sqrt(M), where e_m are normal, spread as w is and of mean 0; heads, the first as it is.

        So slots add up to w, and if w is drawn with variance v they are independent with variance v / M each.
        """
        phi = dict(shared)
        names = [self.first.weight, self.last.weight, *([self.last.bias] if self.last.bias else [])]
        for name in names:
            value = shared[name]
            like = value[:, None].expand(-1, self.members, *value.shape[1:])
            axes = tuple(range(1, value.dim()))
            spread = value.std(axes, unbiased=False, keepdim=True)[:, None]
            noise = spread * streams.gaussian(name, like)
            if name == self.first.weight:
                phi[name] = like / self.members + (noise - noise.mean(1, keepdim=True)) / self.members**0.5
            else:
                fresh = value.mean(axes, keepdim=True)[:, None] + noise
                phi[name] = torch.cat([like[:, :1], fresh[:, 1:]], dim=1)
        return phi, {}

    def unroll(self, phi: State, beside: State) -> Unrolled:
        """The sum of the slots, the trunk, and each head."""
        return Unrolled({**phi, self.first.weight: phi[self.first.weight].sum(0)})

    def noise(self, streams: Streams, examples: int) -> State:
        """Which example of the mini-batch each slot sees, (chains, M, repetition * n)."""
        device = self.target.layout.device
        orders = [order(examples, self.members, self.repetition, self.same, each) for each in streams.each(_ORDER)]
        return {_ORDER: torch.stack(orders).to(device)}

    def one(self, phi: Mapping[str, Tensor], buffers: State, given: Any, training: bool) -> tuple[Tensor, State]:
        """In training, the mean over heads and repetitions of log likelihoods of what each slot saw, (n,)."""
        if not training:
            return super().one(phi, buffers, given, training)
        called, likelihood = self.target.outputs, self.target.likelihood
        assert called is not None and likelihood is not None  # there are data
        call, targets = given
        mixed, seen = isinstance(targets, MixedTargets), buffers[_ORDER]
        leaves, structure = tree_flatten(call)
        slots = torch.cat([leaves[0][seen[number]] for number in range(self.members)], self.axis)
        several = tree_unflatten([slots], structure)
        own = {name: buffers[name] for name in self.target.buffers}
        shared = {**phi, self.first.weight: beside(self.first.module, phi[self.first.weight])}
        heads = {name: shared.pop(name) for name, tensor in self.tensors.items() if tensor.own}

        def head(weights: State, asked: State) -> tuple[Tensor, State]:
            outputs, after = called({**shared, **weights}, own, several, True)
            goal = MixedTargets(**asked) if mixed else asked["targets"]
            return log_likelihoods(likelihood, outputs, goal), after

        wanted = targets._asdict() if mixed else {"targets": targets}
        values, after = self.each(head, heads, {name: value[seen] for name, value in wanted.items()})
        value = values.mean(0).reshape(self.repetition, -1).mean(0)
        return value, {**buffers, **{name: state[0] for name, state in after.items()}}


def order(examples: int, members: int, repetition: int, same: float, stream: torch.Generator) -> Tensor:
    """Which example each slot sees in each row, int64 (members, repetition * examples).

    Every slot sees every example `repetition` times. The last `same` of the rows agree over slots.
    """
    every = torch.arange(examples).repeat(repetition)
    every = every[torch.randperm(len(every), generator=stream)]
    apart = int(len(every) * (1 - same))
    rows = [torch.cat([every[:apart][torch.randperm(apart, generator=stream)], every[apart:]]) for _ in range(members)]
    return torch.stack(rows)
