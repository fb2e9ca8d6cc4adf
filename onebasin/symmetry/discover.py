"""Discover the symmetries of a module: trace it, run a rule per operation, read off spaces, prove them.

1. `trace` turns the call into a graph of about 65 kinds of operations.
2. A rule per operation says which axes are walked in step (unification of terms, `axes`) and how factors pass (linear
   relations between exponents, `constraints`). Each use of each parameter is explained by a rule or reported: an
   operation without a rule makes all that reaches it rigid, and so do outputs, inputs and positions.
3. `blocks` lays out the tensors, `solve` finds the exponents, `assemble` names the spaces.
4. `verify` evaluates random elements in float64; what changes the function is removed and reported.

The rules alone would be a claim about our reading of aten; the proof alone could only refute candidates. Together an
error of a rule is found on the user's own model. A symmetry that is missed is a pity, a wrong one is a bug of the worst
kind, so every doubt makes units rigid.

One example hides what others show (one time step, one token, a number that chooses a branch), so the symmetry must also
hold at examples of other sizes and numbers (`vary_inputs`). Where it fails there, that example is traced too, and all
traces are analysed as one graph with several outputs.

Cost: one export, which is most of the time; the analysis is linear in the operations and independent of the
widths; the proof takes 9 to 20 forward passes in float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, OnebasinError, TraceError
from onebasin.functional import (
    AnyInputs,
    Inputs,
    OutputPart,
    call_arguments,
    few_of,
    nothing_remembered,
    select_output,
)
from onebasin.state import state_of
from onebasin.symmetry.assemble import missed, spaces
from onebasin.symmetry.axes import Atom, Reason, atoms, resolve
from onebasin.symmetry.blocks import Blocks, Fusions, Parents, parents_of, settle
from onebasin.symmetry.constraints import Constraints, Pieces, Range, Value, parted
from onebasin.symmetry.group import Symmetry
from onebasin.symmetry.rules.pointwise import plain
from onebasin.symmetry.rules.registry import FOLLOWING, Rule, rule_for
from onebasin.symmetry.solve import equations, hold_unread
from onebasin.symmetry.trace import Graph, Node, check_call, joined, trace
from onebasin.symmetry.unmoved import UNREAD, Companions, constants, uniform_axes, with_companions
from onebasin.symmetry.vary_inputs import Variants, variants
from onebasin.symmetry.verify import Training, proven

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
# Of their operand only the shape matters: it is filled with random numbers.
OVERWRITTEN = {"rand_like", "randn_like", "randint_like", "uniform", "exponential", "normal_functional"}
# Operations that only put positions (`Value.points`) elsewhere.
CARRYING = {
    "clone", "alias", "detach", "contiguous", "lift_fresh_copy", "unsqueeze", "squeeze", "expand", "permute",
    "transpose", "view", "_unsafe_view", "reshape", "slice", "select", "_to_copy",
}  # fmt: skip
SILENT = ("_assert", "sym_size", "sym_constrain", "_operator")


def discover(
    model: nn.Module,
    inputs: AnyInputs,
    *,
    output: OutputPart = None,
    also: Sequence[AnyInputs] = (),
    vary: bool = True,
    training: Training = None,
    frozen: Iterable[str] | None = None,
    companions: Companions | None = None,
    seed: int = 0,
) -> Symmetry:
    """Find the symmetries of `model` and prove them by evaluation in float64.

    One example hides what others show: with one time step a recurrent weight meets only zeros, a number may choose a
    branch. So the call is tried at other sizes (batch, length, image) and other values of Python numbers, and where
    the model runs, the symmetry must hold there as well: what fails at one of these examples is analysed there, too.

    Args:
        model: any module; it is traced in evaluation mode and left as it was.
        inputs: a tensor or array, a tuple of positional inputs, or a dict of keyword inputs: one small example of a
            real call. Of a Dataset or rows of a table the first 8 examples, of a DataLoader the first batch, without
            targets.
        output: which part of what the model returns counts; None for all of it, which is safe.
        also: further examples of calls, each like `inputs`: the symmetry holds for all of them. For models that are
            called in several ways (tasks, optional inputs), or that run only at unusual sizes.
        vary: whether further examples are made out of `inputs`.
        training: what is wanted are the symmetries of the function that was trained, so the proof also covers training
            mode, and what holds in evaluation mode only is removed and reported. None tries training mode with the
            same inputs and says so in `unexplained` if the model refuses that; inputs of a training call, where they
            differ (a batch of groups); True raises an error instead; False looks at evaluation mode alone.
        frozen: names of parameters that are constants, or of modules for all of theirs; by default the parameters that
            require no gradient (if none requires one, the model was frozen for inference, and none is a constant).
        companions: parameters that this call does not read but that belong to one that it reads, as the deviation rho
            beside a mean mu: {"rho": ("mu", how)}, by name in the state dict or by the last part of it for all modules.
            `how` says what a factor m of mu does: "value" times m, "std" times |m|, "log-std" plus log |m|, "softplus"
            as r of log(1 + exp(r)) times |m|, "mask" nothing. Parameters that are not read are else left as they are,
            and named in `unexplained`.
        seed: seeds the random elements of the proof.

    Returns:
        The symmetry. What fails the proof is removed and reported in `unexplained`, as are axes of size 1 and numbers
        that may hide something and could not be varied.

    >>> net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    >>> [(space.size, space.freedoms) for space in discover(net, torch.zeros(1, 3)).spaces]
    [(5, ('permutation', 'scale'))]
    """
    model = select_output(model, output)
    inputs = few_of(inputs, model)
    also = [few_of(example, model) for example in also]
    if training is not None and not isinstance(training, bool):
        training = few_of(training, model)
    given = [inputs, *also]
    for example in given:
        check_call(model, example)
    with nothing_remembered(model, call_arguments(inputs)) as remembered:
        other = variants(model, inputs) if vary else Variants()
        # One trace is what discovery costs, so of the example and its wider form only the latter, which hides less,
        # is traced; at the former the symmetry is proved by evaluation.
        graphs = [_traced(model, inputs if other.wider is None else other.wider, inputs)]
        graphs += [trace(model, example) for example in also]
        shapes = {name: tuple(tensor.shape) for name, tensor in state_of(model).items()}
        trained = inputs if training is None or isinstance(training, bool) else training

        parameters = [name for name, _ in model.named_parameters() if name in shapes]

        def analysed(graphs: Sequence[Graph]) -> Symmetry:
            graph = joined(graphs)
            symmetry = analyse(graph, shapes, constants(model, graph, trained, frozen))
            return with_companions(symmetry, companions, [name for name in parameters if name not in symmetry.frozen])

        def proved(symmetry: Symmetry, example: Inputs, given: bool) -> Symmetry:
            options: dict[str, Any] = {"training": training} if given else {"training": False, **BRIEFLY}
            return proven(model, symmetry, example, seed=seed, **options)

        symmetry = _proven_everywhere(model, graphs, [*given, *other.others], len(given), analysed, proved)
    sentences = dict.fromkeys((*symmetry.unexplained, *other.doubts, *remembered))
    return replace(symmetry, unexplained=tuple(sentences))


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
    given: int,
    analysed: Callable[[Sequence[Graph]], Symmetry],
    proved: Callable[[Symmetry, Inputs, bool], Symmetry],
) -> Symmetry:
    """The symmetry of several traces together that holds at all examples, the first `given` of them the user's.

    Where it fails the analysis has not seen what is computed at that example: it is traced, too, and the analysis of
    all traces together starts again. Only what fails after that is removed.
    """
    traced: set[int] = set()
    symmetry = analysed(graphs)
    number = 0
    while number < len(examples):
        example = examples[number]
        try:
            remaining = proved(symmetry, example, number < given)
        except Exception:
            if number < given:
                raise
            remaining = symmetry  # an example that was made here, at which the proof cannot be evaluated
        number += 1
        if remaining.spaces is not symmetry.spaces and number not in traced:
            traced.add(number)
            with contextlib.suppress(TraceError, InputError):
                graphs = [*graphs, trace(model, example)]
                symmetry, number = analysed(graphs), 0
                continue
        symmetry = remaining
    return symmetry


def analyse(
    graph: Graph, shapes: dict[str, tuple[int, ...]], constants: Mapping[str, Tensor] | None = None
) -> Symmetry:
    """The symmetries of a graph that leave `constants`, tensors of the state by name, as they are; not yet proved.

    Raises:
        TraceError: sizes that depend on values of tensors are used in a way that cannot be followed.
    """
    try:
        return _analysed(graph, shapes, constants or {})
    except Exception as error:
        if not graph.open_sizes or isinstance(error, OnebasinError):
            raise
        raise TraceError(
            f"the model runs, but sizes in it depend on values of tensors ({graph.open_sizes}), and what is computed "
            "with them cannot be followed. Replace what selects entries by torch.where or by a product with the mask, "
            "or discover the parts of the model separately."
        ) from error


def _analysed(graph: Graph, shapes: dict[str, tuple[int, ...]], constants: Mapping[str, Tensor]) -> Symmetry:
    constraints = Constraints(graph, constants)
    values: dict[Node, Any] = {}
    parts = parted(graph)
    for node in graph.nodes:
        values[node] = _step(constraints, node, values, parts)
    _freeze_inaudible(constraints, values)
    _hold_buffers(constraints)
    # Only now are all axes known: a rule may still have cut an axis that an earlier one had left whole. What is not
    # read must be held before atoms are fused, the exponents solved after.
    hold_unread(constraints, {value: Blocks(value, number, {}) for number, value in enumerate(constraints.values)})
    blocks, parents, fusions = _layout(constraints)
    systems = equations(constraints, blocks, fusions)
    assembled = spaces(constraints, blocks, parents, systems)
    rigid, unexplained = _report(constraints)
    unexplained += missed(constraints, blocks, parents, systems)
    rigid += tuple(
        (name, axis, "it is a constant") for name, tensor in constants.items() for axis in range(tensor.dim())
    )
    frozen = {name: uniform_axes(tensor) for name, tensor in constants.items()}
    return Symmetry(assembled, shapes, rigid, unexplained, frozen)


def _step(
    constraints: Constraints, node: Node, values: dict[Node, Any], parts: dict[str, tuple[int, list[Range]]]
) -> Any:
    """The value of a node."""
    if node.kind == "state":
        name = constraints.graph.shared.get(node.state_name, node.state_name)
        if name in parts and node.state_name not in constraints.constants:
            return _pieces(constraints, node, name, *parts[name])
        return _state(constraints, node)
    if node.kind == "constant":
        assert node.constant is not None
        return constraints.constant(node.constant)
    if node.kind == "input":
        return None if node.shape is None else constraints.fixed(node.shape, node, Reason("it is a model input", node))
    arguments, options = _filled(node.arguments, values), _filled(node.options, values)
    if node.kind == "output":
        for value in _values((arguments, options)):
            constraints.freeze(value, Reason("it is a model output", node))
        return None
    if node.operation == "getitem":
        return arguments[0][arguments[1]]
    if arguments and isinstance(arguments[0], Pieces):
        read = arguments[0].read(node)
        return read[0] if node.shape is not None else read
    return _call(constraints, node, arguments, options)


def _pieces(constraints: Constraints, node: Node, name: str, axis: int, spans: list[Range]) -> Pieces:
    """A parameter that is only read in parts."""
    assert node.shape is not None
    for start, stop in spans:
        if (key := f"{name}[{start}:{stop}]") not in constraints.states:
            sizes = [stop - start if number == axis else size for number, size in enumerate(node.shape)]
            constraints.states[key] = constraints.value([Atom(size) for size in sizes], node=node)
            constraints.states[key].state_name, constraints.states[key].part = name, (axis, start)
    return Pieces(axis, {(start, stop): constraints.states[f"{name}[{start}:{stop}]"] for start, stop in spans})


def _state(constraints: Constraints, node: Node) -> Value:
    name = constraints.graph.shared.get(node.state_name, node.state_name)
    if name not in constraints.states:
        assert node.shape is not None and node.dtype is not None
        if not node.dtype.is_floating_point:
            return constraints.fixed(node.shape, node)
        if node.state_name in constraints.constants:
            return constraints.frozen(constraints.constants[node.state_name], node)
        value = constraints.value([Atom(size) for size in node.shape], node=node)
        value.state_name = name
        constraints.states[name] = value
        if name in constraints.graph.entangled:
            constraints.freeze(value, Reason("it shares memory with another tensor", node, explained=False))
    return constraints.states[name]


def _call(constraints: Constraints, node: Node, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    name = node.short or node.operation
    operands = _values((arguments, options))
    if name.startswith(SILENT) or (name == node.operation and not operands):
        return node.number  # arithmetic on sizes and assertions about them
    random = torch.Tag.nondeterministic_seeded in getattr(node.function, "tags", ())
    if name in POSITIONAL and node.shape is not None:
        numbers = constraints.fixed(node.shape, node, Reason("it meets positions", node))
        numbers.counts = name == "arange" and tuple(node.arguments) in ((node.shape[0],), (0, node.shape[0]))
        return numbers
    constant = all(value.constant is not None for value in operands) and not (name in UNFOLDED and operands)
    if name in SHAPE_ONLY or (constant and not random):
        return _fold(constraints, node, arguments, options)
    rule = rule_for(node.operation)
    if rule is None and torch.Tag.pointwise in getattr(node.function, "tags", ()) and node.shape is not None:
        rule = plain
    if rule is not None:
        return _ruled(constraints, node, rule, arguments, options)
    # Noise drawn by position: a permutation of the units keeps the law of what is computed, but not the function.
    reason = (
        Reason("it meets random numbers, which are drawn by position", node)
        if random
        else Reason(f"the operation {node.operation} has no rule", node, explained=False)
    )
    for value in operands if name not in OVERWRITTEN else ():
        constraints.freeze(value, reason)
    return _unknown(constraints, node, reason)


def _ruled(
    constraints: Constraints, node: Node, rule: Rule, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Run a rule; units whose positions it uses as numbers become rigid, where it only carries them they go along."""
    held = [value for value in _values((arguments, options)) if value.points is not None or value.counts]
    if not held:
        return rule(constraints, node, *arguments, **options)
    carried = (node.short in CARRYING and node.dtype is not torch.bool) or (
        node.short == "remainder" and held[0].points is not None and arguments[1] == held[0].points.size
    )
    if not carried and rule not in FOLLOWING and not _only_asserted(node):
        for value in held:
            constraints.expose(value, Reason("its units are told by their position", node))
    result = rule(constraints, node, *arguments, **options)
    if carried and isinstance(result, Value) and result is not held[0]:
        result.points = held[0].points
        whole = math.prod(result.shape) == math.prod(held[0].shape)
        result.counts = held[0].counts and result.shape.count(1) >= len(result.shape) - 1 and whole
    return result


