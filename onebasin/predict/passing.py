"""Every network of a crowd over some inputs, chunk by chunk, wherever the work runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onebasin.calling import Inputs, call_arguments
from onebasin.cluster import Cluster, Needs, Places, as_arrived, cluster_for, settled
from onebasin.errors import StatisticsWarning
from onebasin.norms import ROOM, Measured, norms_used, refreshed, stale
from onebasin.population import Population
from onebasin.population.parting import parts
from onebasin.posterior import Posterior
from onebasin.predict.batches import batches, examples_in
from onebasin.predict.crowd import one_by_one, predictions, side_by_side, vectorises
from onebasin.predict.drawing import Crowd, Drawn, Reel, first_of, networks_of
from onebasin.predict.portions import Portion, check_rows, footprint, portion

_COPIES = 2  # of activations and weights: libraries lay them out anew for convolutions
Shard = Population | range  # networks, or the numbers of those that the worker draws itself


class Options(Places, total=False):
    """What `predict` may also be told; where it runs is said as in `Places`.

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
    model: nn.Module, crowd: Crowd, inputs: Inputs, *, kept: int, **options: Unpack[Options]
) -> Iterator[Iterator[tuple[int, Tensor]]]:
    """Open an iterator of (number of the first network, what a chunk of networks returns (n, examples, ...)).

    A worker reads or draws the networks of its chunk itself.

    Args:
        model: the function.
        crowd: a Population, or a Posterior that is drawn from.
        inputs: as in `predict`.
        kept: networks whose outputs the caller holds at a time, counted by their bytes.
        options: as in `predict`.
    """
    networks = _networks(crowd, options)
    sizes = portion(model, first_of(networks), inputs, chunk=options.get("chunk"), batch=options.get("batch"))
    if (note := stale_statistics(model, crowd, inputs, options)) is not None:
        warnings.warn(note, StatisticsWarning, stacklevel=4)  # passes <- contextlib <- predict <- the user
    with cluster_for(options, **needs(model, crowd, inputs, kept, options)) as cluster:
        run = _Run(model, sizes, networks, together=_vectorises(model, networks, inputs, options))
        statistics = _measured_on(crowd, options)
        with closing(_chunks(cluster, run, (inputs, statistics), options.get("progress"))) as chunks:
            yield chunks


def stale_statistics(model: nn.Module, crowd: Crowd, inputs: Inputs, options: Mapping[str, Any]) -> str | None:
    """A sentence about running statistics that draws do not have, None where all is well or was said to be."""
    if not isinstance(crowd, Posterior) or options.get("statistics") is not None:
        return None
    if not any(crowd.spec[name].dtype.is_floating_point for name in crowd.layout.others):
        return None
    names = norms_used(
        model,
        first_of(networks_of(crowd, 1, 0)),
        inputs,
        constant=crowd.constant_statistics,
        size=_chosen_batch(options),
    )
    remedy = (
        "give statistics=, inputs such as those of training (on the command line --statistics), or statistics=False to "
        "keep them"
    )
    return stale("draws of the posterior", names, remedy) if names else None


def _measured_on(crowd: Crowd, options: Mapping[str, Any]) -> Inputs | None:
    """The inputs on which the statistics of draws are measured, None where they are not."""
    given = options.get("statistics")
    return given if isinstance(crowd, Posterior) and given is not None and given is not False else None


def needs(model: nn.Module, crowd: Crowd, inputs: Inputs, kept: int, options: Mapping[str, Any]) -> Needs:
    """The memory of `passes` with these arguments: of one worker, and of the caller with what it keeps.

    Nothing is measured, and nothing said, where no `memory` is given.
    """
    if options.get("memory") is None:
        return Needs(each=0, here=0)
    networks = _networks(crowd, options)
    first = first_of(networks)
    sizes = portion(model, first, inputs, chunk=options.get("chunk"), batch=options.get("batch"))
    own, examples = footprint(model, first, inputs), examples_in(inputs)
    weights = sum(tensor.nbytes for tensor in first.values())
    given = sum(leaf.nbytes for leaf in tree_leaves(call_arguments(inputs)) if isinstance(leaf, Tensor))
    drawn = 2 * crowd.nbytes if isinstance(crowd, Posterior) else 0
    running = _COPIES * sizes.chunk * (min(sizes.batch, examples) * own.activations + weights)
    measuring = _refreshing(crowd, options)
    # Outputs of a chunk are made, packed, and wait in the caller; inputs are read packed.
    return Needs(
        each=running + measuring + 4 * sizes.chunk * examples * own.outputs + 2 * (given + weights) + drawn,
        here=given + kept * examples * own.outputs,
    )


def _refreshing(crowd: Crowd, options: Mapping[str, Any]) -> int:
    """Bytes for measuring running statistics: the inputs, packed and not, and the activations of a pass."""
    given = _measured_on(crowd, options)
    if given is None:
        return 0
    held = sum(leaf.nbytes for leaf in tree_leaves(call_arguments(given)) if isinstance(leaf, Tensor))
    return 2 * held + _COPIES * ROOM


def _networks(crowd: Crowd, options: Mapping[str, Any]) -> Population | Drawn:
    return networks_of(crowd, options.get("draws", 100), options.get("seed", 0))


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
    cluster: Cluster, run: _Run, inputs: tuple[Inputs, Inputs | None], progress: Callable[[int, int], None] | None
) -> Generator[tuple[int, Tensor], None, None]:
    done = 0
    for found in cluster.map(run, run.shards(), shared=settled(inputs)):
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
