"""Proof by evaluation: f(g.w, x) against f(w, x) in float64, for random elements g.

The difference d(g, w, x) = f(g.w, x) - f(w, x) is piecewise analytic in weights, inputs and scales. If it is not zero
everywhere on a piece, it vanishes there on a set of measure zero only, so one draw from a continuous distribution shows
it with probability one. That argument needs four precautions:

* Weights and inputs are made generic: ones, zeros and equal entries, as layers are initialised, would hide errors.
  Constants of the model (frozen parameters, masks) keep their values, since the claim is about these.
* Orders and signs are discrete, so probability does not help: elements are chosen such that whatever may move does, and
  no two things always move together (`moving_elements`).
* Everything is kept in float64, whatever the model casts to: a symmetry then shows an error of
  rounding size, far below `TOLERANCE`, and nothing else does.
* The function that is trained counts, so training mode is evaluated too. Noise would differ between f(w) and f(g.w),
  and is replaced by constants, at three levels, because at one value a wrong freedom may cancel (`NOISES`).

Cost: the unmoved network once for each experiment, and the moved one once for each element and experiment: with three
elements 7 forward passes for a deterministic model, 18 for one with dropout. Only if the elements of the whole group
fail is every space and freedom tried by itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from onebasin.errors import InputError, SymmetryError
from onebasin.functional import (
    AnyInputs,
    Inputs,
    Inventory,
    OutputPart,
    call_arguments,
    few_of,
    global_seed,
    nothing_remembered,
    select_output,
)
from onebasin.reporting import (
    Axis,
    Column,
    Number,
    Record,
    Result,
    Rule,
    Series,
    Table,
    largest_first,
    one_panel,
    result_record,
)
from onebasin.state import State, state_of
from onebasin.symmetry.group import Symmetry, require_symmetry
from onebasin.symmetry.space import FREEDOMS, Element
from onebasin.symmetry.trace import shared_memory
from onebasin.symmetry.unmoved import with_noise

TOLERANCE = 1e-9
DRAWS = 3  # elements of a proof; see `moving_elements`
RANDOM = {f"aten::{name}" for name in ("rand", "rand_like", "uniform_", "randn", "randn_like", "normal", "normal_")}
# What a random number, and the outcome of a coin (None: its odds), are replaced by in training mode. At one value alone
# a wrong freedom may cancel: the constant of an alpha dropout is zero on average, `rand < p` always takes one side.
NOISES: tuple[tuple[float, float | None], ...] = ((0.7, None), (0.05, 0.0), (0.95, 1.0))
# Of batch norms in training mode: far below any variance; or above rounding, where a channel does not vary otherwise.
EPSILONS = (1e-30, 1e-12)


@dataclass(frozen=True)
class Row:
    """One experiment: the freedom of a space that was used, and the relative error of the outputs."""

    space: str
    freedom: str
    error: float
    passed: bool


@dataclass(frozen=True, repr=False)
class Proof(Result):
    """Result of `verify`: one row per space and freedom, and a last one for elements of the whole group.

    `notes` are sentences about what could not be tried.
    """

    rows: tuple[Row, ...]
    tolerance: float
    notes: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """Largest relative error."""
        return max((row.error for row in self.rows), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether every row is within the tolerance."""
        return all(row.passed for row in self.rows)

    def record(self) -> Record:
        """A row per space and freedom, and the errors beside the tolerance."""
        verdict = "the function is unchanged" if self.passed else "THE FUNCTION CHANGES"
        numbers = f"largest relative error {self.max_error:.1e}, tolerance {self.tolerance:.0e}, float64"
        text = f"{verdict}: {numbers}"
        rows = largest_first(self.rows, lambda row: row.error)
        table = Table(
            "rows",
            "What each freedom does to the outputs",
            (
                Column("space"),
                Column("freedom"),
                Column("relative error", "of the outputs", "lower"),
                Column("verdict"),
            ),
            tuple((r.space, r.freedom, Number(r.error), "passed" if r.passed else "FAILED") for r in rows),
            rivals=False,
        )
        shown = largest_first(self.rows, lambda row: row.error, _BARS)[:_BARS]
        figure = one_panel(
            "errors",
            "How much do the outputs change?",
            f"{text}. An error of 0 is drawn at {_LEAST:.0e}."
            + (f" The {_BARS} largest of {len(rows):,}." if len(rows) > _BARS else ""),
            "bars",
            Axis("", names=tuple(f"{row.space}, {row.freedom}" for row in shown)),
            Axis("relative error of the outputs", "log"),
            series=(Series("", tuple(map(float, range(len(shown)))), tuple(max(row.error, _LEAST) for row in shown)),),
            rules=(Rule("tolerance", self.tolerance),),
        )
        values: dict[str, Any] = {"passed": self.passed, "max_error": self.max_error, "tolerance": self.tolerance}
        values["rows"] = [asdict(row) for row in self.rows]
        values["notes"] = self.notes
        items = (table, figure) if self.rows else (table,)
        return result_record("proof", "Proof of a symmetry by evaluation", (text, *self.notes), items, values=values)


