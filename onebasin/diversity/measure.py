"""Mutual information of every pair of networks of a crowd, on inputs they know and on foreign ones."""

from __future__ import annotations

import warnings
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from onebasin.calling import Inputs
from onebasin.cluster import Cluster, Needs, cluster_for
from onebasin.diversity.pairing import Pairs
from onebasin.diversity.report import Diversity
from onebasin.errors import InputError, StatisticsWarning
from onebasin.metrics.concordance import pearson, spearman
from onebasin.metrics.entropy import mutual_information
from onebasin.metrics.pairs import pairwise_mutual_information
from onebasin.population import Population
from onebasin.predict import examples_in
from onebasin.predict.drawing import Crowd, first_of, networks_of
from onebasin.predict.passing import Options, needs, stale_statistics
from onebasin.predict.portions import answers, pieces
from onebasin.predict.predicting import check_classes, check_output, predict, refuse_nan

HELD = 256 << 20  # bytes of probabilities in memory: inputs are cut into pieces that give as many
SLICE = 1 << 24  # probabilities of all networks for some examples: what one worker looks at
_CELLS = 1 << 22  # probabilities that are looked at in float64 at a time
_COPIES = 4  # of the probabilities in memory: scores, themselves, and what is on its way
_MATRICES = 8  # float64 (M, M) that a worker or the caller holds


def diversity(
    model: nn.Module,
    crowd: Crowd,
    inside: Inputs,
    outside: Inputs | None = None,
    *,
    members: int = 1000,
    threshold: float = 0.1,
    closest: int = 10,
    **options: Unpack[Options],
) -> Diversity:
    """Compare every pair of networks as functions, by the mutual information H((p + q) / 2) - (H(p) + H(q)) / 2.

    >>> crowd = Population.from_stacked({"weight": torch.tensor([[[9e9], [0.0]], [[0.0], [9e9]], [[0.0], [9e9]]])})
    >>> found = diversity(nn.Linear(1, 2, bias=False), crowd, torch.tensor([[1.0]]))
    >>> found.matrix[0].tolist(), found.collapse.functions  # log 2 for networks that contradict each other
    ([0.0, 0.6931..., 0.6931...], 2)

    Args:
        model: the function of a classifier; left exactly as it was.
        crowd: a Population, whose `chain` says which networks belong together; or a Posterior that is drawn from, with
            its components as chains.
        inside: inputs like those the networks were made for.
        outside: foreign inputs.
        members: largest number of networks that are compared. Of a larger Population so many are chosen at random by
            `seed`; a Posterior gives as many as `draws` says.
        threshold: pairs whose inside mutual information is at most this share of the median have collapsed
            into one function.
        closest: how many of the closest pairs are listed.
        options: as in `predict`; progress is told for each pass over the networks anew.

    Raises:
        InputError: there are fewer than two networks or two classes, or an option makes no sense.
    """
    check_output("probabilities", options)
    if members < 2 or threshold < 0 or closest < 0:
        raise InputError(
            f"expected members >= 2, threshold >= 0 and closest >= 0, found {members}, {threshold} and {closest}: "
            "correct them"
        )
    numbers, crowd, of = _chosen(crowd, members, options)
    note = stale_statistics(model, crowd, inside, options)
    if note is not None:
        warnings.warn(note, StatisticsWarning, stacklevel=2)
        options = cast("Options", {**options, "statistics": False})  # it has been said
    chain = networks_of(crowd, len(numbers), options.get("seed", 0)).chain
    pairs = Pairs.of(len(numbers), chain)
    foreign: Tensor | None = None
    with cluster_for(options, **_needs(model, crowd, (inside, outside), options)) as cluster:
        own = cast("Options", {**options, "cluster": cluster})
        own.pop("memory", None)  # seen to above
        matrix, whole = _information(model, crowd, inside, own, cluster)
        if outside is not None:
            foreign, far = _information(model, crowd, outside, own, cluster)
    side, other = pairs.side(matrix, examples_in(inside), whole), None
    together: tuple[float | None, float | None] = None, None
    if outside is not None and foreign is not None:
        other = pairs.side(foreign, examples_in(outside), far)
        here, there = pairs.values(matrix), pairs.values(foreign)
        together = pearson(here, there), spearman(here, there)
    collapse, listed = pairs.collapse(matrix, threshold), pairs.closest(matrix, foreign, numbers, closest)
    remarks = () if note is None else (note,)
    return Diversity(numbers, of, side, other, *together, collapse, listed, matrix, foreign, remarks)


