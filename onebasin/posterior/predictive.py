"""What thousands of networks predict together, in the memory of a few: sums that grow network by network."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError, StatisticsWarning, check_options
from onebasin.functional import (
    ROOM,
    Inputs,
    Measured,
    Portion,
    batches,
    call_arguments,
    check_rows,
    examples_in,
    footprint,
    norms_used,
    one_by_one,
    portion,
    predictions,
    refreshed,
    side_by_side,
    stale,
    vectorises,
)
from onebasin.parallel import ExecutionOptions, Executor, MemoryNeeds, as_arrived, executor_for, settled
from onebasin.population import Population, parts
from onebasin.posterior.posterior import Posterior, shares
from onebasin.state import Spec, State

# ----------------------------------------------------------------------
# Networks that are drawn from a posterior when they are needed, a few at a time.


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
        reel = Reel(self)
        for start in range(0, self.draws, size):
            yield start, reel.take(start, min(start + size, self.draws))

    def vectors(self) -> Iterator[Tensor]:
        """Yield the uncertain weights of one network after the other, each (1, D)."""
        generator = self._generator()
        for component in self._components(generator).tolist():
            yield self.posterior.components[component].draw_flat(1, generator)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def _components(self, generator: torch.Generator) -> Tensor:
        """Which component each network comes from; the first use of the generator."""
        counts = shares(self.posterior.weights, self.draws, generator)
        return torch.repeat_interleave(torch.arange(len(counts)), counts)


class Reel:
    """Any consecutive networks of `Drawn`; quick for those who ask for later and later ones.

    What lies between is drawn and thrown away, and to go back it starts anew: a generator cannot be wound forward.
    """

    def __init__(self, drawn: Drawn) -> None:
        """Stand before the first network."""
        self._drawn, self._at, self._vectors = drawn, 0, drawn.vectors()

    def take(self, start: int, stop: int) -> State:
        """Networks start:stop, as tensors (stop - start, *shape)."""
        if start < self._at:
            self._at, self._vectors = 0, self._drawn.vectors()
        next(islice(self._vectors, start - self._at, start - self._at), None)
        flat, self._at = torch.cat([*islice(self._vectors, stop - start)]), stop
        posterior, chain = self._drawn.posterior, self._drawn.chain[start:stop].tolist()
        rest = {name: torch.stack([posterior.rest[own][name] for own in chain]) for name in posterior.layout.others}
        return posterior.layout.networks(flat, rest)


def first_of(networks: Population | Drawn) -> State:
    """The first network."""
    _, block = next(iter(networks.blocks(1)))
    return {name: value[0] for name, value in block.items()}


def networks_of(population: Networks, draws: int, seed: int) -> Population | Drawn:
    """The networks of a population: a population as it is, a posterior through `draws` draws.

    Raises:
        InputError: there is no network, or the population is neither of the two.
    """
    if isinstance(population, Posterior):
        return Drawn(population, draws, seed)
    if not isinstance(population, Population):
        raise InputError(
            f"expected a Population or a Posterior, found {type(population).__name__}: "
            "make a Population of single networks with Population.from_states"
        )
    if not len(population):
        raise InputError("expected at least one network to predict with, found an empty population: add members")
    return population


# ----------------------------------------------------------------------
# Every network of a population over some inputs, chunk by chunk, wherever the work runs.


_COPIES = 2  # of activations and weights: libraries lay them out anew for convolutions
Shard = Population | range  # networks, or the numbers of those that the worker draws itself


class PredictOptions(ExecutionOptions, total=False):
    """What `predict` may also be told; where it runs is said as in `ExecutionOptions`.

    Attributes:
        draws: networks drawn from a Posterior, 100 by default; a Population is taken as it is.
        seed: of these draws, 0 by default. Draw k is the same for any `chunk`.
        statistics: inputs, such as those of training, on which the running statistics of norms are measured for each
            network that is drawn from a Posterior; see `onebasin.norms.refreshed`. False: leave them at the averages
            that the Posterior holds. By default the same, with a warning where there are such statistics. The networks
            of a Population have statistics of their own, and keep them.
        chunk: networks in one pass; by default as many as 256 MB of activations and 64 MB of weights hold, at most 16.
        batch: examples in one pass; by default 1,000, or fewer where activations are large.
        progress: called with (networks done, networks in all).
    """

    draws: int
    seed: int
    statistics: Measured
    chunk: int
    batch: int
    progress: Callable[[int, int], None]


@contextmanager
def passes(
    model: nn.Module, population: Networks, inputs: Inputs, *, kept: int, **options: Unpack[PredictOptions]
) -> Iterator[Iterator[tuple[int, Tensor]]]:
    """Open an iterator of (number of the first network, what a chunk of networks returns (n, examples, ...)).

    A worker reads or draws the networks of its chunk itself.

    Args:
        model: the function.
        population: a Population, or a Posterior that is drawn from.
        inputs: as in `predict`.
        kept: networks whose outputs the caller holds at a time, counted by their bytes.
        options: as in `predict`.
    """
    networks = _networks(population, options)
    sizes = portion(model, first_of(networks), inputs, chunk=options.get("chunk"), batch=options.get("batch"))
    if (note := stale_statistics(model, population, inputs, options)) is not None:
        warnings.warn(note, StatisticsWarning, stacklevel=4)  # passes <- contextlib <- predict <- the user
    with executor_for(options, **needs(model, population, inputs, kept, options)) as executor:
        run = _Run(model, sizes, networks, together=_vectorises(model, networks, inputs, options))
        statistics = _measured_on(population, options)
        with closing(_chunks(executor, run, (inputs, statistics), options.get("progress"))) as chunks:
            yield chunks


def stale_statistics(model: nn.Module, population: Networks, inputs: Inputs, options: Mapping[str, Any]) -> str | None:
    """A sentence about running statistics that draws do not have, None where all is well or was said to be."""
    if not isinstance(population, Posterior) or options.get("statistics") is not None:
        return None
    if not any(population.spec[name].dtype.is_floating_point for name in population.layout.others):
        return None
    names = norms_used(
        model,
        first_of(networks_of(population, 1, 0)),
        inputs,
        constant=population.constant_statistics,
        size=_chosen_batch(options),
    )
    remedy = (
        "give statistics=, inputs such as those of training (on the command line --statistics), or statistics=False to "
        "keep them"
    )
    return stale("draws of the posterior", names, remedy) if names else None


def _measured_on(population: Networks, options: Mapping[str, Any]) -> Inputs | None:
    """The inputs on which the statistics of draws are measured, None where they are not."""
    given = options.get("statistics")
    return given if isinstance(population, Posterior) and given is not None and given is not False else None


def needs(model: nn.Module, population: Networks, inputs: Inputs, kept: int, options: Mapping[str, Any]) -> MemoryNeeds:
    """The memory of `passes` with these arguments: of one worker, and of the caller with what it keeps.

    Nothing is measured, and nothing said, where no `memory` is given.
    """
    if options.get("memory") is None:
        return MemoryNeeds(each=0, here=0)
    networks = _networks(population, options)
    first = first_of(networks)
    sizes = portion(model, first, inputs, chunk=options.get("chunk"), batch=options.get("batch"))
    own, examples = footprint(model, first, inputs), examples_in(inputs)
    weights = sum(tensor.nbytes for tensor in first.values())
    given = sum(leaf.nbytes for leaf in tree_leaves(call_arguments(inputs)) if isinstance(leaf, Tensor))
    drawn = 2 * population.nbytes if isinstance(population, Posterior) else 0
    running = _COPIES * sizes.chunk * (min(sizes.batch, examples) * own.activations + weights)
    measuring = _refreshing(population, options)
    # Outputs of a chunk are made, packed, and wait in the caller; inputs are read packed.
    return MemoryNeeds(
        each=running + measuring + 4 * sizes.chunk * examples * own.outputs + 2 * (given + weights) + drawn,
        here=given + kept * examples * own.outputs,
    )


def _refreshing(population: Networks, options: Mapping[str, Any]) -> int:
    """Bytes for measuring running statistics: the inputs, packed and not, and the activations of a pass."""
    given = _measured_on(population, options)
    if given is None:
        return 0
    held = sum(leaf.nbytes for leaf in tree_leaves(call_arguments(given)) if isinstance(leaf, Tensor))
    return 2 * held + _COPIES * ROOM


def _networks(population: Networks, options: Mapping[str, Any]) -> Population | Drawn:
    return networks_of(population, options.get("draws", 100), options.get("seed", 0))


def _vectorises(model: nn.Module, networks: Population | Drawn, inputs: Inputs, options: Mapping[str, Any]) -> bool:
    """Find out once and for all: it should not depend on who runs which networks.

    Two examples are enough, but somebody who has chosen all sizes may have a model that takes no others.
    """
    return vectorises(model, first_of(networks), next(batches(inputs, _chosen_batch(options)))[1])


def _chosen_batch(options: Mapping[str, Any]) -> int:
    """How many examples show what a model does: two, or a batch where all sizes were chosen."""
    chosen = None not in (options.get("chunk"), options.get("batch"))
    return int(options["batch"]) if chosen else 2


def _chunks(
    executor: Executor, run: _Run, inputs: tuple[Inputs, Inputs | None], progress: Callable[[int, int], None] | None
) -> Generator[tuple[int, Tensor], None, None]:
    done = 0
    for found in executor.map(run, run.shards(), shared=settled(inputs)):
        yield done, found
        done += len(found)
        if progress is not None:
            progress(done, run.members)


class _Run:
    """What a worker does with a chunk of networks."""

    def __init__(self, model: nn.Module, sizes: Portion, networks: Population | Drawn, *, together: bool) -> None:
        self.model, self.sizes, self.members, self.together = model, sizes, len(networks), together
        self._population = networks if isinstance(networks, Population) else None
        self._drawn = as_arrived(networks) if isinstance(networks, Drawn) else None
        self._constant = networks.posterior.constant_statistics if isinstance(networks, Drawn) else frozenset()
        self._reel: Reel | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what travels shard by shard."""
        return {**vars(self), "_population": None}

    def shards(self) -> Iterator[Shard]:
        """The chunks, whose size depends on the networks and the inputs alone."""
        if self._population is not None:
            yield from (members for _, members in parts(self._population, self.sizes.chunk))
        else:
            numbers = range(self.members)
            yield from (numbers[start : start + self.sizes.chunk] for start in numbers[:: self.sizes.chunk])

    def __call__(self, shared: tuple[Inputs, Inputs | None], shard: Shard) -> Tensor:
        """Outputs of the networks (n, examples, ...); `shared` are the inputs, and those for running statistics."""
        inputs, statistics = shared
        members = shard if isinstance(shard, Population) else self._draw(shard, statistics)
        several = side_by_side(self.model) if self.together else one_by_one(self.model)
        try:
            found = predictions(
                self.model, members, inputs, chunk=len(members), batch=self.sizes.batch, several=several
            )
        except IndexError:  # there is no axis of examples to join batches along
            check_rows(torch.zeros(()), examples_in(inputs))
            raise
        check_rows(found[0], examples_in(inputs))
        return found

    def _draw(self, numbers: range, statistics: Inputs | None) -> Population:
        if self._reel is None:
            assert self._drawn is not None  # who asks for numbers has a posterior
            self._reel = Reel(self._drawn)
        stacked = self._reel.take(numbers.start, numbers.stop)
        if statistics is not None:
            stacked, _ = refreshed(self.model, stacked, statistics, constant=self._constant)
        return Population.from_stacked(stacked)