_BARS, _LEAST = 20, 1e-17  # rows of a figure, and the error at which one of 0 is drawn

Training = bool | Inputs | None
"""Whether a proof also covers training mode: None where the call can be made, True always, False not; or its inputs."""


def verify(
    model: nn.Module,
    symmetry: Symmetry,
    inputs: AnyInputs,
    *,
    output: OutputPart = None,
    spaces: Collection[str] | None = None,
    training: Training = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
) -> Proof:
    """Prove a symmetry by evaluation, one row per space and freedom.

    Args:
        model: the module; evaluated in float64, in evaluation and in training mode, and left as it was.
        symmetry: found by `discover` or written by hand.
        inputs: as for `discover`.
        output: as for `discover`.
        spaces: names of the spaces to try; all of them, and elements of the whole group, if not given.
        training: as for `discover`.
        seed: seeds elements, weights and inputs of the experiment.
        tolerance: largest |f(g.w, x) - f(w, x)| relative to the largest |f(w, x)|.

    Raises:
        InputError: `training` asks for a call in training mode that the model refuses.
    """
    model = select_output(model, output)
    require_symmetry(symmetry)
    inputs = few_of(inputs, model)
    if training is not None and not isinstance(training, bool):
        training = few_of(training, model)
    rows = []
    with nothing_remembered(model, call_arguments(inputs)):
        bench = _Bench(model, symmetry, inputs, seed, training)
        for space in symmetry.spaces:
            for freedom in space.freedoms if spaces is None or space.name in spaces else ():
                error = max(bench.errors(symmetry, (space.name,), (freedom,)))
                rows.append(Row(space.name, freedom, error, error <= tolerance))
        if spaces is None:
            error = max(bench.errors(symmetry))
            rows.append(Row("all", "everything", error, error <= tolerance))
    return Proof(tuple(rows), tolerance, tuple(bench.notes))


def proven(
    model: nn.Module,
    symmetry: Symmetry,
    inputs: Inputs,
    *,
    training: Training = None,
    seed: int = 0,
    tolerance: float = TOLERANCE,
    brief: bool = False,
    reason: str = "the proof by evaluation failed, so the analysis missed something (please report the model)",
) -> Symmetry:
    """The part of a symmetry that holds, in evaluation and in training mode: with the same `spaces` if all of it does.

    Elements of the whole group are tried first: if they leave the function alone, so does each of their parts, save
    for cancellations of probability zero. Only if they fail is every space and freedom tried on its own, and what
    fails removed.

    With `brief` one element is tried at one input, for further examples beside one that is proved in full; `reason`
    says why a freedom was removed.
    """
    if not symmetry.spaces:
        return symmetry
    bench = _Bench(model, symmetry, inputs, seed, training, brief)
    if bench.notes and not brief:
        symmetry = replace(symmetry, unexplained=(*symmetry.unexplained, *bench.notes))
    # The whole group first: three elements instead of three for every space and freedom.
    if max(bench.errors(symmetry, draws=1 if brief else DRAWS)) <= tolerance:
        return symmetry
    removed: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
    for space in symmetry.spaces:
        for freedom in space.freedoms:
            evaluation, trained = bench.errors(symmetry, (space.name,), (freedom,))
            if max(evaluation, trained) > tolerance:
                removed[evaluation <= tolerance].setdefault(space.name, []).append(freedom)
    proved = symmetry.without(removed[0], reason)
    proved = proved.without(
        removed[1],
        "it keeps the function in evaluation mode, but not in training mode, so it is no symmetry of what is trained "
        "(training=False looks at evaluation alone)",
    )
    if proved.spaces and max(bench.errors(proved)) > tolerance:
        everything = {space.name: space.freedoms for space in proved.spaces}
        proved = proved.without(
            everything, "its freedoms pass the proof one by one but not together (please report the model)"
        )
    return proved


