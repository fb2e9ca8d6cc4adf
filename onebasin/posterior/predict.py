"""Predictions of many networks: each by itself, or their averages in the memory of a few.

`forward_passes` runs networks chunk by chunk, in this process or in workers; `Predictive` averages what they give;
`predict` is the public function. Networks of a Posterior are drawn when they are needed, never all at once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, StatisticsWarning
from onebasin.functional import (
    AnyInputs,
    Inputs,
    Measured,
    OutputPart,
    Portion,
    batches,
    check_rows,
    examples_in,
    inputs_of,
    measured_of,
    norms_used,
    one_by_one,
    portion,
    predictions,
    refreshed,
    select_output,
    side_by_side,
    stale,
    vectorises,
)
from onebasin.parallel import Executor, Progress, align_tensors, executor_for, progress_of, serialized_copy
from onebasin.population import Population
from onebasin.posterior.linearise import Linearisation, linearise
from onebasin.posterior.posterior import Posterior, shares
from onebasin.state import Spec, State

Networks = Population | Posterior


@dataclass(frozen=True, eq=False)
class Drawn:
    """Networks drawn from a posterior, read like a Population, but never all in memory.

    Each network is drawn by itself, component by component, from one generator that starts anew at `seed` whenever the
    networks are asked for. So network k is the same, bit for bit, for blocks of any size; it depends on `draws`, which
    decides how many networks each component gets. (`Posterior.draw` takes its numbers in one piece: the same
    distribution, other networks.)

    Attributes:
        posterior: where they come from.
        draws: how many.
        seed: where the generator starts.
    """

    posterior: Posterior
    draws: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.draws, int) or self.draws < 1:
            raise InputError(f"expected to draw at least 1 network, found draws={self.draws}: give a positive number")

    def __len__(self) -> int:
        return self.draws

    @property
    def spec(self) -> Spec:
        """Shapes and dtypes of one network."""
        return self.posterior.spec

    @cached_property
    def chain(self) -> Tensor:
        """The component of each network, int64 (draws,), ascending."""
        return self._components(self._generator())

    def blocks(self, size: int) -> Iterator[tuple[int, State]]:
        """Yield (start, tensors (n, *shape)) for consecutive networks, n <= size."""
        stream = DrawStream(self)
        for start in range(0, self.draws, size):
            yield start, stream.take(start, min(start + size, self.draws))

    def vectors(self) -> Iterator[Tensor]:
        """Yield the uncertain weights of one network after the other, each (1, D)."""
        generator = self._generator()
        for component in self._components(generator).tolist():
            yield self.posterior.components[component].draw_flat(1, generator)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _components(self, generator: torch.Generator) -> Tensor:
        """The component of each network, by the first use of the generator."""
        counts = shares(self.posterior.weights, self.draws, generator)
        return torch.repeat_interleave(torch.arange(len(counts)), counts)


class DrawStream:
    """Ranges of consecutive networks of `Drawn`; fast where ranges ascend.

    Networks in between are drawn and dropped, and a range further back starts anew: a generator cannot be wound
    forward.
    """

    def __init__(self, drawn: Drawn) -> None:
        """Start before the first network."""
        self._drawn, self._at, self._vectors = drawn, 0, drawn.vectors()

    def take(self, start: int, stop: int) -> State:
        """Networks start:stop, as tensors (stop - start, *shape)."""
        if start < self._at:
            self._at, self._vectors = 0, self._drawn.vectors()
        next(islice(self._vectors, start - self._at, start - self._at), None)
        flat, self._at = torch.cat([*islice(self._vectors, stop - start)]), stop
        posterior, chain = self._drawn.posterior, self._drawn.chain[start:stop].tolist()
        buffers = {
            name: torch.stack([posterior.buffers[component][name] for component in chain])
            for name in posterior.layout.buffer_names
        }
        return posterior.layout.networks(flat, buffers)


def first_of(networks: Population | Drawn) -> State:
    """The first network."""
    _, block = next(iter(networks.blocks(1)))
    return {name: value[0] for name, value in block.items()}


def networks_of(networks: Networks, draws: int, seed: int) -> Population | Drawn:
    """A Population as it is, a Posterior as `draws` draws from it.

    Raises:
        InputError: there is no network, or the argument is neither of the two.
    """
    if isinstance(networks, Posterior):
        return Drawn(networks, draws, seed)
    if not isinstance(networks, Population):
        raise _no_networks(networks)
    if not len(networks):
        raise InputError("expected at least one network to predict with, found an empty population: add members")
    return networks


def _no_networks(given: object) -> InputError:
    if given is None:
        return InputError(
            "expected a Population or a Posterior, found None: give networks (where a Calibration has none, its .why "
            "says why, and it is called with predictions instead)"
        )
    each = given if isinstance(given, list | tuple) else [given]
    modules = any(isinstance(one, nn.Module) for one in each)
    return InputError(
        f"expected a Population or a Posterior, found {type(given).__name__}: make a Population "
        f"{'with Population.from_models([...])' if modules else 'of single networks with Population.from_states'}"
    )


Linearised = bool | Literal["sampled", "probit"]  # True is "sampled"
LINEARISED = ("sampled", "probit")
Shard = Population | range  # networks, or the numbers of those that the worker draws itself


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictOptions:
    """Options for drawing and running networks: the keywords of `predict` of the same names."""

    draws: int = 100
    seed: int = 0
    statistics: Measured = None
    chunk: int | None = None
    batch: int | None = None
    progress: Progress | None = None
    workers: int | None = None
    executor: str | Executor | None = None
    linearised: Linearised = False

    @property
    def execution(self) -> dict[str, Any]:
        """The options that say where networks run."""
        return {"workers": self.workers, "executor": self.executor}

    def networks(self, networks: Networks) -> Population | Drawn:
        """The networks that these options mean."""
        return networks_of(networks, self.draws, self.seed)

    def members(self, networks: Networks) -> int:
        """How many predictions there will be: of the probit form one for each component."""
        if self.linearised == "probit" and isinstance(networks, Posterior):
            return len(networks.components)
        return len(self.networks(networks))

    def sample_size(self) -> int:
        """Examples that show what a model does: two, or a batch where both sizes are given and others may not run."""
        return 2 if self.chunk is None or self.batch is None else self.batch


@contextmanager
def forward_passes(
    model: nn.Module, networks: Networks, inputs: Inputs, options: PredictOptions
) -> Iterator[Iterator[tuple[int, Tensor]]]:
    """Open an iterator of (number of the first network, outputs of a chunk of networks (n, examples, ...)).

    A worker reads or draws the networks of its chunk itself. Linearised networks run in this process.
    """
    if options.linearised:
        with closing(_linearised_passes(model, networks, inputs, options)) as chunks:
            yield chunks
        return
    members = options.networks(networks)
    first = first_of(members)
    shared = _shared(model, members) if options.chunk is None else frozenset()
    sizes = portion(model, first, inputs, chunk=options.chunk, batch=options.batch, shared=shared)
    # Decided once, here: it must not depend on which worker runs which networks.
    together = vectorises(model, first, next(batches(inputs, options.sample_size()))[1], len(members))
    given = options.statistics if isinstance(networks, Posterior) else None
    statistics = None if given is False else given
    with executor_for(**options.execution) as executor:
        work = _Forward(model, sizes, members, together=together)
        with closing(_chunks(executor, work, (inputs, statistics), options.progress)) as chunks:
            yield chunks


def _shared(model: nn.Module, members: Population | Drawn) -> frozenset[str]:
    """Names of the tensors that all networks have in common, where some parameter is among them and some is not."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def some(names: set[str]) -> bool:
        return bool(parameters & names) and bool(parameters - names)

    if len(members) < 2:
        return frozenset()
    if isinstance(members, Population):
        _, two = next(members.blocks(2))  # of most populations they tell already that nothing is shared
        alike = {name for name, value in two.items() if torch.equal(value[0], value[1])}
        shared = members.constant_tensors(alike) if some(alike) else set()
    elif len(members.posterior.components) > 1:  # a block may hold draws of two, which have nothing in common
        return frozenset()
    else:
        posterior = members.posterior
        std = posterior.layout.shaped(posterior.components[0].covariance.std())
        shared = {name for name in posterior.spec if name not in std or not bool(std[name].any())}
    return frozenset(shared) if some(shared) else frozenset()


