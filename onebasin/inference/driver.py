"""Progress of a run in one line: what is done, how the sampler fares, how fast it is."""

from __future__ import annotations

import hashlib
import importlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from onebasin.errors import InputError, check_options
from onebasin.inference.compile import has_compiler
from onebasin.inference.convergence import Tail
from onebasin.inference.journal import ChainBatch, Journal, RunPlace, Written, lanes_for, leaves, units
from onebasin.inference.kernel import ChainPlan, Draws, Info, StepIndex
from onebasin.inference.layout import ParameterLayout
from onebasin.inference.seeds import Streams
from onebasin.inference.start import Given, fresh, unreset
from onebasin.inference.target import Data, Density, Target, target_of
from onebasin.parallel import ExecutionOptions
from onebasin.population import Population, member_bytes
from onebasin.state import check_state, spec_of, state_of
from onebasin.storage import bytes_of

# ----------------------------------------------------------------------
# Finished draws on their way to the journal.


_SECONDS = 2.0  # what a killed process may have to repeat, as between two checkpoints ...
_SHARE = 0.02  # ... or this share of its time so far, so that a long run does not end in thousands of files ...
_LONGEST = 120.0  # ... but no longer than this,
BYTES = 64 << 20  # and never more than this


@dataclass(eq=False)
class Pending:
    """Collects draws of a unit, and writes them together.

    Attributes:
        unit: whose draws.
        layout: how positions become networks.
        journal: where they go.
        first: number of the draw that comes first; a resumed run may repeat some that are kept already.
    """

    unit: ChainBatch
    layout: ParameterLayout
    journal: Journal
    first: int
    _networks: list[Draws] = field(default_factory=list)
    _infos: list[Info] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.finished = self.journal.finished(self.unit)
        self._repeated = self.finished - self.first
        self._began = self._written = time.monotonic()

    def add(self, networks: Draws, infos: list[Info]) -> None:
        """Take one draw, with the Info of the steps before it."""
        if self._repeated > 0:
            self._repeated -= 1
            return
        self._networks.append(networks)
        self._infos += infos

    def due(self) -> bool:
        """Whether it is time to write."""
        waited, all_in_all = time.monotonic() - self._written, time.monotonic() - self._began
        size = sum(one.position.nbytes for one in self._networks)
        return waited > max(_SECONDS, min(_LONGEST, _SHARE * all_in_all)) or size > BYTES

    def flush(self) -> None:
        """Write what is there."""
        if self._networks:
            self.journal.write(self.unit, self._together())
            self.finished += len(self._networks)
        self._networks, self._infos, self._written = [], [], time.monotonic()

    def _together(self) -> Written:
        """Whole networks of the kept chains, ordered by chain, then by draw."""
        networks, infos, keep = self._networks, self._infos, self.unit.rows
        position = torch.stack([one.position[keep] for one in networks], dim=1).flatten(0, 1)
        rest = {
            name: torch.stack([one.rest[name][keep] for one in networks], dim=1).flatten(0, 1)
            for name in networks[0].rest
        }
        density = torch.stack([one.log_density[keep] for one in networks], dim=1).flatten()
        tensors = {name: value.cpu() for name, value in self.layout.networks(position, rest).items()}
        chain = torch.tensor(list(self.unit.keep)).repeat_interleave(len(networks))
        names = dict.fromkeys(name for one in infos for name in one)
        none = torch.full_like(networks[0].log_density, float("nan"))
        info = {name: torch.stack([one.get(name, none).double()[keep] for one in infos], dim=1).cpu() for name in names}
        return Written(tensors, chain, density.cpu(), info)


# ----------------------------------------------------------------------
# The loop: stages in turn, block by block, then draws. Everything in between is a place where a run can be cont


BLOCK = 20  # steps with one set of random streams
_CHECKPOINT_SECONDS = 2.0

Tell = Callable[[ChainBatch, "Progress"], None]