def moving_elements(
    symmetry: Symmetry,
    generator: torch.Generator,
    spaces: Collection[str] | None = None,
    freedoms: Collection[str] = FREEDOMS,
) -> list[Element]:
    """`DRAWS` random elements for a proof, in which whatever may move does.

    Orders are cycles through all units, so that no unit stays where it is. Two units have one such cycle only, so
    where a space of two units has several copies, each draw turns some of them: every copy in some draw, and no two
    of the first copies in the same draws. Signs likewise: each unit is flipped in some draw, and of up to
    2^DRAWS - 1 units no two are flipped in the same draws, since a product of two would hide that. All else is
    drawn as in `Symmetry.random`.
    """
    drawn = [symmetry.random(generator, spaces=spaces, freedoms=freedoms) for _ in range(DRAWS)]
    for space in symmetry.spaces:
        if spaces is not None and space.name not in spaces:
            continue
        if space.permutable and "permutation" in freedoms:
            turned = _codes(space.copies, generator) if space.size == 2 else torch.ones(DRAWS, space.copies) == 1
            for element, mask in zip(drawn, turned, strict=True):
                rows = element.orders[space.name].view(-1, space.size)
                for copy, moves in enumerate(mask.tolist()):
                    # A random order of the units, read as a cycle: each goes to the place of its predecessor.
                    cycle = rows[copy].clone()
                    rows[copy] = torch.arange(space.size)
                    if moves:
                        rows[copy, cycle] = cycle.roll(1)
        for number, kind in enumerate(space.generators):
            if kind.endswith("sign") and kind in freedoms:
                flipped = _codes(space.copies * space.size, generator)
                for element, mask in zip(drawn, flipped, strict=True):
                    factors = element.factors[space.name][number]
                    factors.copy_(torch.where(mask, -1.0, 1.0).reshape(factors.shape))
    return drawn


def _codes(count: int, generator: torch.Generator) -> Tensor:
    """In which draws each of `count` things moves, (DRAWS, count) bool: each in some, the first ones in others each."""
    most = (1 << DRAWS) - 1
    order = torch.randperm(most, generator=generator, device=generator.device).cpu()
    spare = torch.randint(most, (count,), generator=generator, device=generator.device).cpu()
    codes = 1 + torch.cat([order, spare])[:count]
    return torch.stack([(codes >> draw) % 2 == 1 for draw in range(DRAWS)])


@dataclass(frozen=True)
class _Experiment:
    """One call, in evaluation or training mode, and what it gives at the weights that are not moved."""

    training: bool
    call: Any
    values: list[Tensor]
    noise: tuple[float, float | None] = NOISES[0]


