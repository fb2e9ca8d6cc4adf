"""Look into a forward pass: which weights are used by which layer, and what comes out of it.

A `Bound` model computes with tensors we handed over, so a call of `F.linear(x, weight, bias)` tells by the identity of
`weight` which layer it is, whether a module made the call or a line of somebody's forward. Nothing is attached to the
user's module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
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
    """One use of a batch norm with running statistics: their state-dict names, and what the call was given."""

    mean: str
    variance: str
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


class Watch(TorchFunctionMode):
    """Reports layers and batch norms of a forward pass; what the three methods return is what the model goes on with.

    Functions of torch that are layers inside (attention, recurrent networks) are seen from outside only.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Know the tensors of a `Bound` model; of the names of a shared tensor the first is reported."""
        super().__init__()
        self.tensors = tensors  # kept alive, so that no other tensor can have one of these ids
        self._names: dict[int, str] = {}
        for name, tensor in tensors.items():
            self._names.setdefault(id(tensor), name)

    def layer(self, call: LayerCall) -> Tensor:
        """A linear or convolutional layer was used."""
        return call.result

    def norm(self, call: NormCall) -> Tensor | None:
        """A batch norm is about to be used; None lets it go on as it would."""
        return None

    def touched(self, name: str) -> None:
        """A tensor of the state was used by anything else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is F.batch_norm:
            call = self._norm_call(*args, **kwargs)
            result = self.norm(call) if call else None
            return func(*args, **kwargs) if result is None else result
        if func in _LAYERS:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            if (weight := self._name(given["weight"])) is not None:
                return self._layer(weight, given.get("bias"), func, func(*args, **kwargs))
        if not _only_looks(func):
            for name in map(self._name, tree_leaves((args, kwargs))):
                if name is not None:
                    self.touched(name)
        return func(*args, **kwargs)

    def _name(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, Tensor) else None

    def _layer(self, weight: str, bias: Tensor | None, func: Any, result: Tensor) -> Tensor:
        places = 0 if func is F.linear else self.tensors[weight].dim() - 2
        name = None if bias is None else self._name(bias) or ""
        return self.layer(LayerCall(weight, name, result, result.dim() - 1 - places))

    def _norm_call(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        **options: Any,
    ) -> NormCall | None:
        mean, variance = self._name(running_mean), self._name(running_var)
        if mean is None or variance is None:  # it has no running statistics, or computes them
            return None
        return NormCall(mean, variance, input, weight, bias, options.get("eps", 1e-5))


def _only_looks(func: Any) -> bool:
    """Whether a function is an attribute such as `shape`, which does not hand on the values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in _VIEWS
