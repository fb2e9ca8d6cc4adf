"""Look into a forward pass: which weights are used by which layer, and what comes out of it.

A `Bound` model computes with tensors we handed over, so a call of `F.linear(x, weight, bias)` tells by the identity of
`weight` which layer it is, whether a module made the call or a line of somebody's forward. Nothing is attached to the
user's module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from onebasin.norms import Norms

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


class Watch(Norms):
    """Reports layers and norms of a forward pass; what `layer` and `norm` return is what the model goes on with.

    Functions of torch that are layers inside (attention, recurrent networks) are seen from outside only.
    """

    def layer(self, call: LayerCall) -> Tensor:
        """A linear or convolutional layer was used."""
        return call.result

    def touched(self, name: str) -> None:
        """A tensor of the state was used by anything else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every one of its functions."""
        kwargs = kwargs or {}
        if func is F.batch_norm or func is F.instance_norm:
            return super().__torch_function__(func, types, args, kwargs)
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


def _only_looks(func: Any) -> bool:
    """Whether a function is an attribute such as `shape`, which does not hand on the values."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func.__self__, "__name__", "") not in _VIEWS