class _Bench:
    """Generic weights and inputs, and the function's values there."""

    def __init__(
        self,
        model: nn.Module,
        symmetry: Symmetry,
        inputs: Inputs,
        seed: int,
        training: Training,
        brief: bool = False,
    ) -> None:
        self.model, self.inventory = model, Inventory(model)
        self.generator = torch.Generator().manual_seed(seed)
        self.notes: list[str] = []
        variances = {leg.tensor for space in symmetry.spaces for leg in space.legs if leg.shift}
        self.state = {
            name: _widened(tensor) if name in symmetry.frozen else self._generic(tensor, name in variances)
            for name, tensor in state_of(model).items()
        }
        for name, first in shared_memory(model)[0].items():
            if name in self.state:
                self.state[name] = self.state[first]
        given = _wide(call_arguments(inputs))
        fresh, values = self._fresh(given)
        self.experiments = [_Experiment(False, fresh, values)]
        if fresh is not given and not brief:
            self.experiments.append(_Experiment(False, given, self._outputs(given)))
        if not any(_finite(experiment.values) for experiment in self.experiments):
            raise SymmetryError(
                "the model returns no finite number for the example input, so nothing can be proved; give other inputs."
            )
        self._add_training(fresh, training)

    def _generic(self, tensor: Tensor, positive: bool) -> Tensor:
        """A tensor without special values: positive ones stay positive, others get noise of their own size."""
        if not tensor.is_floating_point():
            return tensor.detach().clone()
        wide = tensor.detach().double()
        if wide.layout != torch.strided:
            return wide  # a sparse matrix is data: which entries it has is no accident
        noise = torch.randn(wide.shape, generator=self.generator, dtype=torch.float64).to(wide.device)
        if positive or (wide.numel() and bool((wide > 0).all())):
            return wide.clamp_min(0.1) * torch.exp(0.3 * noise)
        fan_in = math.prod(wide.shape[1:]) if wide.dim() > 1 else 4
        return wide + noise * 0.5 / math.sqrt(max(fan_in, 1))

    def _fresh(self, given: Any) -> tuple[Any, list[Tensor]]:
        """Inputs without special values, and the outputs there.

        Floating-point inputs get noise: a zero would hide errors. Integers and booleans are drawn anew, because a mask
        of ones or two features that are equal in the example are no constants of the model: between the smallest and
        the largest of the example, 0 and 1 included; if the model refuses that, without 0 and 1; if it refuses that
        too, the entries of the example are shuffled; else they stay, and a note says so.
        """
        leaves, rebuild = tree_flatten(with_noise(given, self.generator))
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.is_floating_point() or leaf.is_complex() or not leaf.numel():
                continue
            for redraw in (self._from_zero, self._in_range, self._shuffled):
                leaves[place] = redraw(leaf)
                if torch.equal(leaves[place], leaf):
                    continue
                with contextlib.suppress(Exception):
                    if _finite(self._outputs(tree_unflatten(leaves, rebuild))):
                        break
            else:
                leaves[place] = leaf
                kind = str(leaf.dtype).removeprefix("torch.")
                self.notes.append(
                    f"input {place}, {kind} of shape {tuple(leaf.shape)}, was kept as given for the proof, because the "
                    "model could not be called with other numbers: what holds for these alone would not be noticed"
                )
        if all(new is old for new, old in zip(leaves, tree_leaves(given), strict=True)):
            return given, self._outputs(given)
        fresh = tree_unflatten(leaves, rebuild)
        return fresh, self._outputs(fresh)

    def _between(self, value: Tensor, low: int, high: int) -> Tensor:
        drawn = torch.randint(low, high + 1, value.shape, generator=self.generator)
        return drawn.to(device=value.device, dtype=value.dtype)

    def _from_zero(self, value: Tensor) -> Tensor:
        return self._between(value, min(0, int(value.min())), max(1, int(value.max())))

    def _in_range(self, value: Tensor) -> Tensor:
        return self._between(value, int(value.min()), int(value.max()))

    def _shuffled(self, value: Tensor) -> Tensor:
        order = torch.randperm(value.numel(), generator=self.generator).to(value.device)
        return value.reshape(-1)[order].reshape(value.shape)

    def _add_training(self, fresh: Any, training: Training) -> None:
        """Add a call in training mode, if there can be one and it is not the same as that in evaluation mode."""
        if training is False:
            return
        asked = training is not None
        call = fresh
        if training is not None and training is not True:
            call = with_noise(_wide(call_arguments(training)), self.generator)
        calls = [call] if asked else [call, with_noise(call, self.generator, times=2)]
        reason = ""
        for call in calls:  # a batch of one has no batch statistics
            try:
                values = self._outputs(call, training=True)
            except Exception as error:
                reason = reason or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                continue
            if not _finite(values):
                reason = reason or "it returns no finite number"
            elif asked or self.random or not _same(values, self.experiments[0].values):
                self.experiments.append(_Experiment(True, call, values))
                for noise in NOISES[1:] if self.random else ():
                    self.experiments.append(
                        _Experiment(True, call, self._outputs(call, training=True, noise=noise), noise)
                    )
                return
            else:
                return
        if asked:
            raise InputError(
                f"{type(self.model).__name__} could not be called in training mode ({reason}); give the inputs of a "
                "training call as training=."
            )
        self.notes.append(
            f"training mode was not tried, because the model could not be called in it with these inputs ({reason}): "
            "give the inputs of a training call as training=, or training=False if evaluation is all that counts"
        )

    def _outputs(
        self,
        call: Any,
        state: Mapping[str, Tensor] | None = None,
        training: bool = False,
        epsilon: float = EPSILONS[0],
        noise: tuple[float, float | None] = NOISES[0],
    ) -> list[Tensor]:
        arguments, options = call
        state = self.state if state is None else state
        buffers = {name: _widened(buffer) for name, buffer in self.model.named_buffers()}
        # A forward pass may update buffers in place.
        updated = {name: state.get(name, buffer).clone() for name, buffer in buffers.items()}
        mode = self.inventory.training_mode() if training else self.inventory.evaluation_mode()
        with _same_conditions(), mode, torch.no_grad(), _Float64(training, epsilon, noise) as run:
            result = torch.func.functional_call(self.model, {**state, **updated}, arguments, options, tie_weights=False)
        self.random = run.random
        return [leaf.double() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]

    def errors(
        self,
        symmetry: Symmetry,
        spaces: tuple[str, ...] | None = None,
        freedoms: tuple[str, ...] = FREEDOMS,
        draws: int = DRAWS,
    ) -> tuple[float, float]:
        """Largest relative error over `draws` elements, inputs and outputs, in evaluation and in training mode.

        The inputs as given are tried with the first element only; a space of many units, whose random orders and
        factors leave no room for chance, with one element.
        """
        elements = moving_elements(symmetry, self.generator, spaces, freedoms)[:draws]
        if spaces is not None and not freedoms[0].endswith("sign") and symmetry[spaces[0]].size > 3:
            elements = elements[:1]
        worst = [0.0, 0.0]
        for number, element in enumerate(elements):
            moved: State = symmetry.apply(element, self.state)
            for place, experiment in enumerate(self.experiments):
                if number and place and not experiment.training:
                    continue
                error = self._error(experiment, moved)
                worst[experiment.training] = max(worst[experiment.training], error)
        return worst[0], worst[1]

    def _error(self, experiment: _Experiment, moved: State) -> float:
        """Largest relative error of a call's outputs; in training mode with the epsilon that rounds less."""
        call, training, noise = experiment.call, experiment.training, experiment.noise
        error = _largest(experiment.values, self._outputs(call, moved, training, noise=noise))
        # A norm in training mode divides by the deviation of the batch, where a channel that hardly varies is rounding
        # noise over a tiny epsilon. With a larger epsilon a true symmetry has a small error; a wrong one has not.
        if training and error > TOLERANCE:
            before, after = (self._outputs(call, state, True, EPSILONS[1], noise) for state in (self.state, moved))
            error = min(error, _largest(before, after))
        return error