def stale_statistics(
    model: nn.Module, networks: Networks, inputs: Inputs, options: PredictOptions, *, stacklevel: int = 3
) -> tuple[PredictOptions, tuple[str, ...]]:
    """Warn that draws have running statistics which are not their own.

    Returns:
        Options that keep these statistics without another warning, and the sentence of the warning, if there is one.
    """
    if not isinstance(networks, Posterior) or options.statistics is not None or options.linearised:
        return options, ()
    if not any(networks.spec[name].dtype.is_floating_point for name in networks.layout.buffer_names):
        return options, ()
    first = first_of(networks_of(networks, 1, 0))
    names = norms_used(model, first, inputs, constant=networks.constant_statistics, size=options.sample_size())
    if not names:
        return options, ()
    remedy = (
        "give statistics=, inputs such as those of training (on the command line --statistics), or statistics=False to "
        "keep them"
    )
    note = stale("draws of the posterior", names, remedy)
    warnings.warn(note, StatisticsWarning, stacklevel=stacklevel)
    return replace(options, statistics=False), (note,)


def check_linearised(networks: Networks, linearised: Linearised, statistics: Measured) -> None:
    """Refuse a linearised predictive of what has no Gaussian to linearise with, or with options that nothing reads.

    Raises:
        InputError: so it is.
    """
    if linearised not in (False, True, *LINEARISED):
        raise InputError(
            f'expected linearised to be True, False, "sampled" or "probit", found {linearised!r}: give "sampled"'
        )
    if not linearised:
        return
    if not isinstance(networks, Posterior):
        raise InputError(
            f"expected a Posterior, whose Gaussians a network is linearised for, found {type(networks).__name__}: fit "
            "one (ob.approximate, ob.fit), or leave linearised out"
        )
    if statistics is not None and statistics is not False:
        raise InputError(
            "running statistics are measured for drawn networks, found statistics= with linearised=, which runs the "
            "network at the centre with its own: leave one of them out"
        )
    if linearised == "probit" and not torch.allclose(networks.weights, networks.weights[:1]):
        raise InputError(
            "expected components of equal weight for the probit form, found weights from "
            f'{float(networks.weights.min()):g} to {float(networks.weights.max()):g}: give linearised="sampled"'
        )