@dataclass(frozen=True)
class Progress:
    """How far one unit is.

    Attributes:
        done: gradients of one chain so far, out of `total`.
        total: gradients of one chain in the whole run.
        stage: what is being done.
        draws: draws of each chain that are safely kept.
        chains: chains of the unit.
        divergences: of these chains so far, since the process has begun.
        info: the latest Info, averaged over chains and the last block.
    """

    done: int
    total: int
    stage: str
    draws: int
    chains: int
    divergences: int
    info: Mapping[str, float]


@dataclass(eq=False)
class UnitRun:
    """Runs one unit of chains through a plan.

    Attributes:
        plan: what to do.
        layout: how positions become networks.
        seed: of the run.
        tell: receives the progress after each block.
        heed: is called after each step, and raises to end the run.
    """

    plan: ChainPlan
    layout: ParameterLayout
    seed: int
    tell: Tell | None = None
    heed: Callable[[], None] | None = None
    _written: float = field(default_factory=time.monotonic)
    _finished: int = 0  # draws that are kept, and divergences so far: for those who watch
    _divergences: int = 0

    def __call__(self, unit: ChainBatch, start: Callable[[], Draws], journal: Journal) -> RunPlace:
        """Run until all draws are made; returns the last place."""
        kernels = [stage.kernel for stage in self.plan.stages]
        place = journal.place(unit, kernels)
        if place is None:
            state = kernels[0].init(start(), self._streams(unit, 0, "init"))
            place = RunPlace(0, 0, 0, state)
        else:
            fresh = kernels[place.stage].init(start(), self._streams(unit, place.stage, "init"))
            found, expected = (dict(leaves(state)) for state in (place.state, fresh))
            check_state(found, spec_of(expected), where=f"the checkpoint of {unit.name}")
        place = self._stages(unit, place, journal)
        return self._draws(unit, place, journal)

    def _stages(self, unit: ChainBatch, place: RunPlace, journal: Journal) -> RunPlace:
        """Everything before the first draw."""
        stages = self.plan.stages
        while True:
            stage = stages[place.stage]
            tail = Tail.of(stage) if stage.optimum and stage.steps and not place.draw else None
            while place.step < stage.steps and not place.draw:
                place, infos = self._block(unit, place, min(BLOCK, stage.steps - place.step))
                if tail is not None:
                    losses = tail.added(place.losses, place.step - len(infos), infos)
                    place = replace(place, losses=losses)
                self._checkpoint(unit, place, journal)
            if tail is not None and place.losses is not None:
                kernel: Any = stage.kernel  # see `Stage.optimum`
                place = replace(place, losses=None, ended={**tail.trend(place.losses), **kernel.ending(place.state)})
            if place.stage + 1 == len(stages):
                return place
            ended = stage.kernel.draw(place.state, self._streams(unit, place.stage, "end"))
            following = stages[place.stage + 1].kernel
            state = following.init(ended, self._streams(unit, place.stage + 1, "init"))
            place = RunPlace(place.stage + 1, 0, 0, state, ended=place.ended)
            self._checkpoint(unit, place, journal)

    def _draws(self, unit: ChainBatch, place: RunPlace, journal: Journal) -> RunPlace:
        """All draws, written every now and then, and at once when the run is interrupted."""
        kernel = self.plan.stages[-1].kernel
        pending = Pending(unit, self.layout, journal, place.draw)
        try:
            while place.draw < self.plan.draws:
                infos = self._fit_info(place)
                left = self.plan.thin[place.draw % len(self.plan.thin)]
                while left:
                    place, found = self._block(unit, place, min(BLOCK, left))
                    infos += found
                    left -= min(BLOCK, left)
                drawn = kernel.draw(place.state, self._streams(unit, place.stage, f"draw {place.draw}"))
                place = replace(place, draw=place.draw + 1)
                pending.add(drawn, infos)
                if pending.due():
                    pending.flush()
                    self._checkpoint(unit, place, journal)
                self._finished = pending.finished
        finally:
            pending.flush()
        journal.remember(unit, place)
        self._finished = pending.finished
        self._report(unit, place, [])
        return place

    def _fit_info(self, place: RunPlace) -> list[Info]:
        """What is known of the training, and what a kernel that fits a density has to say about the fit, once."""
        tell = getattr(self.plan.stages[-1].kernel, "summary", None)
        found = {} if place.draw else {**place.ended, **({} if tell is None else tell(place.state))}
        return [found] if found else []

    def _block(self, unit: ChainBatch, place: RunPlace, steps: int) -> tuple[RunPlace, list[Info]]:
        """A few steps with one set of streams, named after the stage and the number of its first step."""
        stage = self.plan.stages[place.stage]
        streams = self._streams(unit, place.stage, f"step {place.step}")
        state, infos = place.state, []
        for step in range(place.step, place.step + steps):
            state, info = stage.kernel.step(state, StepIndex(step, stage.steps), streams)
            infos.append(info)
            if self.heed is not None:
                self.heed()
        place = replace(place, step=place.step + steps, state=state)
        self._report(unit, place, infos)
        return place, infos

    def _checkpoint(self, unit: ChainBatch, place: RunPlace, journal: Journal) -> None:
        """Remember the place from time to time; what lies between would be computed again."""
        if time.monotonic() - self._written > _CHECKPOINT_SECONDS:
            journal.remember(unit, place)
            self._written = time.monotonic()

    def _streams(self, unit: ChainBatch, stage: int, block: str) -> Streams:
        return Streams(self.seed, unit.window, f"{self.plan.stages[stage].name} {stage} {block}")

    def _report(self, unit: ChainBatch, place: RunPlace, infos: list[Info]) -> None:
        if self.tell is None:
            return
        self._divergences += sum(int(one["divergent"][unit.rows].sum()) for one in infos if "divergent" in one)
        done, total = work_done(self.plan, place), work(self.plan)
        names = infos[0] if infos else {}
        means = {name: float(torch.stack([one[name].double() for one in infos]).mean()) for name in names}
        stage = self.plan.stages[place.stage]
        last = place.stage + 1 == len(self.plan.stages)
        doing = "drawing" if last and place.step >= stage.steps else stage.name
        kept, chains = self._finished, len(unit.keep)
        self.tell(unit, Progress(done, total, doing, kept, chains, self._divergences, means))