def _wide(call: Any) -> Any:
    return tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, call)


def _finite(values: list[Tensor]) -> bool:
    return any(bool(torch.isfinite(value).any()) for value in values)


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _largest(before: list[Tensor], after: list[Tensor]) -> float:
    return max((_relative_error(one, other) for one, other in zip(before, after, strict=True)), default=0.0)


def _relative_error(before: Tensor, after: Tensor) -> float:
    finite = torch.isfinite(before)
    if not torch.equal(finite, torch.isfinite(after)):
        return math.inf
    if not bool(finite.any()):
        return 0.0
    scale = before[finite].abs().max().clamp_min(1e-300)
    return float((after[finite] - before[finite]).abs().max() / scale)


@contextmanager
def _same_conditions() -> Iterator[None]:
    """Float64 by default, and the same random numbers at every evaluation; the user's settings come back afterwards."""
    dtype = torch.get_default_dtype()
    with global_seed(0):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


class _Float64(TorchDispatchMode):
    """Keep every floating-point tensor in float64, whatever dtype the model asks for.

    In training mode the units of a layer have noise of their own, so that a moved network gives the same outputs in
    distribution only. Every random number is therefore replaced by one constant: dropout by its mean, which leaves all
    as it is, other noise by one of `NOISES`. And batch norms divide by the deviation of the batch alone: their epsilon
    is no part of the claim, as scales of what they read change the function there by about epsilon / variance.
    """

    def __init__(self, training: bool, epsilon: float, noise: tuple[float, float | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.training, self.epsilon, self.noise = training, epsilon, noise
        self.random = False  # whether a random number was replaced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widen arguments and requested dtypes."""
        args = [_widened(value) for value in args]
        kwargs = {key: _widened(value) for key, value in kwargs.items()} if kwargs else {}
        if not self.training:
            return func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        norm = name in ("aten::native_batch_norm", "aten::_native_batch_norm_legit")
        if norm and isinstance(args[-1], float) and any(value is True for value in args):  # of the batch itself
            args[-1] = min(args[-1], self.epsilon)
        result = func(*args, **kwargs)
        if name in ("aten::bernoulli", "aten::bernoulli_"):
            self.random = True
            if self.noise[1] is not None:
                return result.fill_(self.noise[1])
            odds = args[1] if len(args) > 1 else kwargs.get("p", args[0] if name == "aten::bernoulli" else 0.5)
            return result.copy_(odds) if isinstance(odds, Tensor) else result.fill_(odds)
        if name not in RANDOM:
            return result
        self.random = True
        return result.fill_(self.noise[0])


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() and value.dtype is not torch.float64 else value
    if isinstance(value, tuple | list):
        return type(value)(_widened(item) for item in value)
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value