def _only_asserted(node: Node) -> bool:
    """Whether a result is only checked, so that its numbers reach no output."""
    return bool(node.users) and all(
        (user.short or user.operation).startswith(SILENT) or _only_asserted(user) for user in node.users
    )


def _unknown(constraints: Constraints, node: Node, reason: Reason) -> Any:
    """Results of an operation without a rule: nothing moves its operands, so nothing moves these."""
    if node.shape is not None:
        return constraints.fixed(node.shape, node, reason)
    readers = {user.arguments[1]: user for user in node.users if user.operation == "getitem"}
    return {number: constraints.fixed(user.shape or (), user, reason) for number, user in readers.items()}


def _fold(constraints: Constraints, node: Node, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Evaluate what does not depend on weights or inputs."""
    assert node.function is not None
    plain_arguments, plain_options = _constants(arguments, node), _constants(options, node)
    result = node.function(*plain_arguments, **plain_options)
    if isinstance(result, Tensor):
        return constraints.constant(result)
    if isinstance(result, tuple | list):
        return tuple(constraints.constant(item) if isinstance(item, Tensor) else item for item in result)
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


def _filled(value: Any, values: dict[Node, Any]) -> Any:
    if isinstance(value, Node):
        return values[value]
    if isinstance(value, tuple | list):
        return tuple(_filled(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return value


def _values(value: Any) -> list[Value]:
    if isinstance(value, Value):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [leaf for item in items for leaf in _values(item)]


def _freeze_inaudible(constraints: Constraints, values: dict[Node, Any]) -> None:
    """Freeze tensors whose effect this input hides: multiplied by zeros they say nothing about other inputs."""
    heard: set[Node] = set()
    todo = [node for node in constraints.graph.nodes if node.kind == "output"]
    while todo:
        node = todo.pop()
        if node in heard or (isinstance(values.get(node), Value) and values[node].zero):
            continue
        heard.add(node)
        todo += _audible(node, values)
    for value in constraints.states.values():
        twins = [
            n for n in constraints.graph.nodes if values[n] is value and (n.kind == "state" or value.part is not None)
        ]
        if any(node in heard for node in twins):
            continue
        if any(node.users for node in twins):
            text = "it is only multiplied by zeros for this input (give a recurrent model at least two steps)"
            constraints.freeze(value, Reason(text, value.node, explained=False))
            # Relations with zeros were not recorded, so exponents along these axes are not known.
            constraints.hidden += value.axes
        else:
            constraints.freeze(value, Reason(UNREAD, value.node))


def _audible(node: Node, values: dict[Node, Any]) -> list[Node]:
    """The operands of a node that can be heard through it: not those that are multiplied by zeros."""
    silent: set[Node] = set()
    if node.short in PARTNERS:
        one, other = (node.arguments[place] for place in PARTNERS[node.short])
        for operand, partner in ((one, other), (other, one)):
            if isinstance(partner, Node) and isinstance(values[partner], Value) and values[partner].zero:
                silent.add(operand)
    return [parent for parent in node.parents() if parent not in silent]


def _hold_buffers(constraints: Constraints) -> None:
    """Buffers follow permutations, but are data, not weights: only batch-norm statistics take factors."""
    for name, value in constraints.states.items():
        if (
            value.node is not None
            and value.node.buffer
            and name not in constraints.means
            and name not in constraints.variances
        ):
            constraints.pin(value)


def _layout(constraints: Constraints) -> tuple[dict[Value, Blocks], Parents, Fusions]:
    """Blocks of all values and parents of all atoms, with neighbours that always go together fused."""
    fusions: Fusions = {}
    while True:
        blocks = {value: Blocks(value, number, fusions) for number, value in enumerate(constraints.values)}
        parents, grown = settle(parents_of(constraints, blocks), blocks, fusions)
        if len(grown) == len(fusions):
            return blocks, parents, fusions
        fusions = grown


def _report(constraints: Constraints) -> tuple[tuple[tuple[str, int, str], ...], tuple[str, ...]]:
    """What stayed rigid: with a full explanation, and without."""
    rigid: list[tuple[str, int, str]] = []
    doubts: dict[Reason, list[str]] = {}
    for value in constraints.states.values():
        for axis, term in enumerate(value.axes):
            for reason in dict.fromkeys(atom.rigid for atom in atoms(resolve(term)) if atom.rigid is not None):
                if reason.explained:
                    rigid.append((value.state_name, axis, reason.text))
                else:
                    doubts.setdefault(reason, []).append(f"{value.state_name}[{axis}]")
    sentences = [f"{', '.join(dict.fromkeys(axes))}: {reason.text}{_path(reason)}" for reason, axes in doubts.items()]
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
