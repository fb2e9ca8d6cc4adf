"""A module for the tensors of a smaller network: a copy whose layers know their new widths."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from onebasin.calling import Inputs, call_arguments, evaluation_mode
from onebasin.errors import ModelError
from onebasin.state import TensorSpec, as_spec, as_state, check_spec

Widths = dict[str, Any]  # attribute -> value
Follower = Callable[[Any], Widths | None]  # layer with its new tensors -> its widths; None if they do not tell


def _linear(layer: nn.Linear) -> Widths:
    return {"out_features": layer.weight.shape[0], "in_features": layer.weight.shape[1]}


def _bilinear(layer: nn.Bilinear) -> Widths:
    names = ("out_features", "in1_features", "in2_features")
    return dict(zip(names, layer.weight.shape, strict=True))


def _convolution(layer: _ConvNd) -> Widths:
    """Of a grouped convolution the weight does not tell how many groups are left; its input does, in `_seen`."""
    known: Widths = {"out_channels": layer.weight.shape[0]}
    return known if layer.groups > 1 else {**known, "in_channels": layer.weight.shape[1]}


def _transposed(layer: _ConvTransposeNd) -> Widths | None:
    if layer.groups > 1:
        return None
    return {"in_channels": layer.weight.shape[0], "out_channels": layer.weight.shape[1]}


def _norm(layer: _NormBase) -> Widths:
    tensor = layer.weight if layer.weight is not None else layer.running_mean
    return {} if tensor is None else {"num_features": len(tensor)}


def _layer_norm(layer: nn.LayerNorm | nn.RMSNorm) -> Widths:
    return {"normalized_shape": tuple(layer.weight.shape)}


def _group_norm(layer: nn.GroupNorm) -> Widths | None:
    return {"num_channels": len(layer.weight)} if layer.num_groups == 1 else None


def _embedding(layer: nn.Embedding | nn.EmbeddingBag) -> Widths:
    return {"num_embeddings": layer.weight.shape[0], "embedding_dim": layer.weight.shape[1]}


def _activation(layer: nn.PReLU) -> Widths:
    return {"num_parameters": len(layer.weight)}


def _recurrent(layer: nn.RNNBase) -> Widths | None:
    into, back = layer.weight_ih_l0, layer.weight_hh_l0
    assert isinstance(into, Tensor) and isinstance(back, Tensor)
    return None if layer.proj_size else {"input_size": into.shape[1], "hidden_size": back.shape[1]}


def _cell(layer: nn.RNNCellBase) -> Widths:
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
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, known: Collection[type[nn.Module]] = ()
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
        inputs: an example input.
        known: classes of your own that hold tensors and take every width from them, so that nothing has to follow.

    Raises:
        SpecError: names are missing, or there are others.
        ModelError: a layer of a class that is not known here changes its size, or the copy does not run: then the
            code of the model has a width written into it, and the smaller module has to be built by hand.
    """
    _check_names(model, state)
    small = copy.deepcopy(model)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, layer in small.named_modules():
        changed = _replace(layer, path, state, made)
        if changed:
            for name, width in _followed(path, layer, tuple(known)).items():
                setattr(layer, name, width)
    _run(small, inputs)
    return small


def _check_names(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuse other names; shapes are free."""
    expected = as_spec(model)
    found = {
        name: expected.get(name, TensorSpec(tuple(value.shape), value.dtype)) for name, value in as_state(state).items()
    }
    check_spec(found, expected, where=f"as a smaller state of {type(model).__name__}, what was given")


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


def _followed(path: str, layer: nn.Module, known: tuple[type[nn.Module], ...]) -> Widths:
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
        self.found: list[tuple[nn.Module, Widths]] = []
        grouped = [layer for layer in small.modules() if isinstance(layer, _ConvNd) and layer.groups > 1]
        bare = [layer for layer in small.modules() if isinstance(layer, nn.LayerNorm | nn.RMSNorm | _NormBase)]
        bare = [layer for layer in bare if getattr(layer, "weight", None) is None]
        self.handles = [layer.register_forward_pre_hook(self._seen) for layer in (*grouped, *bare)]

    def _seen(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        value: Tensor = arguments[0]
        widths: Widths
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
    except Exception as error:  # somebody's forward pass can fail in any way
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