def work(plan: ChainPlan) -> int:
    """Gradients of one chain in the whole run."""
    before = [stage.steps for stage in plan.stages[:-1]]
    rounds, part = divmod(plan.draws, len(plan.thin))
    steps = plan.stages[-1].steps + rounds * sum(plan.thin) + sum(plan.thin[:part])
    return sum(before) + steps * plan.gradients


def work_done(plan: ChainPlan, place: RunPlace) -> int:
    """Gradients of one chain so far."""
    before = sum(stage.steps for stage in plan.stages[: place.stage])
    return before + place.step * (plan.gradients if place.stage + 1 == len(plan.stages) else 1)


# ----------------------------------------------------------------------
# A run as a value: what is sampled, how, and with which seed; enough to do it here, elsewhere, or again.


# Each method and the file that plans it.
METHODS = {
    "hmc": "hmc",
    "sghmc": "sghmc",
    "mclmc": "mclmc",
    "ensemble": "ensemble",
    "vi": "vi",
    "swag": "swag",
    "laplace": "laplace",
    "dropout": "dropout",
}
_WORTH_COMPILING = 1000  # gradients in a run from which compiling, some seconds, pays
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}
_LARGE = 50_000  # weights from which one network keeps several threads busy


class Execution(ExecutionOptions, total=False):
    """How a run is carried out.

    Attributes:
        start: "fresh" networks, the "model" itself, or a Population.
        workers: processes; draws do not depend on their number. On a cluster, units worked on at once.
        executor: "local" to start Ray on this machine, the address of a Ray cluster to join, or a `Executor` that is
            open already. All its machines must see the folder of the run.
        memory: bytes that this process and its workers may take in all, as a number or as "2GB"; fewer workers are
            used where that is not enough for all.
        chunk: chains in one unit of work; draws do not depend on it. By default all chains that are computed together.
        lanes: chains that are computed together, which decides about rounding; by default at most 8.
        threads: of torch in each process, which may decide about rounding too; by default 1 for small networks.
    """

    start: Given
    chunk: int | None
    lanes: int | None
    threads: int | None


