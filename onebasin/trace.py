"""Trace a module into a graph of functional aten operations; the only file that knows `torch.export`.

The module is exported in evaluation mode, because that is the function whose symmetries we look for: dropout is the
identity and batch norm uses its running statistics. Mode, hooks and attributes of the user's module are left as they
were.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs, call_arguments, evaluation_mode
from onebasin.errors import InputError, TraceError


@dataclass(eq=False)
class Node:
    """One step of the traced function: a weight, an input, a constant, an operation or the output.

    `kind` is "state", "input", "constant", "call" or "output"; `arguments` and `options` may hold other nodes at any
    depth. `shape` is None for what is not one tensor (an operation with several results, a number).
    """

    name: str
    kind: str
    operation: str = ""
    function: Callable[..., Any] | None = None
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    state_name: str = ""
    buffer: bool = False
    constant: Tensor | None = None
    module: str = ""
    users: list[Node] = field(default_factory=list)

    @property
    def short(self) -> str:
        """Name of an aten operation without its overload (`add` of `aten.add.Tensor`); "" for anything else."""
        return self.operation.split(".")[1] if self.operation.startswith("aten.") else ""

    def parents(self) -> list[Node]:
        """The nodes this one reads, in order."""
        return _nodes_in((self.arguments, self.options))

    def __repr__(self) -> str:
        """Show what a reader of a path wants to see."""
        return self.state_name or self.operation or self.name


@dataclass(frozen=True)
class Graph:
    """A traced function: its nodes in an order of execution, and the state tensors that share memory.

    `shared` maps each state name to the name that stands for it (tied weights have one);
    `entangled` names tensors that overlap in memory without being the same tensor.
    """

    nodes: tuple[Node, ...]
    shared: dict[str, str]
    entangled: frozenset[str]


def trace(model: nn.Module, inputs: Inputs) -> Graph:
    """Trace `model` called with `inputs` (a tensor, a tuple of positional inputs, or a dict of keyword inputs).

    Raises:
        InputError: `inputs` is none of these, or the model cannot be called with them.
        TraceError: the model runs, but cannot be turned into a graph.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model must be a torch.nn.Module, found {type(model).__name__}; wrap functions in a module."
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{type(model).__name__} only distributes a module; give the module itself: model.module.")
    arguments, options = call_arguments(inputs)
    # A forward pass may draw random numbers, and export warns about its own internals, not about the user's model.
    with evaluation_mode(model), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        _check_call(model, arguments, options)
        program = _export(model, arguments, options)
    shared, entangled = shared_memory(model)
    return Graph(tuple(_nodes(program)), shared, entangled)


def _check_call(model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    try:
        model(*arguments, **options)
    except Exception as error:
        given = ", ".join(
            [_describe(value) for value in arguments] + [f"{k}={_describe(v)}" for k, v in options.items()]
        )
        raise InputError(
            f"{type(model).__name__} could not be called with ({given}): {type(error).__name__}: {error}. "
            "Give inputs of the shapes and dtypes that the model's forward expects."
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
    return type(value).__name__


def _export(model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Export and decompose; fall back to views that may copy, then to a strict export."""
    reasons = []
    patched = torch.export.default_decompositions()
    patched[torch.ops.aten.view.default] = _view
    for strict, table in ((False, None), (False, patched), (True, patched)):
        try:
            return torch.export.export(model, arguments, options, strict=strict).run_decompositions(table)
        except Exception as error:  # torch.export raises many kinds, none of them documented
            reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
    raise TraceError(
        f"{type(model).__name__} runs but could not be traced by torch.export ({reasons[0]}). Usual causes: control "
        "flow or shapes that depend on tensor values; replace them (torch.where, fixed shapes) or discover the "
        "parts separately."
    )


def _view(x: Tensor, size: list[int]) -> Any:
    """Copy before a view that the strides do not allow: decompositions may change strides."""
    if _viewable(x.shape, x.stride(), size):
        return NotImplemented
    return torch.ops.aten._unsafe_view(x.clone(memory_format=torch.contiguous_format), size)


def _viewable(shape: Sequence[int], stride: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a strided tensor can be viewed under another shape without copying."""
    count = math.prod(shape)
    wanted = [-count // math.prod(size) if n == -1 else n for n in size]
    axes = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    targets = [n for n in wanted if n != 1]
    while axes:
        run, step = axes.pop()
        need = targets.pop()
        while run != need:
            if run < need:  # this axis and the one before must lie in memory as one
                n, s = axes.pop()
                if s != run * step:
                    return False
                run *= n
            else:
                need *= targets.pop()
    return True


def _nodes(program: Any) -> Iterator[Node]:
    """Turn an exported program into our own nodes, weights and inputs first."""
    signature = program.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = dict(signature.inputs_to_lifted_tensor_constants)
    made: dict[Any, Node] = {}
    for source in program.graph.nodes:
        node = Node(source.name, "call", module=_module_path(source))
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            node.shape, node.dtype = tuple(int(n) for n in value.shape), value.dtype
            node.stride = tuple(int(n) for n in value.stride()) if value.layout is torch.strided else None
        if source.op == "placeholder":
            _placeholder(node, source.name, states, constants, program)
        elif source.op == "output":
            node.kind, node.arguments = "output", (_swap(source.args[0], made),)
        else:
            node.operation, node.function = str(source.target), source.target
            if source.target is operator.getitem:
                node.operation = "getitem"
            node.arguments = tuple(_swap(argument, made) for argument in source.args)
            node.options = {key: _swap(argument, made) for key, argument in source.kwargs.items()}
        for parent in node.parents():
            parent.users.append(node)
        made[source] = node
        yield node


def _placeholder(node: Node, name: str, states: dict[str, str], constants: dict[str, str], program: Any) -> None:
    if name in states:
        node.kind, node.state_name = "state", states[name]
        node.buffer = name in program.graph_signature.inputs_to_buffers
        if states[name] not in program.state_dict:  # a buffer with persistent=False is no part of a State
            node.kind, node.state_name, node.constant = "constant", "", program.constants[states[name]].detach()
    elif name in constants:
        node.kind, node.constant = "constant", program.constants[constants[name]].detach()
    else:
        node.kind = "input"


def _module_path(source: Any) -> str:
    stack = source.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _swap(value: Any, made: dict[Any, Node]) -> Any:
    if isinstance(value, torch.fx.Node):
        return made[value]
    if isinstance(value, tuple | list):
        return tuple(_swap(item, made) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, made) for key, item in value.items()}
    return value


def _nodes_in(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [node for item in items for node in _nodes_in(item)]


def shared_memory(model: nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """Which state names are one tensor, and which overlap in memory without being one."""
    first: dict[Any, str] = {}
    shared: dict[str, str] = {}
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or tensor.numel() == 0 or tensor.is_meta:
            shared[name] = name
            continue
        start, size = tensor.data_ptr(), tensor.element_size()
        key = (start, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        shared[name] = first.setdefault(key, name)
        if shared[name] == name:
            reach = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            spans.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, start + reach * size, name))
    entangled: set[str] = set()
    for pieces in spans.values():
        pieces.sort()
        _, reach, owner = pieces[0]
        for start, stop, name in pieces[1:]:
            if start < reach:
                entangled |= {owner, name}
            if stop > reach:
                reach, owner = stop, name
    return shared, frozenset(entangled)