def _linearised_passes(
    model: nn.Module, posterior: Networks, inputs: Inputs, options: PredictOptions
) -> Generator[tuple[int, Tensor], None, None]:
    """Outputs of linearised networks at drawn weights; of the probit form the damped logits of each component."""
    check_linearised(posterior, options.linearised, options.statistics)
    assert isinstance(posterior, Posterior)  # checked
    if options.linearised == "probit":
        for number, logits in enumerate(linearise(model, posterior, inputs, progress=options.progress).probit):
            yield number, logits[None]
        return
    drawn = Drawn(posterior, options.draws, options.seed)
    sizes = portion(model, first_of(drawn), inputs, chunk=options.chunk, batch=options.batch)
    vectors, chain, start = drawn.vectors(), drawn.chain.tolist(), 0
    known: tuple[int, Linearisation] | None = None
    while start < len(drawn):
        component = chain[start]
        stop = min(start + sizes.chunk, start + chain[start:].count(component))
        flat = torch.cat([*islice(vectors, stop - start)])
        if known is None or known[0] != component:
            known = component, Linearisation(model, posterior, component)
        yield start, torch.cat([known[1].shifted(call, flat) for _, call in batches(inputs, sizes.batch)], dim=1)
        start = stop
        if options.progress is not None:
            options.progress(start, len(drawn), "networks")


def _chunks(
    executor: Executor,
    work: _Forward,
    inputs: tuple[Inputs, Inputs | None],
    progress: Progress | None,
) -> Generator[tuple[int, Tensor], None, None]:
    done = 0
    for outputs in executor.map(work, work.shards(), shared=align_tensors(inputs)):
        yield done, outputs
        done += len(outputs)
        if progress is not None:
            progress(done, work.members, "networks")


