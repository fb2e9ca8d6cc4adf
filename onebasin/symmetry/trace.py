"""Trace a module into a graph of functional aten operations; the only file that knows `torch.export`.

The function is traced, not the tree of modules: `nn.ReLU`, `F.relu` and an overloaded operator become one operation, a
module that is called twice appears twice, and a weight that a line of a forward function uses is seen. Decomposed to
core aten, about 65 operations make up all common architectures, so one rule per operation covers them. In functional
form nothing is written in place: a node's value depends on its arguments alone, which is what rules rely on.

The module is exported in evaluation mode, because dropout is the identity there and batch norm an affine map; what
training mode adds is left to the proof by evaluation. Mode, hooks and attributes of the user's module are left as they
were. What torch refuses is tried again: first with views that may copy (decompositions change strides), then by a
strict export. A size that depends on values gets a prime of its own (`_Sizes`).

Cost: one export per traced example, 0.1 to 0.6 s for small networks, which is most of a discovery.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import operator
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, OnebasinError, TraceError, first_line
from onebasin.functional import Inputs, attributes_kept, call_arguments, call_error, evaluation_mode


@dataclass(eq=False)
class Node:
    """One step of the traced function: a weight, an input, a constant, an operation or the output.

    `kind` is "state", "input", "constant", "call" or "output"; `arguments` and `options` may hold other nodes at any
    depth. `shape` is None for what is not one tensor (an operation with several results, a number); `number` is the
    value of a whole number, such as a size.
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
    number: int | None = None
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
    `entangled` names tensors that overlap in memory without being the same tensor; `open_sizes` says where a size
    depends on values of tensors ("" if none does).
    """

    nodes: tuple[Node, ...]
    shared: dict[str, str]
    entangled: frozenset[str]
    open_sizes: str = ""

    def batch_norm_statistics(self) -> set[str]:
        """Names of the buffers that a batch norm in evaluation form reads as its mean or its variance."""
        return {
            argument.state_name
            for node in self.nodes
            if node.short == "_native_batch_norm_legit_no_training"
            for argument in node.arguments[3:5]
            if isinstance(argument, Node) and argument.buffer
        }


def trace(model: nn.Module, inputs: Inputs) -> Graph:
    """Trace `model` called with `inputs` (a tensor, a tuple of positional inputs, or a dict of keyword inputs).

    Raises:
        InputError: `inputs` is none of these, or the model cannot be called with them.
        TraceError: the model runs, but cannot be turned into a graph.
    """
    check_call(model, inputs)
    arguments, options = call_arguments(inputs)
    with _undisturbed(model):
        program = _export(model, arguments, options)
    shared, entangled = shared_memory(model)
    sizes = _Sizes()
    return Graph(tuple(_nodes(program, sizes)), shared, entangled, sizes.where)


def joined(graphs: Sequence[Graph]) -> Graph:
    """Several traces of one model as one graph with several outputs: what keeps all of them keeps each."""
    # A symmetry of a graph with several outputs keeps each of them, so joining intersects the groups exactly.
    where = next((graph.open_sizes for graph in graphs if graph.open_sizes), "")
    nodes = tuple(node for graph in graphs for node in graph.nodes)
    return Graph(nodes, graphs[0].shared, graphs[0].entangled, where)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """A forward pass may draw random numbers, and export warns about its own internals, not about the user's model."""
    with evaluation_mode(model), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def check_call(model: nn.Module, inputs: Inputs) -> None:
    """Call the model once.

    Raises:
        InputError: the model is no module, or it cannot be called with `inputs`.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model must be a torch.nn.Module, found {type(model).__name__}; wrap functions in a module."
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise InputError(f"{type(model).__name__} only distributes a module; give the module itself: model.module.")
    for name, parameter in model.named_parameters():
        if parameter.layout != torch.strided:
            layout = str(parameter.layout).removeprefix("torch.")
            raise InputError(
                f"expected dense parameters, found {name} stored as {layout}: store it with to_dense(), and the places "
                "that stay zero as a mask in a buffer."
            )
    _check_names(model)
    arguments, options = call_arguments(inputs)
    try:
        with _undisturbed(model):
            model(*arguments, **options)
    except OnebasinError:
        raise
    except Exception as error:
        raise call_error(model, (arguments, options), error) from error


def _check_names(model: nn.Module) -> None:
    """Refuse a model whose state dict has other names than its tensors: what a name stands for would be a guess."""
    states = {name for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    odd = sorted(states - parameters - buffers) + sorted(parameters - states)
    if odd:
        raise InputError(
            f"the state dict of {type(model).__name__} should name parameters and buffers as named_parameters() does, "
            f"but {odd[0]!r} stands in only one of the two ({len(odd)} such names): a state_dict hook renames or drops "
            "tensors. Give a model without the hook (a copy whose _state_dict_hooks are cleared)."
        )


class _Shell(nn.Module):
    """The model as the only submodule of another: a graph has attributes called `code` and `graph` of its own.

    With `kept`, attributes that the forward pass sets are put back at its end: torch.export refuses to lose them.
    """

    def __init__(self, model: nn.Module, kept: bool) -> None:
        super().__init__()
        self.model, self.kept = model, kept

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Call the model."""
        if not self.kept:
            return self.model(*arguments, **options)
        with attributes_kept(self.model):
            return self.model(*arguments, **options)


def _unwrapped(name: str) -> str:
    """A name inside of the shell as the model knows it.

    >>> _unwrapped("model.fc.weight"), _unwrapped("model")
    ('fc.weight', '')
    """
    return name.removeprefix("model").removeprefix(".")


