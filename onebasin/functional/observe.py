"""Observers of a forward pass: what a model computes is seen from outside, and nothing is attached to its modules.

Two levels, one file. `Observer` stands at torch's functions: a call of `F.linear(x, weight, bias)` or `F.batch_norm(x,
mean, variance)` tells by the identity of its tensors which layer or norm it is, whether a module made the call or a
line of a forward function; what an observer returns is what the model goes on with. `OperationObserver` stands below
autograd, at aten operations: it also sees the products inside of attention and recurrent layers, but no names.
Hooks on modules would miss functional calls, and would have to be removed from the user's model afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LAYERS: tuple[Callable[..., Tensor], ...] = (F.linear, F.conv1d, F.conv2d, F.conv3d)
_VIEWS = ("T", "mT", "H", "mH", "data")  # attributes that hand the values on; `shape` and the like do not


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One use of a linear or convolutional layer.

    Attributes:
        weight: state-dict name of the weight, units on axis 0.
        bias: state-dict name of the bias, None without one, "" for one that is computed.
        result: what the layer gave.
        axis: the axis of the result on which the units lie.
    """

    weight: str
    bias: str | None
    result: Tensor
    axis: int


@dataclass(frozen=True, eq=False)
class NormCall:
    """One use of a norm with running statistics.

    Attributes:
        mean: state-dict name of the running mean.
        variance: that of the running variance.
        input: what is normalised, (examples, units, ...).
        weight: of the units, None without.
        bias: of the units, None without.
        eps: what is added to the variance.
        instance: instance norm, whose statistics are averages over examples; else batch norm.
    """

    mean: str
    variance: str
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    instance: bool


class Observer(TorchFunctionMode):
    """Reports layers and norms with running statistics in a forward pass; subclasses override what they look at.

    Functions of torch that are layers inside (attention, recurrent networks) are seen from outside only.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Know the tensors that the model computes with; of the names of a shared tensor the first is reported."""
        super().__init__()
        self.tensors = tensors  # held, so that no other tensor can have one of these ids
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(id(tensor), name)
        self._layers = type(self).layer is not Observer.layer or type(self).touched is not Observer.touched

    def layer(self, call: LayerCall) -> Tensor:
        """A linear or convolutional layer was used."""
        return call.result

    def norm(self, call: NormCall) -> Tensor | None:
        """A norm is about to be used; None lets it go on as it would."""
        return None

    def touched(self, name: str) -> None:
        """A tensor of the state was used by anything else."""

    def name_of(self, value: Any) -> str | None:
        """The name of a tensor of the network, None for anything else."""
        return self._names.get(id(value)) if isinstance(value, Tensor) else None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is F.batch_norm or func is F.instance_norm:
            call = self._norm_call(func is F.instance_norm, *args, **kwargs)
            result = self.norm(call) if call else None
            return func(*args, **kwargs) if result is None else result
        if not self._layers:
            return func(*args, **kwargs)
        if func in _LAYERS:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if (weight := self.name_of(given["weight"])) is not None:
                return self._layer(weight, given.get("bias"), func, func(*args, **kwargs))
        if not _only_looks(func):
            for name in map(self.name_of, tree_leaves((args, kwargs))):
                if name is not None:
                    self.touched(name)
        return func(*args, **kwargs)

    def _layer(self, weight: str, bias: Tensor | None, func: Any, result: Tensor) -> Tensor:
        places = 0 if func is F.linear else self.tensors[weight].dim() - 2
        name = None if bias is None else self.name_of(bias) or ""
        return self.layer(LayerCall(weight, name, result, result.dim() - 1 - places))

    def _norm_call(
        self,
        instance: bool,
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        use_input_stats: bool | None = None,
    ) -> NormCall | None:
        """The arguments of `F.batch_norm` or `F.instance_norm`, which name their sixth argument differently."""
        mean, variance = self.name_of(running_mean), self.name_of(running_var)
        computes = training if use_input_stats is None else use_input_stats
        if mean is None or variance is None or computes:  # it has no running statistics, or does not use them
            return None
        return NormCall(mean, variance, input, weight, bias, eps, instance)


def _only_looks(func: Any) -> bool:
    """Whether a function is an attribute such as `shape`, which does not hand on the values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in _VIEWS


class OperationObserver(TorchDispatchMode):
    """Reports every aten operation with its arguments and its result."""

    def __init__(self) -> None:
        prepare: Callable[[], None] = super().__init__  # not annotated by torch
        prepare()

    def operation(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        """The aten operation `name` was run; `arguments` are its positional ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of every aten operation."""
        result = func(*args, **kwargs or {})
        self.operation(func.overloadpacket.__name__, args, result)
        return result