class _Forward:
    """The forward passes of a chunk of networks, in a worker."""

    def __init__(self, model: nn.Module, sizes: Portion, networks: Population | Drawn, *, together: bool) -> None:
        self.model, self.sizes, self.members, self.together = model, sizes, len(networks), together
        self._population = networks if isinstance(networks, Population) else None
        self._drawn = serialized_copy(networks) if isinstance(networks, Drawn) else None
        self._constant = networks.posterior.constant_statistics if isinstance(networks, Drawn) else frozenset()
        self._stream: DrawStream | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the population, whose parts are sent with the shards."""
        return {**vars(self), "_population": None}

    def shards(self) -> Iterator[Shard]:
        """The chunks, whose size depends on the networks and the inputs alone."""
        if self._population is not None:
            yield from (members for _, members in self._population.parts(self.sizes.chunk))
        else:
            numbers = range(self.members)
            yield from (numbers[start : start + self.sizes.chunk] for start in numbers[:: self.sizes.chunk])

    def __call__(self, shared: tuple[Inputs, Inputs | None], shard: Shard) -> Tensor:
        """Outputs of the networks (n, examples, ...); `shared` are the inputs, and those for running statistics."""
        inputs, statistics = shared
        members = shard if isinstance(shard, Population) else self._draw(shard, statistics)
        several = side_by_side(self.model) if self.together else one_by_one(self.model)
        try:
            outputs = predictions(
                self.model, members, inputs, chunk=len(members), batch=self.sizes.batch, several=several
            )
        except IndexError:  # there is no axis of examples to join batches along
            check_rows(torch.zeros(()), examples_in(inputs))
            raise
        check_rows(outputs[0], examples_in(inputs))
        return outputs

    def _draw(self, numbers: range, statistics: Inputs | None) -> Population:
        if self._stream is None:
            assert self._drawn is not None  # numbers are those of draws
            self._stream = DrawStream(self._drawn)
        stacked = self._stream.take(numbers.start, numbers.stop)
        if statistics is not None:
            stacked, _ = refreshed(self.model, stacked, statistics, constant=self._constant)
        return Population.from_stacked(stacked)


Quantity = Literal["probabilities", "logits", "values"]
QUANTITIES = ("probabilities", "logits", "values")


def predict(
    model: nn.Module,
    networks: Networks,
    inputs: AnyInputs,
    *,
    quantity: Quantity = "probabilities",
    output: OutputPart = None,
    average: bool = False,
    draws: int = 100,
    statistics: AnyInputs = None,
    linearised: Linearised = False,
    seed: int = 0,
    chunk: int | None = None,
    batch: int | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Tensor:
    """Return the predictions of networks, (members, examples, classes), or their average (examples, classes).

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[0.0], [0.0]], [[3.0], [0.0]]])})
    >>> layer = nn.Linear(1, 2, bias=False)
    >>> predict(layer, population, torch.tensor([[1.0]]))
    tensor([[[0.5000, 0.5000]], [[0.9526, 0.0474]]])
    >>> predict(layer, population, torch.tensor([[1.0]]), average=True)
    tensor([[0.7263, 0.2737]], dtype=torch.float64)

    Args:
        model: the function; left exactly as it was.
        networks: a Population, read block by block; or a Posterior, from which networks are drawn block by block.
        inputs: a tensor or array, a tuple of positional or a dict of keyword inputs, one example per row; or a Dataset,
            a DataLoader (read once, its order kept) or rows of a Hugging Face data set, whose targets are left out.
        quantity: "probabilities", the softmax over the classes, which are axis 1 of what a network returns (examples,
            classes, ...); "logits" or "values" (two words for the same), what the network returns.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        average: return the mean over networks in float64, and keep no more than a block of them. (Of logits this is
            the logarithm of a geometric mean: for the average predictive ask for probabilities.)
        draws: networks drawn from a Posterior; a Population is taken as it is.
        statistics: inputs, such as those of training, on which the running statistics of norms are measured for each
            network that is drawn from a Posterior. False: leave them at the averages that the Posterior holds. None:
            the same, with a warning where there are such statistics. The networks of a Population keep theirs.
        linearised: predict with networks that are linear in their weights, f(x; theta*) + J (theta - theta*) around
            the centre of each component of a Posterior, as is best for Laplace. True or "sampled": at drawn weights
            theta, so that every member is a function of all examples. "probit": no draws but one prediction for each
            component, the softmax of logits that are damped by their variance. (For values `ob.linearise` gives mean
            and standard deviation exactly.)
        seed: seed of the draws. Draw k is the same for any `chunk`.
        chunk: networks in one pass; by default as many as 256 MB of activations and 64 MB of weights hold, at most 16.
        batch: examples in one pass; by default 1,000, or fewer where activations are large.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, "networks").
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Returns:
        Without `average` the dtype is that of the networks; probabilities are computed in float32 at least.

    Raises:
        InputError: there are no classes, or a network gives NaN.

    Warns:
        StatisticsWarning: draws of a Posterior have running statistics that are not their own; see `statistics`.
    """
    check_quantity(quantity)
    check_linearised(networks, linearised, statistics)
    if linearised == "probit" and quantity != "probabilities":
        raise InputError(
            f'expected quantity="probabilities" for the probit form, found {quantity!r}: give linearised="sampled", or '
            "take mean and std of ob.linearise"
        )
    model = select_output(model, output)
    inputs, statistics = inputs_of(inputs, model), measured_of(statistics, model)
    options = PredictOptions(
        draws=draws,
        seed=seed,
        statistics=statistics,
        chunk=chunk,
        batch=batch,
        progress=progress_of(progress),
        workers=workers,
        executor=executor,
        linearised=linearised,
    )
    total = options.members(networks)
    options, _ = stale_statistics(model, networks, inputs, options)
    if average:
        return Predictive.of(model, networks, inputs, options, quantity=quantity, mean_only=True).mean
    result: Tensor | None = None
    with forward_passes(model, networks, inputs, options) as chunks:
        for start, outputs in chunks:
            shown = _shown(outputs, quantity, start)
            result = shown.new_empty((total, *shown.shape[1:])) if result is None else result
            result[start : start + len(shown)] = shown
    assert result is not None  # there is at least one network
    return result


def check_quantity(quantity: str) -> None:
    """Raise `InputError` unless the quantity is one of `QUANTITIES`."""
    if quantity not in QUANTITIES:
        raise InputError(
            f'expected quantity to be one of {", ".join(QUANTITIES)}, found {quantity!r}: give "probabilities"'
        )


def check_classes(outputs: Tensor) -> None:
    """Refuse outputs (members, examples, ...) without several classes to choose among.

    Raises:
        InputError: there are none.
    """
    if not outputs.is_floating_point():
        raise InputError(
            f"expected scores of classes as floating-point numbers to make probabilities of, found {outputs.dtype}: "
            'wrap the model so that it returns its scores, or ask for quantity="values"'
        )
    if outputs.dim() < 3 or outputs.shape[2] < 2:
        raise InputError(
            f"expected outputs (examples, classes, ...) of at least 2 classes to make probabilities of, found "
            f'{tuple(outputs.shape[1:])}: the softmax of a single number is always 1, so ask for quantity="values"'
        )


def check_nan(values: Tensor, start: int) -> None:
    """Refuse NaN in what networks (n, ...) from number `start` on predict: an average would be NaN everywhere.

    Raises:
        InputError: there is one.
    """
    broken = values.isnan().flatten(1).any(1).nonzero().flatten()
    if len(broken):
        raise InputError(
            f"expected numbers from every network, found NaN from network {start + int(broken[0])}: look for NaN or "
            "infinity in its weights and in the inputs, or leave it out"
        )


def _shown(outputs: Tensor, quantity: Quantity, start: int) -> Tensor:
    """Predictions from the outputs of networks from number `start` on, in their dtype."""
    if quantity == "probabilities":
        check_classes(outputs)
        wide = outputs.float() if outputs.dtype.itemsize < 4 else outputs
        outputs = wide.softmax(2).to(outputs.dtype)
    check_nan(outputs, start)
    return outputs


class Predictive:
    """Averages over networks of what they predict, float64; networks are added block by block and not kept.

    Sums are those of differences from the first network, so that equal networks have exactly its prediction and no
    variance, and values far from zero keep their digits.

    >>> population = Population.from_stacked({"weight": torch.tensor([[[9e9], [0.0]], [[0.0], [9e9]]])})
    >>> predictive = Predictive.of(nn.Linear(1, 2, bias=False), population, torch.tensor([[1.0]]))
    >>> predictive.mean, predictive.mutual_information  # two networks that are sure of different classes: log 2
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))

    Attributes:
        quantity: what is averaged: "probabilities", "logits" or "values".
        members: networks that were added.
    """

    def __init__(self, quantity: Quantity = "probabilities", *, mean_only: bool = False) -> None:
        """Begin without networks; `mean_only` keeps the mean alone, of what `predict` returns."""
        self.quantity, self.mean_only, self.members = quantity, mean_only, 0
        self._first: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._log_sum: Tensor | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        networks: Networks,
        inputs: Inputs,
        options: PredictOptions | None = None,
        *,
        quantity: Quantity = "probabilities",
        mean_only: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> Predictive:
        """Run every network over the inputs; `prepare` changes the outputs (n, examples, ...) before they count."""
        predictive = cls(quantity, mean_only=mean_only)
        with forward_passes(model, networks, inputs, options or PredictOptions()) as chunks:
            for start, outputs in chunks:
                predictive.add(outputs if prepare is None else prepare(outputs), start)
        return predictive

    def add(self, outputs: Tensor, start: int | None = None) -> None:
        """Add networks by their outputs (n, examples, ...); errors count them from `start` on."""
        start = self.members if start is None else start
        if self.mean_only:
            for prediction in _shown(outputs, self.quantity, start):
                self._add({"mean": prediction})
            return
        if self.quantity == "probabilities":
            check_classes(outputs)
        for number, network in enumerate(outputs):
            values = network.double()
            check_nan(values[None], start + number)
            if not bool(values.isfinite().all()):
                raise InputError(
                    f"expected finite outputs of every network, found infinity from network {start + number}: leave "
                    "it out, or ask predict for the average alone"
                )
            self._add(self._quantities(values))

    def _quantities(self, outputs: Tensor) -> dict[str, Tensor]:
        """The quantities that are averaged, of one network with outputs (examples, ...)."""
        if self.quantity != "probabilities":
            return {"mean": outputs}
        logs = outputs.log_softmax(1)
        probabilities = logs.exp()
        self._log_sum = logs if self._log_sum is None else torch.logaddexp(self._log_sum, logs)
        return {"mean": probabilities, "logits": outputs, "entropy": torch.special.entr(probabilities).sum(1)}

    def _add(self, quantities: dict[str, Tensor]) -> None:
        self.members += 1
        for name, value in quantities.items():
            exact = value.double()
            if name not in self._first:  # differences from infinity would be NaN, where a mean is infinite
                self._first[name] = torch.where(exact.isfinite(), exact, 0.0)
                self._sums[name] = torch.zeros_like(exact)
            gap = exact - self._first[name]
            self._sums[name] += gap
            if name == "mean" and not self.mean_only:
                squares = self._sums.setdefault("squares", torch.zeros_like(exact))
                squares += gap.square()

    def _average(self, name: str) -> Tensor:
        if not self.members:
            raise InputError("expected at least one network to average over, found none: add networks first")
        if name not in self._first:
            raise InputError(f'{self.quantity} have no {name}: predict with quantity="probabilities"')
        return self._first[name] + self._sums[name] / self.members

    @property
    def mean(self) -> Tensor:
        """Mean prediction (examples, ...); of probabilities the average predictive."""
        mean = self._average("mean")
        # A mean of differences can take a probability of 1e-300 below zero by rounding.
        return mean.clamp(min=0) if self.quantity == "probabilities" else mean

    @property
    def log_mean(self) -> Tensor:
        """Logarithm of the average predictive (examples, classes, ...), which does not underflow."""
        self._average("entropy")
        assert self._log_sum is not None  # probabilities were added
        return self._log_sum - math.log(self.members)

    @property
    def logits(self) -> Tensor:
        """Mean of the logits (examples, classes, ...)."""
        return self._average("logits")

    def variance(self, correction: int = 1) -> Tensor:
        """Variance over networks (examples, ...), with divisor members - correction."""
        if self.members <= correction:
            raise InputError(
                f"a variance needs at least {correction + 1} networks, found {self.members}: add members, or choose "
                "correction=0"
            )
        deviations = self._sums["squares"] - self._sums["mean"].square() / self.members
        return deviations.clamp(min=0) / (self.members - correction)

    @property
    def expected_entropy(self) -> Tensor:
        """Mean over networks of the entropy of their probabilities in nats (examples, ...)."""
        return self._average("entropy")

    @property
    def entropy(self) -> Tensor:
        """Entropy of the average predictive in nats (examples, ...), the total uncertainty."""
        self._average("entropy")  # asks for probabilities
        total: Tensor = torch.special.entr(self.mean).sum(1)
        return total

    @property
    def mutual_information(self) -> Tensor:
        """H(mean) - mean of H in nats (examples, ...): how much the networks disagree, 0 when they are one function."""
        return (self.entropy - self.expected_entropy).clamp(min=0)
