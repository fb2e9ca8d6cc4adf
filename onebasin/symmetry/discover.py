"""Discover the symmetries of a traced function: run a rule per operation, read off spaces and freedoms, prove them.

Every use of every parameter is explained by a rule or reported: an operation without a rule makes all that reaches it
rigid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.errors import InputError, OnebasinError, TraceError
from onebasin.state import state_of
from onebasin.symmetry import assemble, exponents, fibres
from onebasin.symmetry.axes import Atom, Reason, atoms, resolve
from onebasin.symmetry.blocks import Blocks, Fusions
from onebasin.symmetry.group import Symmetry
from onebasin.symmetry.memory import nothing_remembered
from onebasin.symmetry.rules import rule_for
from onebasin.symmetry.rules.pointwise import plain
from onebasin.symmetry.unread import hold
from onebasin.symmetry.variants import Variants, variants
from onebasin.symmetry.verify import proven
from onebasin.symmetry.weave import Value, Weave
from onebasin.trace import Graph, Node, check_call, joined, trace

SHAPE_ONLY = {"full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}
# Positions must not be mistaken for values: at position 0 a sine is zero and a cosine is one for every frequency.
POSITIONAL = {"arange", "linspace", "logspace", "range"}
UNFOLDED = {"cumsum", "slice", "select", "index", "index_select", "gather", "split_with_sizes", "unbind", "embedding"}
PARTNERS = {
    "mul": (0, 1), "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "linear": (0, 1), "convolution": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addmv": (1, 2),
}  # fmt: skip
# The proof at examples of our own: the given one is proved with more elements.
BRIEFLY: dict[str, Any] = {
    "brief": True,
    "reason": "it holds for the example given, but not for the same call with other sizes or numbers",
}
SILENT = ("_assert", "sym_size", "sym_constrain", "_operator")


def discover(
    model: nn.Module, inputs: Inputs, *, also: Sequence[Inputs] = (), vary: bool = True, seed: int = 0
) -> Symmetry:
    """Find the symmetries of `model` and prove them by evaluation in float64.

    One example hides what others show: with one time step a recurrent weight meets only zeros, a number may choose a
    branch. So the call is tried at other sizes (batch, length, image) and other values of Python numbers, and where
    the model runs, the symmetry must hold there as well: what fails at one of these examples is analysed there, too.

    Args:
        model: any module; it is traced in evaluation mode and left as it was.
        inputs: a tensor, a tuple of positional inputs, or a dict of keyword inputs: one small example of a real call.
        also: further examples of calls, each like `inputs`: the symmetry holds for all of them. For models that are
            called in several ways (tasks, optional inputs), or that run only at sizes nobody would guess.
        vary: whether further examples are made out of `inputs`.
        seed: seeds the random elements of the proof.

    Returns:
        The symmetry. What fails the proof is removed and reported in `unexplained`, as are axes of size 1 and numbers
        that may hide something and could not be varied.

    >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> [(space.size, space.freedoms) for space in discover(net, torch.zeros(1, 3)).spaces]
    [(5, ('permutation', 'scale'))]
    """
    given = [inputs, *also]
    for example in given:
        check_call(model, example)
    with nothing_remembered(model, inputs) as remembered:
        made = variants(model, inputs) if vary else Variants()
        # One trace is what discovery costs, so of the example and its wider form only the latter, which hides less,
        # is traced; at the former the symmetry is proved by evaluation.
        graphs = [_traced(model, inputs if made.wider is None else made.wider, inputs)]
        graphs += [trace(model, example) for example in also]
        shapes = {name: tuple(tensor.shape) for name, tensor in state_of(model).items()}
        symmetry = _proven_everywhere(model, graphs, [*given, *made.others], shapes, len(given), seed)
    return replace(symmetry, unexplained=(*symmetry.unexplained, *made.doubts, *remembered))


def _traced(model: nn.Module, inputs: Inputs, otherwise: Inputs) -> Graph:
    """The trace at one example, or at another where that one cannot be traced."""
    try:
        return trace(model, inputs)
    except TraceError:
        if inputs is otherwise:
            raise
        return trace(model, otherwise)


def _proven_everywhere(
    model: nn.Module,
    graphs: list[Graph],
    examples: Sequence[Inputs],
    shapes: dict[str, tuple[int, ...]],
    given: int,
    seed: int,
) -> Symmetry:
    """The symmetry of several traces together that holds at all examples, the first `given` of them the user's.

    Where it fails the analysis has not seen what is computed at that example: it is traced, too, and the analysis of
    all traces together starts again. Only what fails after that is removed.
    """
    traced: set[int] = set()
    symmetry = analyse(joined(graphs), shapes)
    number = 0
    while number < len(examples):
        example, own = examples[number], number >= given
        try:
            kept = proven(model, symmetry, example, seed=seed, **(BRIEFLY if own else {}))
        except Exception:
            if not own:
                raise
            kept = symmetry  # an example of our own at which the proof cannot be evaluated
        number += 1
        if kept is not symmetry and number not in traced:
            traced.add(number)
            with contextlib.suppress(TraceError, InputError):
                graphs = [*graphs, trace(model, example)]
                symmetry, number = analyse(joined(graphs), shapes), 0
                continue
        symmetry = kept
    return symmetry


def analyse(graph: Graph, shapes: dict[str, tuple[int, ...]]) -> Symmetry:
    """The symmetries of a graph, not yet proved.

    Raises:
        TraceError: sizes that depend on values of tensors are used in a way that cannot be followed.
    """
    try:
        return _analysed(graph, shapes)
    except Exception as error:
        if not graph.open_sizes or isinstance(error, OnebasinError):
            raise
        raise TraceError(
            f"the model runs, but sizes in it depend on values of tensors ({graph.open_sizes}), and what is computed "
            "with them cannot be followed. Replace what selects entries by torch.where or by a product with the mask, "
            "or discover the parts of the model separately."
        ) from error


def _analysed(graph: Graph, shapes: dict[str, tuple[int, ...]]) -> Symmetry:
    weave = Weave(graph)
    made: dict[Node, Any] = {}
    for node in graph.nodes:
        made[node] = _step(weave, node, made)
    _listen(weave, made)
    _hold_buffers(weave)
    hold(weave, {value: Blocks(value, number, {}) for number, value in enumerate(weave.values)})
    blocks, parents, fusions = _layout(weave)
    systems = exponents.equations(weave, blocks, fusions)
    found = assemble.spaces(weave, blocks, parents, systems)
    rigid, unexplained = _report(weave)
    return Symmetry(found, shapes, rigid, unexplained)


def _step(weave: Weave, node: Node, made: dict[Node, Any]) -> Any:
    """The value of a node."""
    if node.kind == "state":
        return _state(weave, node)
    if node.kind == "constant":
        assert node.constant is not None
        return weave.constant(node.constant)
    if node.kind == "input":
        return None if node.shape is None else weave.fixed(node.shape, node, Reason("it is a model input", node))
    arguments, options = _filled(node.arguments, made), _filled(node.options, made)
    if node.kind == "output":
        for value in _values((arguments, options)):
            weave.freeze(value, Reason("it is a model output", node))
        return None
    if node.operation == "getitem":
        return arguments[0][arguments[1]]
    return _call(weave, node, arguments, options)


def _state(weave: Weave, node: Node) -> Value:
    name = weave.graph.shared.get(node.state_name, node.state_name)
    if name not in weave.states:
        assert node.shape is not None and node.dtype is not None
        if not node.dtype.is_floating_point:
            return weave.fixed(node.shape, node)
        value = weave.value([Atom(size) for size in node.shape], node=node)
        value.state_name = name
        weave.states[name] = value
        if name in weave.graph.entangled:
            weave.freeze(value, Reason("it shares memory with another tensor", node, explained=False))
    return weave.states[name]


def _call(weave: Weave, node: Node, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    name = node.short or node.operation
    operands = _values((arguments, options))
    if name.startswith(SILENT) or (name == node.operation and not operands):
        return node.number  # arithmetic on sizes and assertions about them
    random = torch.Tag.nondeterministic_seeded in getattr(node.function, "tags", ())
    if name in POSITIONAL and node.shape is not None:
        return weave.fixed(node.shape, node, Reason("it meets positions", node))
    constant = all(value.constant is not None for value in operands) and not (name in UNFOLDED and operands)
    if name in SHAPE_ONLY or (constant and not random):
        return _fold(weave, node, arguments, options)
    rule = rule_for(node.operation)
    if rule is None and torch.Tag.pointwise in getattr(node.function, "tags", ()) and node.shape is not None:
        rule = plain
    if rule is not None:
        return rule(weave, node, *arguments, **options)
    reason = Reason(f"the operation {node.operation} has no rule", node, explained=False)
    for value in operands:
        weave.freeze(value, reason)
    return _unknown(weave, node, reason)


def _unknown(weave: Weave, node: Node, reason: Reason) -> Any:
    """Results of an operation without a rule: nothing moves its operands, so nothing moves these."""
    if node.shape is not None:
        return weave.fixed(node.shape, node, reason)
    readers = {user.arguments[1]: user for user in node.users if user.operation == "getitem"}
    return {number: weave.fixed(user.shape or (), user, reason) for number, user in readers.items()}


def _fold(weave: Weave, node: Node, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Evaluate what does not depend on weights or inputs."""
    assert node.function is not None
    plain_arguments, plain_options = _constants(arguments, node), _constants(options, node)
    result = node.function(*plain_arguments, **plain_options)
    if isinstance(result, Tensor):
        return weave.constant(result)
    if isinstance(result, tuple | list):
        return tuple(weave.constant(item) if isinstance(item, Tensor) else item for item in result)
    return result