@dataclass(frozen=True, eq=False)
class Job:
    """Everything that decides about the draws.

    Attributes:
        model: the architecture.
        data: inputs and targets.
        method: one of `METHODS`.
        density: options of the posterior.
        options: options of the method.
        modes: number of chains: independent runs that are pooled.
        seed: of everything random.
        start: where chains begin.
        lanes: chains that are computed together.
        threads: of torch.
        compile: whether gradients are compiled.
        likelihood: the name of the likelihood, for those who read draws.
        thin: steps between draws, which options may make depend on the number of draws.
        open: which of lanes, threads and compile the user left open; a resumed run takes those that it had.
    """

    model: nn.Module
    data: Data
    method: str
    density: Density
    options: Mapping[str, Any]
    modes: int
    seed: int
    start: Given
    lanes: int
    threads: int
    compile: bool
    likelihood: str = ""
    thin: tuple[int, ...] = ()
    open: tuple[str, ...] = ()

    def target(self) -> Target:
        """The posterior."""
        density = cast(Density, {**self.density, "compile": self.compile})
        return target_of(self.model, self.data, **density)

    def plan(self, target: Target) -> ChainPlan:
        """What the method does."""
        plan: ChainPlan = module_of(self.method).build(target, **self.options)
        return plan

    def units(self, chunk: int | None = None) -> list[ChainBatch]:
        """The units of work."""
        return units(self.modes, self.lanes, chunk)

    def definition(self) -> dict[str, Any]:
        """What decides about the draws, as JSON; two runs with the same definition draw the same."""
        inputs = [leaf for leaf in tree_leaves(self.data) if isinstance(leaf, Tensor)]
        shapes = {name: list(value.shape) for name, value in state_of(self.model).items()}
        sampled = [name for name, value in self.model.named_parameters() if value.requires_grad]
        return {
            "method": self.method,
            "modes": self.modes,
            "seed": self.seed,
            "options": {name: _told(value) for name, value in sorted(self.options.items())},
            "density": {name: _told(value) for name, value in sorted(self.density.items())},
            "likelihood": self.likelihood,
            "start": _told(self.start),
            "lanes": self.lanes,
            "threads": self.threads,
            "compile": self.compile,
            "thin": list(self.thin),
            "architecture": _digest([], repr((self.model, shapes, sampled))),
            "weights": _digest(self._given()),
            "data": _digest(inputs),
            "torch": torch.__version__,
        }

    def _given(self) -> list[Tensor]:
        """The tensors of the model that decide about draws: all, or those that fresh networks take over from it."""
        if self.start == "model":
            return list(state_of(self.model).values())
        first, second = (fresh(self.model, self.seed, chain) for chain in (0, 1))
        kept = [value for name, value in first.items() if torch.equal(value, second[name])]
        hidden = [value for name, value in self.model.named_buffers() if name not in first]  # outside of the state dict
        # Parameters that no module resets are drawn with the mean and spread that they have.
        return [*kept, *hidden, *unreset(self.model)]


def module_of(method: str) -> Any:
    """The file of a method, with its `Options` and `build`."""
    return importlib.import_module(f"onebasin.inference.methods.{METHODS[method]}")


