"""Which members of a population belong together: k-means over whole networks, without holding them.

Restarts are tried on a random projection (N, 128) of the population, which keeps distances within some percent; the
best one is then improved on the weights themselves, two readings per step, until no member changes its cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.parallel import Executor, SerialExecutor
from onebasin.population import Population
from onebasin.posterior.layout import FlatLayout, vector_dtype
from onebasin.posterior.moments import Deviations, moments

PROJECTED = 128


@dataclass(frozen=True, eq=False)
class Clusters:
    """What `clusters` found.

    Attributes:
        labels: the cluster of each member, int64 (N,), numbered by first appearance.
        inertia: sum of squared distances of members to the mean of their cluster.
        steps: steps on the weights until nothing changed.
    """

    labels: Tensor
    inertia: float
    steps: int


def clusters(
    population: Population,
    layout: FlatLayout,
    count: int,
    *,
    restarts: int = 10,
    steps: int = 50,
    seed: int = 0,
    executor: Executor | None = None,
) -> Clusters:
    """Split a population into `count` clusters by k-means (k-means++ starts, the best of several restarts).

    >>> from onebasin.posterior.layout import flat_layout
    >>> population = Population.from_stacked({"w": torch.tensor([[0.0], [9.0], [1.0], [8.0]])})
    >>> clusters(population, flat_layout(population), 2).labels
    tensor([0, 1, 0, 1])

    None is empty. The population is read by the executor, restarts take place in this process.
    """
    if not 1 <= count <= len(population) or restarts < 1 or steps < 1:
        raise InputError(
            f"expected 1 to {len(population)} clusters (as many as networks), restarts >= 1 and steps >= 1, found "
            f"{count}, {restarts} and {steps}: ask for fewer clusters or give more networks"
        )
    readers, generator = executor or SerialExecutor(), torch.Generator().manual_seed(seed)
    points = _projected(population, layout, generator, readers)
    labels, _ = min((_lloyd(points, count, steps, generator) for _ in range(restarts)), key=lambda pair: pair[1])
    return _improved(population, layout, labels, steps, readers)


def _projected(population: Population, layout: FlatLayout, generator: torch.Generator, readers: Executor) -> Tensor:
    """The members (N, d), float64, d <= 128, distances about kept; the weights themselves where there are few."""
    whole = torch.zeros(len(population), dtype=torch.int64)
    centre = moments(population, layout.names, whole, readers).mean
    dtype = vector_dtype(layout)
    if layout.size > PROJECTED:
        turn = torch.randn(layout.size, PROJECTED, generator=generator, dtype=dtype) / PROJECTED**0.5
    else:
        turn = torch.eye(layout.size, dtype=dtype)
    return Deviations(population, layout, centre, executor=readers).times(turn.to(centre.device)).double().cpu()


def _lloyd(points: Tensor, count: int, steps: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Labels (N,) and inertia after Lloyd's steps from one k-means++ start."""
    centres = points[_spread_out(points, count, generator)]
    labels = torch.full((len(points),), -1)
    distances = torch.zeros(len(points), dtype=torch.float64)
    for _ in range(steps):
        distances, nearest = _squared(points, centres).min(1)
        nearest = _none_empty(nearest, distances, count)
        if torch.equal(nearest, labels):
            break
        labels = nearest
        centres = torch.stack([points[labels == cluster].mean(0) for cluster in range(count)])
    return labels, float(distances.sum())


def _spread_out(points: Tensor, count: int, generator: torch.Generator) -> list[int]:
    """Starts by k-means++: each with a probability in proportion to its squared distance from those before."""
    chosen = [int(torch.randint(len(points), (), generator=generator))]
    nearest = _squared(points, points[chosen])[:, 0]
    for _ in range(count - 1):
        nearest[chosen] = 0.0
        odds = (
            nearest if bool((nearest > 0).any()) else torch.ones_like(nearest).index_fill(0, torch.tensor(chosen), 0.0)
        )
        chosen.append(int(torch.multinomial(odds, 1, generator=generator)))
        nearest = torch.minimum(nearest, _squared(points, points[chosen[-1:]])[:, 0])
    return chosen


def _squared(points: Tensor, centres: Tensor) -> Tensor:
    """Squared distances (N, K)."""
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").square()


def _none_empty(labels: Tensor, distances: Tensor, count: int) -> Tensor:
    """Give each empty cluster the member that is farthest from its centre, out of clusters with several."""
    labels, distances = labels.clone(), distances.clone()
    for cluster in range(count):
        sizes = torch.bincount(labels, minlength=count)
        if not int(sizes[cluster]):
            farthest = int(distances.masked_fill(sizes[labels] < 2, -1.0).argmax())
            labels[farthest], distances[farthest] = cluster, 0.0
    return labels


def _improved(population: Population, layout: FlatLayout, labels: Tensor, steps: int, readers: Executor) -> Clusters:
    """Lloyd's steps on the weights: one reading for the means, and one for the distances to them."""
    count = int(labels.max()) + 1
    labels, inertia = _by_appearance(labels), 0.0
    for step in range(1, steps + 1):
        known = moments(population, layout.names, labels, readers)
        inertia = float(known.squares.sum())
        nearest = _by_appearance(_nearest(population, layout, known.mean, count, readers))
        if torch.equal(nearest, labels):
            return Clusters(labels, inertia, step)
        labels = nearest
    return Clusters(labels, float(moments(population, layout.names, labels, readers).squares.sum()), steps)


def _nearest(population: Population, layout: FlatLayout, means: Tensor, count: int, readers: Executor) -> Tensor:
    """The cluster with the nearest mean (K, D) for each member (N,).

    |x - m_k|^2 = |x - c|^2 + |m_k - c|^2 - 2 <x - c, m_k - c>, with c the middle of all means. The first term is the
    same for all k, and is only read where a cluster is empty and takes the member that is farthest from its own.
    """
    middle = means.mean(0, keepdim=True)
    offsets = (means - middle).to(vector_dtype(layout))
    apart = Deviations(population, layout, middle, executor=readers)
    score = (offsets.double().square().sum(1) - 2 * apart.times(offsets.T.contiguous()).double()).cpu()
    distances, labels = score.min(1)
    if int(torch.bincount(labels, minlength=count).min()):
        return labels
    return _none_empty(labels, distances + apart.lengths().cpu(), count)


def _by_appearance(labels: Tensor) -> Tensor:
    """Number clusters in the order in which they appear first."""
    order = {old: new for new, old in enumerate(dict.fromkeys(labels.tolist()))}
    return torch.tensor([order[old] for old in labels.tolist()])