# ----------------------------------------------------------------------
# What a population predicts: every network by itself, or their average without keeping them.


Output = Literal["probabilities", "logits", "values"]
OUTPUTS = ("probabilities", "logits", "values")


def predict(
    model: nn.Module,
    population: Networks,
    inputs: Inputs,
    *,
    output: Output = "probabilities",
    average: bool = False,
    **options: Unpack[PredictOptions],
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
        population: a Population, read block by block; or a Posterior, from which networks are drawn block by block.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor.
        output: "probabilities", the softmax over the classes, which are axis 1 of what a network returns (examples,
            classes, ...); "logits" or "values" (two words for the same), what the network returns.
        average: return the mean over networks in float64, and keep no more than a block of them. (Of logits this is
            the logarithm of a geometric mean: for the average predictive ask for probabilities.)
        options: `draws`, `seed`, `statistics`, `chunk`, `batch` and `progress`; `workers`, `executor` and `memory` say
            where the networks run; see `Options`.

    Returns:
        Without `average` the dtype is that of the networks; probabilities are computed in float32 at least.

    Raises:
        InputError: an option is unknown, there are no classes, or a network gives NaN.

    Warns:
        StatisticsWarning: draws of a Posterior have running statistics that are not their own; see `statistics`.
    """
    check_output(output, options)
    total = len(networks_of(population, options.get("draws", 100), options.get("seed", 0)))
    result: Tensor | None = None
    with passes(
        model, population, inputs, kept=4 if average else total, **options
    ) as chunks:  # averages are twice as wide
        for start, part in chunks:
            shown = _shown(part, output, start)
            if average:
                mean = shown.sum(0, dtype=torch.float64) / total
                result = mean if result is None else result.add_(mean)
            else:
                result = shown.new_empty((total, *shown.shape[1:])) if result is None else result
                result[start : start + len(shown)] = shown
    assert result is not None  # there is at least one network
    return result


def check_output(output: str, options: Mapping[str, object]) -> None:
    """Refuse an output or an option that nobody knows.

    Raises:
        InputError: there is one.
    """
    if output not in OUTPUTS:
        raise InputError(f"expected output to be one of {', '.join(OUTPUTS)}, found {output!r}: choose one of them")
    check_options(options, PredictOptions.__annotations__, "predict")


def check_classes(outputs: Tensor) -> None:
    """Refuse outputs (members, examples, ...) without several classes to choose among.

    Raises:
        InputError: there are none.
    """
    if not outputs.is_floating_point():
        raise InputError(
            f"expected scores of classes as floating-point numbers to make probabilities of, found {outputs.dtype}: "
            'wrap the model so that it returns its scores, or ask for output="values"'
        )
    if outputs.dim() < 3 or outputs.shape[2] < 2:
        raise InputError(
            f"expected outputs (examples, classes, ...) of at least 2 classes to make probabilities of, found "
            f'{tuple(outputs.shape[1:])}: the softmax of a single number is always 1, so ask for output="values"'
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


def _shown(part: Tensor, output: Output, start: int) -> Tensor:
    if output == "probabilities":
        check_classes(part)
        wide = part.float() if part.dtype.itemsize < 4 else part
        part = wide.softmax(2).to(part.dtype)
    check_nan(part, start)
    return part


# ----------------------------------------------------------------------
# What thousands of networks predict together, in the memory of a few: sums that grow network by network.


_KEPT = 16  # networks whose outputs have the bytes of two summaries and of what is made of them in between


@dataclass(frozen=True, eq=False)
class Summary:
    """Moments over networks of what they predict, float64.

    Attributes:
        output: what was predicted: "probabilities", "logits" or "values".
        members: number of networks.
        mean: their mean (examples, ...); of probabilities the average predictive.
        deviations: sum over networks of (prediction - mean)^2 (examples, ...).
        expected_entropy: mean over networks of the entropy of their probabilities in nats (examples, ...); None where
            no probabilities were predicted.
    """

    output: Output
    members: int
    mean: Tensor
    deviations: Tensor
    expected_entropy: Tensor | None = None

    def variance(self, correction: int = 1) -> Tensor:
        """Variance over networks (examples, ...), with divisor members - correction."""
        if self.members <= correction:
            raise InputError(
                f"a variance needs at least {correction + 1} networks, found {self.members}: add members, or choose "
                "correction=0"
            )
        return self.deviations / (self.members - correction)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the average predictive in nats (examples, ...), the total uncertainty."""
        if self.expected_entropy is None:
            raise InputError(f'{self.output} have no entropy: summarise with output="probabilities"')
        found: Tensor = torch.special.entr(self.mean).sum(1)
        return found

    @property
    def mutual_information(self) -> Tensor:
        """H(mean) - mean of H in nats (examples, ...): how much the networks disagree, 0 when they are one function."""
        total = self.entropy  # asks for probabilities
        assert self.expected_entropy is not None
        return (total - self.expected_entropy).clamp(min=0)

    def merge(self, other: Summary) -> Summary:
        """The summary of both populations together, exactly (Chan, Golub and LeVeque).

        With n and m networks of means p and q, deviations = deviations_n + deviations_m + (q - p)^2 n m / (n + m).
        """
        if self.output != other.output or self.mean.shape != other.mean.shape:
            raise InputError(
                f"expected summaries of the same predictions, found {self.output} {tuple(self.mean.shape)} and "
                f"{other.output} {tuple(other.mean.shape)}: summarise the same inputs in the same way"
            )
        members, share = self.members + other.members, other.members / (self.members + other.members)
        gap = other.mean - self.mean
        deviations = self.deviations + other.deviations + gap.square() * (self.members * share)
        entropy = None
        if self.expected_entropy is not None and other.expected_entropy is not None:
            entropy = torch.lerp(self.expected_entropy, other.expected_entropy, share)
        return Summary(self.output, members, self.mean + share * gap, deviations, entropy)


def summarise(
    model: nn.Module,
    population: Networks,
    inputs: Inputs,
    *,
    output: Output = "probabilities",
    **options: Unpack[PredictOptions],
) -> Summary:
    """Run every network of a population over `inputs`, and keep mean, variance and expected entropy only.

    >>> from onebasin.population import Population
    >>> population = Population.from_stacked({"weight": torch.tensor([[[9e9], [0.0]], [[0.0], [9e9]]])})
    >>> found = summarise(nn.Linear(1, 2, bias=False), population, torch.tensor([[1.0]]))
    >>> found.mean, found.mutual_information  # two networks that are sure of different classes: log 2
    (tensor([[0.5000, 0.5000]], dtype=torch.float64), tensor([0.6931], dtype=torch.float64))

    Args:
        model: the function; left exactly as it was.
        population: a Population, or a Posterior that is drawn from.
        inputs: as in `predict`.
        output: as in `predict`; here probabilities are computed in float64.
        options: as in `predict`.

    Raises:
        InputError: as `predict`.
    """
    check_output(output, options)
    whole: Summary | None = None
    with passes(model, population, inputs, kept=_KEPT, **options) as chunks:
        for start, part in chunks:
            if output == "probabilities":
                check_classes(part)
            for number, own in enumerate(part):
                single = _single(own, output, start + number)
                whole = single if whole is None else whole.merge(single)
    assert whole is not None  # there is at least one network
    return whole


def _single(outputs: Tensor, output: Output, number: int) -> Summary:
    """The summary of one network that returns `outputs` (examples, ...)."""
    values, entropy = outputs.double(), None
    if output == "probabilities":
        values = values.softmax(1)
        entropy = torch.special.entr(values).sum(1)
    check_nan(values[None], number)
    if not bool(values.isfinite().all()):
        raise InputError(
            f"expected finite numbers from every network, found infinity from network {number}: it has no variance, so "
            "leave the network out, or ask predict for the average alone"
        )
    return Summary(output, 1, values, torch.zeros_like(values), entropy)
