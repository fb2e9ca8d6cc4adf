"""A run as a value: what is sampled, how, and with which seed; enough to do it here, elsewhere, or again."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebasin.cluster import Places
from onebasin.errors import InputError
from onebasin.inference.density.compiling import has_compiler
from onebasin.inference.density.network import Data, Density, target_of
from onebasin.inference.density.target import Target
from onebasin.inference.kernel import Plan
from onebasin.inference.runs.loop import work
from onebasin.inference.runs.start import Given, fresh, unreset
from onebasin.inference.runs.units import Unit, lanes_for, units
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.population.tensor_file import bytes_of
from onebasin.state import state_of

# Each method and the file that plans it.
METHODS = {
    "hmc": "hmc",
    "sghmc": "sgmcmc",
    "mclmc": "microcanonical",
    "ensemble": "ensemble",
    "vi": "variational",
    "swag": "swag",
    "laplace": "laplace",
    "dropout": "dropout",
}
_WORTH_COMPILING = 1000  # gradients in a run from which compiling, some seconds, pays
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}
_LARGE = 50_000  # weights from which one network keeps several threads busy


class Execution(Places, total=False):
    """How a run is carried out.

    Attributes:
        start: "fresh" networks, the "model" itself, or a Population.
        workers: processes; draws do not depend on their number. On a cluster, units worked on at once.
        cluster: "local" to start Ray on this machine, the address of a Ray cluster to join, or a `Cluster` that is
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

    def plan(self, target: Target) -> Plan:
        """What the method does."""
        plan: Plan = module_of(self.method).build(target, **self.options)
        return plan

    def units(self, chunk: int | None = None) -> list[Unit]:
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
    refuse_unknown(options, {*Density.__annotations__, *Execution.__annotations__, *own}, f"method {method}")
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
