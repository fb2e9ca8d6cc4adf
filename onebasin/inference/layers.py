"""Linear and convolution layers of a model as they run, and factors of their units as factors of their weights.

    W (r * x) = (W diag(r)) x,        s * (W x) = (diag(s) W) x,

for linear layers, and with channels in place of features for convolutions, grouped and transposed ones included. So
what multiplies the inputs or outputs of such a layer can be folded into its weight, which leaves an ordinary network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_unflatten

from onebasin.errors import InputError
from onebasin.functional import Call
from onebasin.inference.target import ParameterLayout, Target

WEIGHTED = (nn.Linear, _ConvNd)
_EXAMPLES = 4  # on which layers are looked for, and identities proved


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """A linear or convolution layer whose weight is trained.

    Attributes:
        name: of the module.
        module: the layer.
        weight: name of its weight among the sampled tensors; of a tied one the first name.
        bias: name of its bias among them; None where it has none, or a frozen one.
    """

    name: str
    module: nn.Module
    weight: str
    bias: str | None

    @property
    def inputs(self) -> int:
        """Number of input features or channels."""
        return input_units(self.module)

    @property
    def outputs(self) -> int:
        """Number of output features or channels."""
        return output_units(self.module)


def weight_layers(target: Target, method: str) -> tuple[WeightLayer, ...]:
    """The layers with a trained weight in the order in which they run; a layer that runs twice, or a tied weight, once.

    Raises `InputError` where there is none, or where a weight is made of other tensors.
    """
    if target.outputs is None:
        raise InputError(f"{method} needs data to train on, found none: give data=(inputs, targets)")
    layout, model = target.layout, target.outputs.model
    layers: dict[str, WeightLayer] = {}
    for name, module, _ in ran(model, few(target)):
        weight = f"{name}.weight" if name else "weight"
        if weight not in layout.spec:
            raise InputError(
                f"expected {weight} among the tensors of the model, found it made of others: remove the "
                f"parametrization of {name} to sample by {method}"
            )
        first = layout.tied.get(weight, weight)
        if first in layout.names and first not in layers:
            bias = f"{name}.bias" if name else "bias"
            own = layout.tied.get(bias, bias)
            layers[first] = WeightLayer(name, module, first, own if own in layout.names else None)
    if not layers:
        raise InputError(
            f"expected linear or convolution layers with trained weights for {method}, found none in "
            f"{type(model).__name__}: use another method, such as onebasin.Ensemble()"
        )
    return tuple(layers.values())


def ran(
    model: nn.Module, call: Call, kinds: tuple[type[nn.Module], ...] = WEIGHTED
) -> Iterator[tuple[str, nn.Module, tuple[int, ...]]]:
    """Layers of these kinds in the order in which they run, with the shapes of their inputs."""
    found: list[tuple[str, nn.Module, tuple[int, ...]]] = []
    handles = [
        module.register_forward_pre_hook(lambda own, given, name=name: found.append((name, own, tuple(given[0].shape))))
        for name, module in model.named_modules()
        if isinstance(module, kinds)
    ]
    try:
        with torch.no_grad():
            model.eval()(*call[0], **call[1])
    finally:
        for handle in handles:
            handle.remove()
    yield from found


def few(target: Target) -> Call:
    """The model's arguments for a few training examples."""
    call, _ = tree_unflatten([leaf[:_EXAMPLES] for leaf in target.leaves], target.structure)
    return cast(Call, call)


def sampled_weight(layout: ParameterLayout, layer: str, method: str) -> str:
    """Name of a layer's weight among the sampled tensors; raises where it is frozen or made of others."""
    name = f"{layer}.weight" if layer else "weight"
    first = layout.tied.get(name, name)
    if first not in layout.names:
        raise InputError(
            f"expected {name} among the trained tensors to fold {method} into, found it frozen or made of others: "
            f"train it, or drop nothing before {layer}"
        )
    return first


def input_units(layer: nn.Module) -> int:
    """Number of input features of a linear layer, of input channels of a convolution."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    assert isinstance(layer, _ConvNd)
    return layer.in_channels


def output_units(layer: nn.Module) -> int:
    """Number of output features of a linear layer, of output channels of a convolution."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    assert isinstance(layer, _ConvNd)
    return layer.out_channels


def columns(layer: nn.Module, factor: Tensor) -> Tensor | None:
    """What the weight is multiplied by when input units are multiplied by `factor` (units,); None where it cannot be.

    A linear layer behind a flattened map may be given a factor per channel, which each of its features then has.

    >>> columns(nn.Conv1d(4, 2, 3, groups=2), torch.arange(4.0))[:, :, 0]
    tensor([[0., 1.],
            [2., 3.]])
    """
    if isinstance(layer, nn.Linear):
        each, rest = divmod(layer.in_features, len(factor))
        return None if rest else (factor if each == 1 else factor.repeat_interleave(each))[None]
    assert isinstance(layer, _ConvNd)
    if layer.in_channels != len(factor):
        return None
    ones = [1] * len(layer.kernel_size)
    if layer.transposed:
        return factor.reshape(-1, 1, *ones)
    if layer.groups == 1:
        return factor.reshape(1, -1, *ones)
    groups = factor.reshape(layer.groups, -1).repeat_interleave(layer.out_channels // layer.groups, 0)
    return groups.reshape(layer.out_channels, -1, *ones)


def rows(layer: nn.Module, factor: Tensor) -> Tensor:
    """What the weight is multiplied by when output units are multiplied by `factor` (units,).

    >>> rows(nn.Linear(3, 2), torch.tensor([1.0, 2.0])) * torch.ones(2, 3)
    tensor([[1., 1., 1.],
            [2., 2., 2.]])
    """
    if isinstance(layer, nn.Linear):
        return factor[:, None]
    assert isinstance(layer, _ConvNd)
    ones = [1] * len(layer.kernel_size)
    if not layer.transposed:
        return factor.reshape(-1, 1, *ones)
    groups = factor.reshape(layer.groups, -1).repeat_interleave(layer.in_channels // layer.groups, 0)
    return groups.reshape(layer.in_channels, -1, *ones)


def by_layer(layers: Sequence[str], values: float | Mapping[str, float], option: str, what: str) -> dict[str, float]:
    """Layer -> its number: of all layers but the first, or of those that names or patterns choose; later ones win.

    >>> by_layer(["first", "second", "third"], {"*": 0.1, "second": 0.2}, "dropout", "rate")
    {'first': 0.1, 'second': 0.2, 'third': 0.1}
    """
    named = values if isinstance(values, Mapping) else dict.fromkeys(layers[1:], values)
    for key in named:
        if not any(fnmatchcase(name, key) for name in layers):
            raise InputError(
                f"expected names or patterns of linear and convolution layers in {option}, found {key!r}, which fits "
                f"none of {', '.join(layers)}: correct it"
            )
    if not named:
        raise InputError(
            "expected a layer behind which something can be dropped, found a model with fewer than two linear or "
            f"convolution layers: name layers in {option}={{name: {what}}}, or use another method"
        )
    chosen = {name: [value for key, value in named.items() if fnmatchcase(name, key)] for name in layers}
    return {name: own[-1] for name, own in chosen.items() if own}