def job_of(
    model: nn.Module, data: Data, method: str, options: Mapping[str, Any], *, modes: int = 1, seed: int = 0
) -> tuple[Job, Execution]:
    """Sort options by who reads them, and decide what they leave open."""
    if method not in METHODS:
        raise InputError(f"expected a method out of {', '.join(METHODS)}, found {method!r}: choose one of them")
    if not isinstance(modes, int) or modes < 1:
        raise InputError(f"expected modes to be a whole number from 1 on, found {modes!r}: give modes=1 for one run")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"expected a whole number as seed, found {seed!r}: give one such as 0")
    own = module_of(method).Options.__annotations__
    check_options(options, {*Density.__annotations__, *Execution.__annotations__, *own}, f"method {method}")
    for option, value in options.items():
        check_kind(method, option, value)
    chosen = {name: value for name, value in options.items() if name in own}
    density = cast(Density, {name: options[name] for name in Density.__annotations__ if name in options})
    execution = cast(Execution, {name: options[name] for name in Execution.__annotations__ if name in options})
    for name in ("workers", "lanes", "threads"):
        value = execution.get(name)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(
                f"expected {name} to be a whole number from 1 on, found {value!r}: leave it out, or give one"
            )
    weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
    job = Job(
        model=model,
        data=data,
        method=method,
        density=cast(Density, {name: value for name, value in density.items() if name != "compile"}),
        options=chosen,
        modes=modes,
        seed=seed,
        start=execution.get("start", "fresh"),
        lanes=execution.get("lanes") or lanes_for(modes, small=weights < _LARGE),
        threads=execution.get("threads") or (1 if weights < _LARGE else torch.get_num_threads()),
        compile=False,
    )
    target = job.target()
    plan, wanted = job.plan(target), density.get("compile")
    if wanted is None:
        wanted = work(plan) >= _WORTH_COMPILING
    left = tuple(name for name in ("lanes", "threads", "compile") if options.get(name) is None)
    name = getattr(target.likelihood, "__name__", "")
    return replace(job, compile=wanted and has_compiler(), likelihood=name, thin=plan.thin, open=left), execution


def check_kind(method: str, name: str, value: object) -> None:
    """Refuse a value of the wrong kind for an option, such as a word where a number is needed."""
    groups = (module_of(method).Options, Density, Execution)
    hints = {key: hint for group in groups for key, hint in get_type_hints(group).items()}
    if name not in hints or type(value) not in _KINDS:
        return
    kinds = {hints[name], *get_args(hints[name])} & _KINDS.keys()
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        wanted = " or ".join(word for kind, word in _KINDS.items() if kind in kinds)
        raise InputError(f"expected {wanted} for {name}, found {value!r}: give such a value")


def _digest(tensors: list[Tensor], text: str = "") -> str:
    """A short hash of tensors and a text."""
    found = hashlib.blake2b(text.encode(), digest_size=8)
    for tensor in tensors:
        found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        found.update(bytes_of(tensor.cpu().contiguous()))
    return found.hexdigest()


def _told(value: Any) -> Any:
    """A value of an option in JSON: functions by name, networks by their hash."""
    if isinstance(value, Population):
        return _digest([tensor for _, block in value.blocks() for tensor in block.values()])
    if isinstance(value, Mapping):
        return [[str(name), _told(entry)] for name, entry in value.items()]  # in this order: later patterns win
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


# ----------------------------------------------------------------------
# How much memory a run takes: estimates from above, for those who have to say how much there is.


_PASS = 6  # what a pass takes at its height, in what autograd keeps of it: slopes, and buffers of convolutions
_COPIES = 24  # of the position: gradient, momentum, masses, proposals, moments, and what passes by
_DEVIATIONS = 20  # of SWAG, unless options say otherwise
_EXAMPLES = 8  # enough to see what one of them takes


