"""Which layers of a model can be rescaled unit by unit without touching anything else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onebasin.align.path.watch import LayerCall, Watch
from onebasin.norms import NormCall, frozen_norms
from onebasin.predict import Inputs
from onebasin.predict.batches import batches
from onebasin.predict.forward import Bound
from onebasin.state import shared_names, trained_parameters

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
        layers.append(Layer(name, bias or None, *(("it is frozen", False) if frozen else watch.verdict(name, final))))
    return tuple(layers)


def _recordable(value: Any) -> Any:
    """A copy of a tensor that was made in inference mode; everything else as it is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


class _Follow(Watch):
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
            return "it gives the output: no other layer follows", True
        return "", True
