"""Kronecker factors of the curvature of linear and convolution layers (KFAC, in its "expand" form).

The block of a weight matrix (p, q) is  (sum_n sum_t g g^T) kron (mean over n, t of a a^T),  where t runs over the
places at which the layer is applied within an example (pixels, tokens), a are its inputs (q,) there, and g are the
roots of the outputs' curvature, propagated back to its outputs (p,). The bias has the first factor alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onebasin.inference.curvature_outputs import output_roots
from onebasin.inference.curvature_rows import Seen
from onebasin.inference.layout import Layout

_PIECE = 256  # examples in one pass; patches of convolutions are many times larger than their images


@dataclass(eq=False)
class Factors:
    """What is collected of one layer.

    Attributes:
        inputs: mean of a a^T (q, q), float64.
        slopes: sum of g g^T (p, p), float64.
        output: the layer's outputs of the current pass, in its graph.
    """

    inputs: Tensor
    slopes: Tensor
    output: Tensor = field(default_factory=lambda: torch.zeros(0))


def kronecker_layers(seen: Seen) -> dict[str, nn.Module]:
    """Layers that have such factors, by name: linear ones and plain convolutions that run once, with own weights."""
    model, layout = seen.outputs.model, seen.target.layout
    found = {name: module for name, module in model.named_modules() if _known(module) and _owns(layout, name)}
    calls: Counter[str] = Counter()
    hooks = [module.register_forward_pre_hook(_counting(calls, name)) for name, module in found.items()]
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(1))[0])
    return {name: module for name, module in found.items() if calls[name] == 1}


def last_layer(seen: Seen) -> list[str]:
    """The sampled tensors of the module that starts last among those that hold some."""
    layout, order = seen.target.layout, Counter[str]()
    owners = {
        name: own
        for name, module in seen.outputs.model.named_modules()
        if (own := _names(layout, name, dict(module.named_parameters(recurse=False))))
    }
    modules = dict(seen.outputs.model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(_counting(order, name, last=True)) for name in owners]
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(1))[0])
    return owners[list(order)[-1]]


def kronecker_factors(seen: Seen, layers: Mapping[str, nn.Module]) -> dict[str, Factors]:
    """The factors of these layers over the whole data."""
    found: dict[str, Factors] = {}
    moving = {name: value.detach().clone().requires_grad_() for name, value in seen.sampled.items()}
    for call, goal in seen.pieces(min(_PIECE, seen.target.piece)):
        hooks = [
            module.register_forward_hook(_recording(found, name, len(goal)), with_kwargs=True)
            for name, module in layers.items()
        ]
        with hooked(hooks), torch.enable_grad():
            outputs = seen(call, moving)
        roots = output_roots(seen.likelihood, outputs.detach(), goal)
        for root in roots.unbind(-1):
            ends = [found[name].output for name in layers]
            slopes = torch.autograd.grad(
                outputs, ends, root.reshape(outputs.shape), retain_graph=True, allow_unused=True
            )
            for name, slope in zip(layers, slopes, strict=True):
                if slope is not None:
                    matrix = _columns(layers[name], slope)
                    found[name].slopes += (matrix.T @ matrix).double()
    for factors in found.values():
        factors.inputs /= seen.target.examples
    return found


@contextmanager
def hooked(hooks: list[RemovableHandle]) -> Iterator[None]:
    """Take hooks off again."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _known(module: nn.Module) -> bool:
    """Whether it does what its class is known for; a subclass may have another forward."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and type(module).forward is nn.Conv2d.forward
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _names(layout: Layout, module: str, own: Mapping[str, object]) -> list[str]:
    """State-dict names of a module's own tensors, where they are sampled."""
    prefix = f"{module}." if module else ""
    return [f"{prefix}{name}" for name in own if f"{prefix}{name}" in layout.names]


def _owns(layout: Layout, module: str) -> bool:
    """Whether weight or bias are sampled and neither is tied to another tensor."""
    names = _names(layout, module, {"weight": None, "bias": None})
    firsts = list(layout.first.values())
    return bool(names) and all(firsts.count(name) == 1 for name in names)


def _counting(calls: Counter[str], name: str, last: bool = False) -> Any:
    """A hook that counts calls; with `last` the keys are in the order of each module's last call."""

    def hook(module: nn.Module, arguments: Any) -> None:
        count = calls.pop(name, 0) if last else calls[name]
        calls[name] = count + 1

    return hook


def _recording(found: dict[str, Factors], name: str, examples: int) -> Any:
    """A hook that adds up the inputs and keeps the outputs.

    What comes after gets a copy of the outputs, so that it may work in place.
    """

    def hook(module: nn.Module, arguments: Any, options: Mapping[str, Any], output: Tensor) -> Tensor:
        given = (arguments[0] if arguments else options["input"]).detach()
        rows, width = _inputs(module, given), _columns(module, output).shape[1]
        if name not in found:
            inputs, slopes = (rows.new_zeros(size, size, dtype=torch.float64) for size in (rows.shape[1], width))
            found[name] = Factors(inputs, slopes)
        found[name].inputs += (rows.T @ rows).double() / (len(rows) / examples)
        found[name].output = output
        return output.clone()

    return hook


def _inputs(module: nn.Module, given: Tensor) -> Tensor:
    """What the weight matrix is multiplied with, one row for each example and place."""
    if not isinstance(module, nn.Conv2d):
        return given.reshape(-1, given.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(given, module._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride)
    return patches.mT.reshape(-1, patches.shape[-2])


def _columns(module: nn.Module, output: Tensor) -> Tensor:
    """Outputs, or slopes of them, one row for each example and place."""
    output = output.movedim(-3, -1) if isinstance(module, nn.Conv2d) else output
    return output.reshape(-1, output.shape[-1])