def _constants(value: Any, node: Node) -> Any:
    if isinstance(value, Value):
        if value.constant is not None:
            return value.constant
        assert value.shape is not None  # only the shape matters to the operations that get here
        return torch.empty(value.shape, dtype=node.dtype)
    if isinstance(value, tuple | list):
        return type(value)(_constants(item, node) for item in value)
    if isinstance(value, dict):
        return {key: _constants(item, node) for key, item in value.items()}
    return value


def _filled(value: Any, made: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        return made[value]
    if isinstance(value, tuple | list):
        return tuple(_filled(item, made) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, made) for key, item in value.items()}
    return value


def _values(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [found for item in items for found in _values(item)]


def _listen(weave: Weave, made: dict[Node, Any]) -> None:
    """Freeze tensors whose effect this input hides: multiplied by zeros they say nothing about other inputs."""
    heard: set[Node] = set()
    todo = [node for node in weave.graph.nodes if node.kind == "output"]
    while todo:
        node = todo.pop()
        if node in heard or (isinstance(made.get(node), Value) and made[node].zero):
            continue
        heard.add(node)
        todo += _audible(node, made)
    for value in weave.states.values():
        twins = [node for node in weave.graph.nodes if node.kind == "state" and made[node] is value]
        if any(node in heard for node in twins):
            continue
        if any(node.users for node in twins):
            text = "it is only multiplied by zeros for this input (give a recurrent model at least two steps)"
            weave.freeze(value, Reason(text, value.node, explained=False))
            # Relations with zeros were not recorded, so exponents along these axes are not known.
            weave.hidden += value.axes
        else:
            weave.freeze(value, Reason("it is not used by the forward pass", value.node))


def _audible(node: Node, made: dict[Node, Any]) -> list[Node]:
    """The operands of a node that can be heard through it: not those that are multiplied by zeros."""
    silent: set[Node] = set()
    if node.short in PARTNERS:
        one, other = (node.arguments[place] for place in PARTNERS[node.short])
        for operand, partner in ((one, other), (other, one)):
            if isinstance(partner, Node) and isinstance(made[partner], Value) and made[partner].zero:
                silent.add(operand)
    return [parent for parent in node.parents() if parent not in silent]


def _hold_buffers(weave: Weave) -> None:
    """Buffers follow permutations, but are data, not weights: only batch-norm statistics take factors."""
    for name, value in weave.states.items():
        if value.node is not None and value.node.buffer and name not in weave.means and name not in weave.variances:
            weave.pin(value)


def _layout(weave: Weave) -> tuple[dict[Value, Blocks], fibres.Parents, Fusions]:
    """Blocks of all values and parents of all atoms, with neighbours that always go together fused."""
    fusions: Fusions = {}
    while True:
        blocks = {value: Blocks(value, number, fusions) for number, value in enumerate(weave.values)}
        parents, grown = fibres.settle(fibres.parents(weave, blocks), blocks, fusions)
        if len(grown) == len(fusions):
            return blocks, parents, fusions
        fusions = grown


def _report(weave: Weave) -> tuple[tuple[tuple[str, int, str], ...], tuple[str, ...]]:
    """What stayed rigid: with a full explanation, and without."""
    rigid: list[tuple[str, int, str]] = []
    doubts: dict[Reason, list[str]] = {}
    for value in weave.states.values():
        for axis, term in enumerate(value.axes):
            for reason in dict.fromkeys(atom.rigid for atom in atoms(resolve(term)) if atom.rigid is not None):
                if reason.explained:
                    rigid.append((value.state_name, axis, reason.text))
                else:
                    doubts.setdefault(reason, []).append(f"{value.state_name}[{axis}]")
    sentences = [f"{', '.join(dict.fromkeys(found))}: {reason.text}{_path(reason)}" for reason, found in doubts.items()]
    return tuple(dict.fromkeys(rigid)), tuple(sentences)


def _path(reason: Reason) -> str:
    """How a parameter reaches the node of a reason: the shortest path, from the parameter on."""
    if reason.node is None or reason.node.kind == "state":
        return ""
    paths: list[list[Node]] = [[reason.node]]
    seen = {reason.node}
    while paths:
        path = paths.pop(0)
        if path[0].kind == "state":
            where = f" in {reason.node.module}" if reason.node.module else ""
            return f"{where} (path: {' -> '.join(map(repr, path))})"
        for parent in path[0].parents():
            if parent not in seen:
                seen.add(parent)
                paths.append([parent, *path])
    return f" ({reason.node!r})"
