"""What goes through linear and convolution layers: their inputs, and the curvature's roots propagated back to them.

Both are matrices of an example: one row for each place t at which the layer is applied (pixels, tokens), so that the
derivative of a root by the weight matrix (p, q) of the layer is sum_t g_t a_t^T, with inputs a (q,) and slopes g (p,).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onebasin.inference.curvature.outputs import output_roots
from onebasin.inference.curvature.rows import Seen
from onebasin.inference.density.layout import Layout

_PIECE = 256  # examples in one pass


class Layer(NamedTuple):
    """A layer that runs once in a pass.

    Attributes:
        module: nn.Linear or nn.Conv2d.
        leading: its inputs have the examples on their first axis, and only these.
    """

    module: nn.Module
    leading: bool


class Pass(NamedTuple):
    """One pass over a piece of the data.

    Attributes:
        examples: in this piece.
        inputs: of each layer, as it was called.
        slopes: for each root of the outputs' curvature, what it is in the outputs of each layer.
    """

    examples: int
    inputs: dict[str, Tensor]
    slopes: Iterator[dict[str, Tensor]]


def tensor_names(module: str, own: Iterable[str] = ("weight", "bias")) -> list[str]:
    """State-dict names of a module's own tensors.

    >>> tensor_names("head"), tensor_names("")
    (['head.weight', 'head.bias'], ['weight', 'bias'])
    """
    return [f"{module}.{name}" if module else name for name in own]


def known_layers(seen: Seen) -> dict[str, Layer]:
    """Linear layers and plain convolutions that run once and whose weights are used nowhere else, by name."""
    modules = dict(seen.outputs.model.named_modules())
    found = [name for name, module in modules.items() if _known(module) and _owns(seen.target.layout, name)]
    counts = sorted({1, min(2, seen.target.examples)})  # an axis that follows both is that of the examples
    probes = [_probed(seen, {name: modules[name] for name in found}, count) for count in counts]
    once = [name for name in found if all(len(probe[name]) == 1 for probe in probes)]
    return {
        name: Layer(modules[name], all(probe[name][0][0] == count for probe, count in zip(probes, counts, strict=True)))
        for name in once
    }


def last_layer(seen: Seen) -> list[str]:
    """The sampled tensors of the module that starts last among those that hold some."""
    sampled, order, owners, hooks = set(seen.target.layout.names), [""], {}, []
    for name, module in seen.outputs.model.named_modules():
        owners[name] = [own for own in tensor_names(name, module._parameters) if own in sampled]
        if owners[name]:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: order.append(name)))
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(1))[0])
    return owners[order[-1]]


def passes(seen: Seen, layers: Mapping[str, Layer]) -> Iterator[Pass]:
    """What goes through these layers, piece by piece."""
    moving = {name: value.detach().clone().requires_grad_() for name, value in seen.sampled.items()}
    for call, goal in seen.pieces(min(_PIECE, seen.target.piece)):
        inputs: dict[str, Tensor] = {}
        ends: dict[str, Tensor] = {}
        hooks = [
            layer.module.register_forward_hook(_recording(name, inputs, ends), with_kwargs=True)
            for name, layer in layers.items()
        ]
        with hooked(hooks), torch.enable_grad():
            outputs = seen(call, moving)
        roots = output_roots(seen.likelihood, outputs.detach(), goal)
        yield Pass(len(goal), inputs, _slopes(outputs, roots, ends))


def input_rows(module: nn.Module, given: Tensor) -> Tensor:
    """What the weight matrix is multiplied with (n, t, q)."""
    if not isinstance(module, nn.Conv2d):
        return given.reshape(given.shape[0] if given.dim() > 1 else 1, -1, given.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(given, module._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride).mT
    return patches.reshape(-1, *patches.shape[-2:])


def output_rows(module: nn.Module, output: Tensor) -> Tensor:
    """Slopes in the outputs (n, t, p), in the order of `input_rows`."""
    if isinstance(module, nn.Conv2d):
        return output.reshape(-1, output.shape[-3], output.shape[-2] * output.shape[-1]).mT
    return output.reshape(output.shape[0] if output.dim() > 1 else 1, -1, output.shape[-1])


def add_to(totals: dict[str, Tensor], name: str, term: Tensor) -> None:
    """Add a term to a sum in float64."""
    totals[name] = totals[name] + term if name in totals else term.double()


@contextmanager
def hooked(hooks: list[RemovableHandle]) -> Iterator[None]:
    """Take hooks off again."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _slopes(outputs: Tensor, roots: Tensor, ends: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for root in roots.unbind(-1):
        found = torch.autograd.grad(
            outputs, list(ends.values()), root.reshape(outputs.shape), retain_graph=True, materialize_grads=True
        )
        yield dict(zip(ends, found, strict=True))


def _known(module: nn.Module) -> bool:
    """Whether it does what its class is known for; a subclass may have another forward."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and type(module).forward is nn.Conv2d.forward
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _owns(layout: Layout, module: str) -> bool:
    """Whether weight or bias are sampled and neither is tied to another tensor."""
    names = [name for name in tensor_names(module) if name in layout.names]
    return bool(names) and not set(names) & set(layout.tied.values())


def _probed(seen: Seen, modules: Mapping[str, nn.Module], examples: int) -> dict[str, list[torch.Size]]:
    """Shapes of the inputs of all calls of each module, in a pass with this number of examples."""
    found: dict[str, list[torch.Size]] = {name: [] for name in modules}

    def watching(name: str) -> Callable[..., None]:
        return lambda module, arguments, options: found[name].append(_given(arguments, options).shape)

    hooks = [module.register_forward_pre_hook(watching(name), with_kwargs=True) for name, module in modules.items()]
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(examples))[0])
    return found


def _recording(name: str, inputs: dict[str, Tensor], ends: dict[str, Tensor]) -> Callable[..., Tensor]:
    """A hook that keeps inputs and outputs; what comes after gets a copy of the outputs, so it may work in place."""

    def hook(module: nn.Module, arguments: Any, options: Mapping[str, Any], output: Tensor) -> Tensor:
        inputs[name], ends[name] = _given(arguments, options).detach(), output
        return output.clone()

    return hook


def _given(arguments: Any, options: Mapping[str, Any]) -> Tensor:
    given: Tensor = arguments[0] if arguments else options["input"]
    return given