def _export(model: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Export and decompose; fall back to views that may copy, then to a strict export."""
    failures: list[Exception] = []
    table = _decompositions(len(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")))
    copying = {**table, torch.ops.aten.view.default: _view}
    for strict, decompositions in ((False, table), (False, copying), (True, copying)):
        try:
            shell = _Shell(model, kept=not strict)
            with contextlib.redirect_stderr(io.StringIO()):  # of a trace that fails all of it is printed
                return torch.export.export(shell, arguments, options, strict=strict).run_decompositions(decompositions)
        except Exception as error:  # torch.export raises many kinds, none of them documented
            failures.append(error)
    raise TraceError(
        f"{type(model).__name__} runs but could not be traced by torch.export ({_brief(failures[0])})"
        f"{_line_of(failures[0], model)}. {CAUSES}"
    )


@functools.cache
def _decompositions(operations: int) -> dict[Any, Callable[..., Any]]:
    """The decompositions to core aten; made once for a number of registered composite operations.

    torch makes this table anew in every call, which was up to a tenth of a discovery: to find operations of other
    libraries it asks the dispatcher namespace by namespace. The table can change only when a library registers more.
    """
    return torch.export.default_decompositions().materialize()


CAUSES = (
    "Usual causes: control flow or shapes that depend on tensor values (a mixture of experts that sends each token "
    "elsewhere), packed sequences, parts compiled by torch.jit; replace them (torch.where, fixed shapes) or discover "
    "the parts separately: what keeps the function of a submodule keeps that of the model."
)


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def _line_of(error: BaseException, model: nn.Module) -> str:
    """Where in the model's own code an error arose: the innermost line of a file that defines one of its modules."""
    files = {
        sys.modules[type(module).__module__].__file__: type(module).__name__
        for module in model.modules()
        if hasattr(sys.modules.get(type(module).__module__), "__file__")
    }
    ours = {file: name for file, name in files.items() if file and f"{os.sep}torch{os.sep}" not in file}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in ours]
    return f" at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


class _Sizes:
    """Sizes as plain numbers.

    A size that depends on values of tensors (how many rows a mask keeps) has none while a model is traced. It stands
    for any number, and gets a prime that is no size of anything else: an axis of that size is addressed by position,
    so that no symmetry moves it, whatever its size is.
    """

    def __init__(self) -> None:
        self.chosen: dict[Any, int] = {}
        self.where = ""

    def __call__(self, size: Any, source: Any) -> int:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self.chosen:
                self.chosen[symbol] = PRIMES[len(self.chosen) % len(PRIMES)]
                self.where = self.where or f"{source.target}{_source_line(source)}"
        return max(int(expression.subs(self.chosen)), 0)


PRIMES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)


def _source_line(source: Any) -> str:
    """The user's line behind a node of the graph."""
    lines = [line.strip() for line in str(source.meta.get("stack_trace") or "").splitlines() if line.strip()]
    places = [number for number, line in enumerate(lines) if line.startswith("File ")]
    return f" at {' '.join(lines[places[-1] : places[-1] + 2])}" if places else ""


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


def _nodes(program: Any, sizes: _Sizes) -> Iterator[Node]:
    """Turn an exported program into our own nodes, weights and inputs first."""
    signature = program.graph_signature
    states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = dict(signature.inputs_to_lifted_tensor_constants)
    nodes: dict[Any, Node] = {}
    for source in program.graph.nodes:
        node = Node(source.name, "call", module=_module_path(source))
        value = source.meta.get("val")
        if isinstance(value, Tensor):
            node.shape, node.dtype = tuple(sizes(n, source) for n in value.shape), value.dtype
            node.stride = tuple(sizes(n, source) for n in value.stride()) if value.layout is torch.strided else None
        elif isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            node.number = sizes(value, source)
        if source.op == "placeholder":
            _placeholder(node, source.name, states, constants, program)
        elif source.op == "output":
            node.kind, node.arguments = "output", (_swap(source.args[0], nodes),)
        else:
            node.operation, node.function = str(source.target), source.target
            if source.target is operator.getitem:
                node.operation = "getitem"
            node.arguments = tuple(_swap(argument, nodes) for argument in source.args)
            node.options = {key: _swap(argument, nodes) for key, argument in source.kwargs.items()}
        for parent in node.parents():
            parent.users.append(node)
        nodes[source] = node
        yield node


def _placeholder(node: Node, name: str, states: dict[str, str], constants: dict[str, str], program: Any) -> None:
    if name in states:
        node.kind, node.state_name = "state", _unwrapped(states[name])
        node.buffer = name in program.graph_signature.inputs_to_buffers
        if states[name] not in program.state_dict:  # a buffer with persistent=False is no part of a State
            node.kind, node.state_name, node.constant = "constant", "", program.constants[states[name]].detach()
    elif name in constants:
        node.kind, node.constant = "constant", program.constants[constants[name]].detach()
    else:
        node.kind = "input"


def _module_path(source: Any) -> str:
    stack = source.meta.get("nn_module_stack") or {}
    return _unwrapped(str(list(stack.values())[-1][0])) if stack else ""


def _swap(value: Any, nodes: dict[Any, Node]) -> Any:
    if isinstance(value, torch.fx.Node):
        return nodes[value]
    if isinstance(value, tuple | list):
        return tuple(_swap(item, nodes) for item in value)
    if isinstance(value, dict):
        return {key: _swap(item, nodes) for key, item in value.items()}
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
        if not isinstance(tensor, Tensor) or tensor.numel() == 0 or tensor.is_meta or tensor.layout != torch.strided:
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