def unit_bytes(job: Job) -> int:
    """Bytes of work on one unit: data, the State of its chains, one pass, and draws that wait to be written."""
    target = job.target()
    weights = target.layout.size * target.layout.dtype.itemsize
    copies = _COPIES + int(job.options.get("rank", _DEVIATIONS if job.method == "swag" else 0))
    passes = int(job.options.get("samples", 1)) * min(target.examples, target.piece) * _saved(target)
    data = 3 * sum(leaf.nbytes for leaf in target.leaves)  # as they travel, as they arrive, and as they are used
    waiting = 3 * (BYTES + job.lanes * weights)  # one by one, joined, and cut into tensors
    return data + job.lanes * (copies * weights + _PASS * passes + _curvature(job, target)) + waiting


def kept_bytes(job: Job) -> int:
    """Bytes of all draws in memory, while the pieces are joined."""
    target = job.target()
    return 3 * job.modes * job.plan(target).draws * member_bytes(target.layout.spec)


def _saved(target: Target) -> int:
    """Bytes that autograd keeps of one example."""
    if not target.leaves:
        return 0
    many = min(_EXAMPLES, target.examples)
    few = many // 2
    return max(0, math.ceil((_saved_for(target, many) - _saved_for(target, few)) / (many - few)))


def _saved_for(target: Target, examples: int) -> int:
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layout = target.layout
    sampled = layout.split(torch.zeros(layout.size, dtype=layout.dtype, device=layout.device).requires_grad_())
    given = tree_unflatten([leaf[:examples].clone() for leaf in target.leaves], target.structure)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        values, _ = target.one(sampled, target.rest, given, False)
    del values
    return sum(found.values())


def _curvature(job: Job, target: Target) -> int:
    """Bytes of what the Laplace approximation knows of one chain, in float64 and decomposed."""
    if job.method != "laplace" or job.options.get("structure") == "diagonal":
        return 0
    if job.options.get("structure") == "full":
        return 4 * 8 * target.layout.size**2
    return sum(4 * 8 * (shape[0] ** 2 + (1 + math.prod(shape[1:])) ** 2) for shape in target.layout.shapes if shape)


# ----------------------------------------------------------------------
# Progress of a run in one line: what is done, how the sampler fares, how fast it is.


Show = Callable[[int, int, str], None]  # (gradients done, gradients in all, a sentence)
_SHOWN = {
    "acceptance": "acceptance {:.2f}",
    "step_size": "step {:.2g}",
    "kinetic_temperature": "kinetic T {:.2f}",
    "loss": "loss {:.4g}",
}


@dataclass(eq=False)
class Teller:
    """Adds up the progress of all units.

    Attributes:
        show: receives (gradients done, gradients in all, a sentence).
        units: how many there are.
    """

    show: Show
    units: int
    latest: dict[str, Progress] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    first: dict[str, int] = field(default_factory=dict)

    def __call__(self, unit: ChainBatch, progress: Progress) -> None:
        """Take news of one unit into account, and show."""
        before = self.latest.get(unit.name)
        self.first.setdefault(unit.name, progress.done if before is None else before.done)
        self.latest[unit.name] = progress
        chains = sum(one.chains for one in self.latest.values())
        done = sum(one.done for one in self.latest.values())
        fresh = sum((one.done - self.first[name]) * one.chains for name, one in self.latest.items())
        rate = fresh / max(1e-9, time.monotonic() - self.began)
        words = [progress.stage]
        if progress.draws:
            words.append(f"{sum(one.draws * one.chains for one in self.latest.values())} draws of {chains} chains")
        words += [text.format(progress.info[name]) for name, text in _SHOWN.items() if name in progress.info]
        words.append(f"{sum(one.divergences for one in self.latest.values())} divergences")
        words.append(f"{rate:,.0f} gradients/s")
        self.show(done, progress.total * self.units, ", ".join(words))


def teller(units: list[ChainBatch], show: Show | None) -> Tell | None:
    """What adds up the progress of units for `show`; None where nobody watches."""
    return None if show is None else Teller(show, len(units))
