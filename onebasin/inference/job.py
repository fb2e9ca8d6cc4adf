"""A run as a value: what is sampled, how, and with which seed; enough to do it here, in a worker, or again.

Chains are computed in windows of `chains_per_batch` neighbours, always all of a window: the same shapes give the same
rounding, whoever computes them. A batch keeps some chains of one window; smaller batches (`chunk`) mean that a window
is computed by several workers, each keeping its part. So draws depend neither on the number of workers nor on the size
of batches.
"""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, cast, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError, LikelihoodWarning, check_options
from onebasin.functional import Data, Likelihood, OutputPart, pair_of, select_output
from onebasin.inference.compile import has_compiler
from onebasin.inference.kernel import ChainPlan, Method, check_counts, check_kind
from onebasin.inference.methods import EMA, METHODS, MIMO, SWA, BatchEnsemble, Ensemble, Masksembles
from onebasin.inference.start import Start, fresh, unreset
from onebasin.inference.target import Target, target_of
from onebasin.population import Population
from onebasin.state import state_of
from onebasin.storage import bytes_of

CHAINS_PER_BATCH = 8  # chains in one vectorised pass; about what keeps activations of small networks in a core's cache
_WORTH_COMPILING = 1000  # gradients in a run from which compiling, some seconds, pays
_LARGE = 50_000  # weights from which one network keeps several threads busy


@dataclass(frozen=True)
class ChainBatch:
    """Chains `keep` out of the chains `window`, which are computed together."""

    window: range
    keep: range

    @property
    def name(self) -> str:
        """A name for files, which sorts by chain."""
        return f"u{self.keep.start:06d}"

    @property
    def rows(self) -> slice:
        """Where the kept chains are in the window."""
        return slice(self.keep.start - self.window.start, self.keep.stop - self.window.start)