def _chosen(crowd: Crowd, members: int, options: Options) -> tuple[Tensor, Crowd, int]:
    """Numbers of the networks to compare, the crowd of them, and how many there were to choose from."""
    if not isinstance(crowd, Population):
        networks_of(crowd, draws := options.get("draws", 100), 0)  # says what is wrong with it
        return _at_least_two(torch.arange(draws)), crowd, draws
    count = len(crowd)
    numbers = torch.arange(count)
    if count > members:
        generator = torch.Generator().manual_seed(options.get("seed", 0))
        numbers = torch.randperm(count, generator=generator)[:members].sort().values
    return _at_least_two(numbers), crowd if count <= members else crowd[numbers], count


def _at_least_two(numbers: Tensor) -> Tensor:
    if len(numbers) < 2:
        raise InputError(f"expected at least 2 networks to compare, found {len(numbers)}: add members")
    return numbers


def _needs(model: nn.Module, crowd: Crowd, inputs: tuple[Inputs, Inputs | None], options: Options) -> Needs:
    """The memory of the passes over both inputs, and of the matrices of pairs."""
    networks = networks_of(crowd, options.get("draws", 100), options.get("seed", 0))
    matrices = _MATRICES * 8 * len(networks) ** 2
    found = [needs(model, crowd, own, _COPIES * len(networks), options) for own in inputs if own is not None]
    here = max(min(one["here"], _COPIES * HELD) for one in found)
    return Needs(each=max(one["each"] for one in found) + min(here, 16 * SLICE) + matrices, here=here + matrices)


def _information(
    model: nn.Module, crowd: Crowd, inputs: Inputs, options: Options, cluster: Cluster
) -> tuple[Tensor, float]:
    """Mutual information of every pair, float64 (M, M), and of all networks together; means over examples."""
    total, whole, examples = torch.zeros(()), 0.0, 0
    networks = networks_of(crowd, options.get("draws", 100), options.get("seed", 0))
    answer = answers(model, first_of(networks), inputs)
    for piece in pieces(answer, len(networks), inputs, HELD):
        found = _probabilities(model, crowd, piece, options)
        probabilities = found.movedim(2, -1).flatten(1, -2)  # places of a network that speaks about many
        step = max(1, SLICE // probabilities[:, 0].numel())
        slices = (part.contiguous() for part in probabilities.split(step, dim=1))
        for matrix, everybody in cluster.map(_compared, slices, shared=None):
            total, whole = total + matrix, whole + everybody
        examples += probabilities.shape[1]
    return total / examples, whole / examples


def _compared(shared: None, probabilities: Tensor) -> tuple[Tensor, float]:
    """Mutual information of every pair (M, M) and of all networks (M, examples, classes), summed over examples."""
    matrix = probabilities.shape[1] * pairwise_mutual_information(probabilities).cpu()
    step = max(1, _CELLS // probabilities[:, 0].numel())
    return matrix, sum(float(mutual_information(part).sum()) for part in probabilities.split(step, dim=1))


def _probabilities(model: nn.Module, crowd: Crowd, inputs: Inputs, options: Options) -> Tensor:
    """What networks predict; for half precision in float32, because rounded probabilities do not sum to 1."""
    scores = predict(model, crowd, inputs, output="logits", **options)
    check_classes(scores)
    probabilities = scores.softmax(2) if scores.dtype.itemsize >= 4 else scores.softmax(2, dtype=torch.float32)
    refuse_nan(probabilities, 0)
    return probabilities