def chains_per_batch_for(chains: int, *, small: bool = True) -> int:
    """Equal windows of at most 8 chains; two of small networks from four chains on, so that two workers find work.

    >>> [chains_per_batch_for(chains) for chains in (1, 3, 4, 8, 10, 17)]
    [1, 3, 2, 4, 5, 6]
    >>> chains_per_batch_for(5, small=False)  # large ones keep all cores busy by themselves
    5
    """
    windows = max(-(-chains // CHAINS_PER_BATCH), 2 if chains >= 4 and small else 1)
    return -(-chains // windows)


def chain_batches(chains: int, chains_per_batch: int, chunk: int | None = None) -> list[ChainBatch]:
    """Cut chains into windows, and windows into batches of at most `chunk` kept chains (None: the whole window).

    >>> [(batch.window, batch.keep) for batch in chain_batches(5, 3, 2)]
    [(range(0, 3), range(0, 2)), (range(0, 3), range(2, 3)), (range(3, 6), range(3, 5))]
    """
    check_counts(1, chunk=chunk)
    step = min(chunk or chains_per_batch, chains_per_batch)
    return [
        ChainBatch(window, range(first, min(first + step, window.stop, chains)))
        for window in (range(begin, begin + chains_per_batch) for begin in range(0, chains, chains_per_batch))
        for first in range(window.start, min(window.stop, chains), step)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """Everything that decides about the draws.

    Attributes:
        model: the architecture.
        data: inputs and targets.
        method: how they are inferred.
        density: the posterior apart from model and data: keywords of `target_of`.
        chains: how many.
        seed: from which all random numbers derive.
        start: where chains begin.
        chains_per_batch: chains that are computed together.
        threads: of torch.
        compile: whether gradients are compiled.
        likelihood: the name of the likelihood, stored with the draws.
        thin: steps between draws, which options may make depend on the number of draws.
        open: which of chains_per_batch, threads and compile were left open; a continued run takes those that it had.
    """

    model: nn.Module
    data: Data
    method: Method
    density: Mapping[str, Any]
    chains: int
    seed: int
    start: Start
    chains_per_batch: int
    threads: int
    compile: bool = False
    likelihood: str = ""
    thin: tuple[int, ...] = ()
    open: tuple[str, ...] = ()

    def target(self) -> Target:
        """The posterior."""
        return target_of(self.model, self.data, **self.density, compile=self.compile)

    def plan(self, target: Target) -> ChainPlan:
        """The stages of the method."""
        return self.method.plan(target)

    def batches(self, chunk: int | None = None) -> list[ChainBatch]:
        """The batches of chains, each of which one process works on."""
        return chain_batches(self.chains, self.chains_per_batch, chunk)

    def definition(self) -> dict[str, Any]:
        """What decides about the draws, as JSON; two runs with the same definition draw the same."""
        inputs = [leaf for leaf in tree_leaves(self.data) if isinstance(leaf, Tensor)]
        shapes = {name: list(value.shape) for name, value in state_of(self.model).items()}
        sampled = [name for name, value in self.model.named_parameters() if value.requires_grad]
        return {
            "method": self.method.name,
            "chains": self.chains,
            "seed": self.seed,
            "options": {name: _as_json(value) for name, value in sorted(options_of(self.method).items())},
            "density": {name: _as_json(value) for name, value in sorted(self.density.items())},
            "likelihood": self.likelihood,
            "start": _as_json(self.start),
            "chains_per_batch": self.chains_per_batch,
            "threads": self.threads,
            "compile": self.compile,
            "thin": list(self.thin),
            "architecture": _digest([], repr((self.model, shapes, sampled))),
            "weights": _digest(self._decisive_tensors()),
            "data": _digest(inputs),
            "torch": torch.__version__,
        }

    def defaults(self) -> dict[str, dict[str, Any]]:
        """What `options` and `density` of a definition are where it does not name them: 0.1 stored what was given."""
        own: Any = fields(method) if is_dataclass(method := cast(Any, self.method)) else ()
        options = {one.name: _as_json(one.default) for one in own if one.default is not MISSING}
        density = {name: _as_json((target_of.__kwdefaults__ or {})[name]) for name in self.density}
        return {"options": options, "density": density}

    def _decisive_tensors(self) -> list[Tensor]:
        """The tensors of the model that decide about draws: all, or those that fresh networks take over from it."""
        if self.start == "model":
            return list(state_of(self.model).values())
        first, second = (fresh(self.model, self.seed, chain) for chain in (0, 1))
        constant = [value for name, value in first.items() if torch.equal(value, second[name])]
        hidden = [value for name, value in self.model.named_buffers() if name not in first]  # outside of the state dict
        # Parameters that no module resets are drawn with the mean and spread that they have.
        return [*constant, *hidden, *unreset(self.model)]


def job_of(
    model: nn.Module,
    data: Data,
    method: str | Method,
    *,
    output: OutputPart = None,
    density: Mapping[str, Any],
    chains: int = 1,
    seed: int = 0,
    start: Start = "fresh",
    chains_per_batch: int | None = None,
    threads: int | None = None,
    compile: bool | None = None,
) -> Job:
    """Check the arguments of `sample`, and decide what they leave open."""
    model = select_output(model, output)
    data = None if data is None else pair_of(data, model)
    check_counts(1, chains=chains, chains_per_batch=chains_per_batch, threads=threads, piece=density.get("piece"))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"expected a whole number as seed, found {seed!r}: give one such as 0")
    check_kind(bool | None, "compile", compile)
    hints = get_type_hints(target_of)
    for name, value in density.items():
        check_kind(hints[name], name, value)
    weights = sum(value.numel() for value in model.parameters() if value.requires_grad)
    job = Job(
        model=model,
        data=data,
        method=method_of(method),
        density=density,
        chains=chains,
        seed=seed,
        start=start,
        chains_per_batch=chains_per_batch or chains_per_batch_for(chains, small=weights < _LARGE),
        threads=threads or (1 if weights < _LARGE else torch.get_num_threads()),
        open=tuple(
            name
            for name, value in (("chains_per_batch", chains_per_batch), ("threads", threads), ("compile", compile))
            if value is None
        ),
    )
    target = job.target()
    _warn_of_loss(target, job.method)
    plan = job.plan(target)
    wanted = plan.total_gradients >= _WORTH_COMPILING if compile is None else compile
    likelihood = getattr(target.likelihood, "__name__", "")
    return replace(job, compile=wanted and has_compiler(), likelihood=likelihood, thin=plan.thin)


_TRAINED_ONLY = (Ensemble, SWA, EMA, BatchEnsemble, Masksembles, MIMO)  # nothing is drawn but what training ends with


def _warn_of_loss(target: Target, method: Method) -> None:
    """Say that draws follow no posterior where the likelihood is a loss, unless networks are only trained.

    Warns:
        LikelihoodWarning: it is.
    """
    loss = target.likelihood
    if isinstance(loss, Likelihood) and not loss.is_density and not isinstance(method, _TRAINED_ONLY):
        warnings.warn(
            f"{loss.name!r} is a loss and no density of targets: {method.name} draws from exp(-loss) times the prior, "
            "a generalised posterior whose width nothing calibrates; train with Ensemble, or choose a likelihood that "
            "is a density, as print(onebasin.functional.likelihood_table()) lists them",
            LikelihoodWarning,
            stacklevel=4,
        )


def method_of(method: str | Method) -> Method:
    """The method itself, or the one that a word stands for, with its defaults."""
    if isinstance(method, str):
        if method not in METHODS:
            near = difflib.get_close_matches(method, METHODS, n=1) or ["hmc"]
            raise InputError(
                f"expected a method out of {', '.join(METHODS)}, found {method!r}: give {near[0]!r}, or an object "
                f"such as onebasin.{METHODS[near[0]].__name__}()"
            )
        return METHODS[method]()
    if isinstance(method, type) or not callable(getattr(method, "plan", None)) or not hasattr(method, "name"):
        words = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise InputError(
            f"expected a method with a name and a plan, found {words}: give an object such as onebasin.HMC(draws=100)"
        )
    return method


def check_misplaced(function: str, keywords: Mapping[str, Any], known: set[str], method: str | Method) -> None:
    """Raise for keywords that `sample` or `approximate` do not have: options of the method, or unknown ones."""
    for name, value in keywords.items():
        chosen = method_of(method)
        if name in options_of(chosen):
            raise InputError(
                f"{name} is an option of the method, not of {function}: give onebasin."
                f"{type(chosen).__name__}({name}={value!r}) as method"
            )
        check_options({name: value}, known, function)


def options_of(method: Method) -> dict[str, Any]:
    """The options of a method: the fields of a dataclass, else the attributes of the object."""
    names = [one.name for one in fields(method)] if is_dataclass(method) else list(vars(method))
    return {name: getattr(method, name) for name in names}


def _digest(tensors: list[Tensor], text: str = "") -> str:
    """A short hash of tensors and a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for tensor in tensors:
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(bytes_of(tensor.cpu().contiguous()))
    return digest.hexdigest()


def _as_json(value: Any) -> Any:
    """A value of an option in JSON: functions by name, networks by their hash."""
    if isinstance(value, Population):
        return _digest([tensor for _, block in value.blocks() for tensor in block.values()])
    if isinstance(value, Mapping):
        return [[str(name), _as_json(entry)] for name, entry in value.items()]  # in this order: later patterns win
    if isinstance(value, tuple | list):
        return [_as_json(entry) for entry in value]
    if isinstance(value, Likelihood):
        return repr(value)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
