"""What an evaluation keeps of images: sums over the pixels of each, made block by block, never all predictions.

Pixels are the examples of every metric; images are what a bootstrap draws, because pixels of one image depend on each
other. A block holds as many images as `_BLOCK_VALUES` numbers of one network allow; networks run over it one after the
other, so that memory depends neither on their number nor on that of the images. Two things are kept of a random choice
of pixels only: logarithms of the predictive, for a temperature, and parameters of all networks, for interval widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.evaluation.figures import LEVELS
from onebasin.functional import IGNORED, Head, Inputs, batches
from onebasin.metrics import (
    areas,
    as_class_numbers,
    bin_sums,
    depth_sums,
    mixture_quantile,
    ood_scores,
    score_counts,
)
from onebasin.parallel import Progress
from onebasin.posterior import Networks, Predictive, PredictOptions, check_nan, forward_passes

_BLOCK_VALUES = 1 << 18  # outputs of one network for a block of images: 2 MB in float64, and some tens of such tensors
_SAMPLE_VALUES = 1 << 22  # logarithms that are kept for a temperature: 32 MB
_WIDTHS = 256  # values of an image whose intervals are measured
_SCORE_BINS = 512

Sums = dict[str, Tensor]
Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Pixels of each image, chosen at random.

    Attributes:
        logs: logarithms of the average predictive (images, classes, pixels).
        targets: class numbers (images, pixels).
        counted: False where an image had fewer pixels that count.
    """

    logs: Tensor
    targets: Tensor
    counted: Tensor


@dataclass(frozen=True, eq=False)
class ClassSums:
    """What is kept of images with class numbers.

    Attributes:
        members: networks.
        means: sums over pixels (images,): pixels, accuracy, nll, brier, mutual_information; agreement and
            total_variation with a reference.
        areas: hits, predicted and true pixels of each class (images, 3, classes).
        bins: pixels, confidence and rightness in bins of the confidence (images, 3, bins).
        scores: means over pixels of the scores of `ood_scores`, (images,) each.
        sampled: pixels for a temperature.
    """

    members: int
    means: Sums
    areas: Tensor
    bins: Tensor
    scores: Sums
    sampled: Sampled


def class_sums(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    prepare: Prepare,
    shape: Sequence[int],
    bins: int,
    options: PredictOptions,
    reference: Networks | Tensor | None = None,
    second: PredictOptions | None = None,
) -> ClassSums:
    """Run the networks over images with class numbers (images, ...), `IGNORED` where a pixel does not count.

    Args:
        model: the function.
        networks: whose average predictive is judged.
        inputs: the images.
        targets: class numbers (images, ...).
        prepare: outputs (members, images, ...) -> logits (members, images, classes, ...).
        shape: of the logits of one image.
        bins: of the calibration error.
        options: how networks run.
        reference: other networks, or their average predictive (images, classes, ...).
        second: how those run.
    """
    classes = shape[0]
    pixels = targets[0].numel()
    most = max(1, min(pixels, _SAMPLE_VALUES // (len(targets) * classes)))
    generator = torch.Generator().manual_seed(options.seed)
    parts: list[dict[str, Tensor]] = []
    members = 0
    for rows, part, own in blocks(
        inputs, classes * pixels, options, passes=1 if isinstance(reference, Tensor | None) else 2
    ):
        predictive = Predictive.of(model, networks, part, own, prepare=prepare)
        members = predictive.members
        p, logs = predictive.mean.flatten(2), predictive.log_mean.flatten(2)
        goals = targets[rows].flatten(1).to(p.device)
        counted = goals != IGNORED
        labels = as_class_numbers(torch.where(counted, goals, 0).reshape(-1), _flat(p)).reshape(goals.shape)
        confidence, predicted = p.max(1)
        of_target = p.gather(1, labels[:, None])[:, 0]
        each = {
            "pixels": torch.ones_like(confidence),
            "accuracy": (predicted == labels).double(),
            "nll": -logs.gather(1, labels[:, None])[:, 0],
            "brier": p.square().sum(1) - 2 * of_target + 1,
            "mutual_information": predictive.mutual_information.flatten(1),
        }
        if reference is not None:
            other = _reference(model, reference, rows, part, prepare, own, second).to(p.device).double().flatten(2)
            each["agreement"] = (other.argmax(1) == predicted).double()
            each["total_variation"] = (p - other).abs().sum(1) / 2
        chosen = _chosen(counted, most, generator)
        parts.append(
            {f"means.{name}": _summed(values, counted) for name, values in each.items()}
            | {f"scores.{name}": values.mean(1) for name, values in _scores(predictive).items()}
            | {
                "areas": areas(predicted, labels, counted, classes),
                "bins": bin_sums(confidence, predicted == labels, counted, bins),
                "logs": logs.gather(2, chosen[:, None].expand(-1, classes, -1)),
                "targets": labels.gather(1, chosen),
                "counted": counted.gather(1, chosen),
            }
        )
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return ClassSums(
        members,
        _group(whole, "means"),
        whole["areas"],
        whole["bins"],
        _group(whole, "scores"),
        Sampled(whole["logs"], whole["targets"], whole["counted"]),
    )


def score_means(
    model: nn.Module, networks: Networks, inputs: Inputs, prepare: Prepare, values: int, options: PredictOptions
) -> tuple[Sums, Tensor]:
    """Means over pixels of the scores of `ood_scores` and of the mutual information, (images,) each."""
    parts, information = [], []
    for _, part, own in blocks(inputs, values, options):
        predictive = Predictive.of(model, networks, part, own, prepare=prepare)
        parts.append({name: each.mean(1) for name, each in _scores(predictive).items()})
        information.append(predictive.mutual_information.flatten(1).mean(1))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, torch.cat(information)


def masked_scores(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    mask: Tensor,
    prepare: Prepare,
    values: int,
    options: PredictOptions,
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Of each score the pixels outside and inside of a mask by bins of the score, (images, bins) each.

    Bins hold equally many pixels of the first block of images; within one of them scores count as equal.

    Returns:
        Score -> counts outside (in distribution) and inside (out of distribution); and the mean mutual information of
        each image inside of the mask, (images,), NaN without any such pixel.
    """
    parts: list[dict[str, Tensor]] = []
    borders: dict[str, Tensor] = {}
    for rows, part, own in blocks(inputs, values, options):
        predictive = Predictive.of(model, networks, part, own, prepare=prepare)
        inside = mask[rows].flatten(1).to(predictive.mean.device)
        found: dict[str, Tensor] = {}
        for name, scores in _scores(predictive).items():
            if name not in borders:
                ordered = scores.reshape(-1).sort().values
                places = torch.linspace(0, len(ordered) - 1, _SCORE_BINS + 1)[1:-1].long()
                borders[name] = ordered[places].unique()
            found[f"near.{name}"] = score_counts(scores, ~inside, borders[name])
            found[f"far.{name}"] = score_counts(scores, inside, borders[name])
        information = predictive.mutual_information.flatten(1)
        found["information"] = _summed(information, inside) / inside.sum(1)
        parts.append(found)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    near, far = _group(whole, "near"), _group(whole, "far")
    return {name: (near[name], far[name]) for name in near}, whole["information"]


def value_sums(
    model: nn.Module,
    networks: Networks,
    inputs: Inputs,
    targets: Tensor,
    head: Head,
    size: int,
    levels: Sequence[float],
    options: PredictOptions,
) -> tuple[int, Sums]:
    """Run the networks over examples with values, whose predictive is the mixture of their distributions.

    Args:
        model: the function.
        networks: each gives one distribution per value.
        inputs: the examples.
        targets: (examples, ...), NaN where a value is not known.
        head: the distribution.
        size: outputs of a network for one example.
        levels: of central intervals.
        options: how networks run.

    Returns:
        How many networks there are, and sums over the values of each example (examples,): values, square, absolute,
        nll, events (those that have an nll: values at pixels, else examples), inside_L and width_L for each level, and
        curve_0, ... for each level of the figure; with positive targets `depth.` and what `depth_sums` has.
    """
    rows_only = targets.dim() < 3
    positive = not rows_only and bool(((targets > 0) | targets.isnan()).all())
    generator = torch.Generator().manual_seed(options.seed)
    parts: list[Sums] = []
    members = 0
    for rows, part, own in blocks(inputs, size, options):
        mixture = _Mixture(head, targets[rows].double(), joint=rows_only, generator=generator)
        with forward_passes(model, networks, part, own) as chunks:
            for start, outputs in chunks:
                check_nan(outputs, start)
                for network in outputs:
                    mixture.add(network.double())
        members = mixture.members
        parts.append(mixture.sums(levels, positive=positive))
    return members, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class _Mixture:
    """The mixture of the distributions of networks at one block of examples; networks are added and not kept."""

    def __init__(self, head: Head, targets: Tensor, *, joint: bool, generator: torch.Generator) -> None:
        """Begin without networks; with `joint` all values of an example are one event."""
        self.head, self.targets, self.joint, self.members = head, targets, joint, 0
        self._generator = generator
        self._log = self._mean = self._below = torch.zeros(())
        self._kept: list[tuple[Tensor, ...]] = []

    def add(self, outputs: Tensor) -> None:
        """Add a network by its outputs (examples, ...)."""
        parameters, goals = self.head.fitted(outputs, self.targets.to(outputs.device))
        if not self.members:
            self._known = ~goals.isnan()
            self._goals = torch.where(self._known, goals, 0.0)
            self._places = _chosen(self._known.flatten(1), min(_WIDTHS, goals[0].numel()), self._generator)
        density = torch.where(self._known, self.head.log_prob(parameters, self._goals), 0.0)
        density = density.flatten(1).sum(1) if self.joint else density
        mean, below = self.head.mean(parameters), self.head.cdf(parameters, self._goals)
        if self.members:
            self._log, self._mean = torch.logaddexp(self._log, density), self._mean + mean
            self._below = self._below + below
        else:
            self._log, self._mean, self._below = density, mean, below
        self._kept.append(tuple(self._at_places(parameter) for parameter in parameters))
        self.members += 1

    def sums(self, levels: Sequence[float], *, positive: bool) -> Sums:
        """Sums over the values of each example."""
        mean = self._mean / self.members
        apart = (2 * self._below / self.members - 1).abs()
        log = self._log - torch.log(torch.tensor(float(self.members), dtype=torch.float64))
        error = mean - self._goals
        each = {"values": torch.ones_like(error), "square": error.square(), "absolute": error.abs()}
        each |= {f"inside_{level}": (apart <= level).double() for level in levels}
        each |= {f"curve_{place}": (apart <= level).double() for place, level in enumerate(LEVELS)}
        result = {name: _summed(values.flatten(1), self._known.flatten(1)) for name, values in each.items()}
        result["nll"] = -log if self.joint else _summed(-log.flatten(1), self._known.flatten(1))
        result["events"] = torch.ones_like(result["values"]) if self.joint else result["values"]
        for level, width in zip(levels, self._widths(levels), strict=True):
            chosen = self._known.flatten(1).gather(1, self._places)
            share = result["values"] / chosen.sum(1).clamp(min=1)
            result[f"width_{level}"] = _summed(width, chosen) * share
        if positive:
            goals = torch.where(self._known, self._goals, torch.nan)
            result |= {f"depth.{name}": values for name, values in depth_sums(mean, goals).items()}
        return result

    def _widths(self, levels: Sequence[float]) -> Iterator[Tensor]:
        """Widths of central intervals at the chosen places (examples, places), for each level.

        By Cantelli's inequality a quantile of share s lies above mean - std sqrt((1 - s) / s) and below mean + std
        sqrt(s / (1 - s)); that of a mixture lies between those of its members.
        """
        parameters = tuple(torch.stack(each).flatten(1, 2) for each in zip(*self._kept, strict=True))
        mean, std = self.head.mean(parameters), self.head.std(parameters)

        def chance(at: Tensor) -> tuple[Tensor, Tensor]:
            wide = at.expand_as(mean)
            return self.head.cdf(parameters, wide).mean(0), self.head.log_prob(parameters, wide).exp().mean(0)

        for level in levels:
            ends = []
            for share in ((1 - level) / 2, (1 + level) / 2):
                low = (mean - std * ((1 - share) / share) ** 0.5).amin(0)
                high = (mean + std * (share / (1 - share)) ** 0.5).amax(0)
                ends.append(mixture_quantile(chance, low, high, std.amin(0), share))
            yield (ends[1] - ends[0]).reshape(self._places.shape)

    def _at_places(self, parameter: Tensor) -> Tensor:
        """A parameter at the chosen places (examples, places), with an axis of components if it has one."""
        flat = parameter.reshape(*self._known.flatten(1).shape, -1)
        found = flat.gather(1, self._places[..., None].expand(-1, -1, flat.shape[2]))
        return found if parameter.dim() > self._known.dim() else found[..., 0]


def blocks(
    inputs: Inputs, values: int, options: PredictOptions, passes: int = 1
) -> Iterator[tuple[slice, Any, PredictOptions]]:
    """Yield (rows, images, options) for blocks of images of `values` numbers each; progress counts through all blocks.

    Args:
        inputs: all images.
        values: outputs of a network for one image.
        options: how networks run.
        passes: how often networks run over each block.
    """
    cut = list(batches(inputs, max(1, _BLOCK_VALUES // max(1, values))))
    for number, (rows, (arguments, named)) in enumerate(cut):
        own = options
        if options.progress is not None:
            own = replace(options, progress=_continued(options.progress, number, len(cut), passes))
        yield rows, named or arguments, own


def _continued(progress: Progress, number: int, total: int, passes: int) -> Progress:
    """Progress of one block among several."""
    before = [0, 0]  # passes that have ended, networks of the last report

    def report(done: int, whole: int, text: str) -> None:
        if done < before[1]:
            before[0] += 1
        before[1] = done
        progress((number * passes + before[0]) * whole + done, total * passes * whole, text)

    return report


def _reference(
    model: nn.Module,
    reference: Networks | Tensor,
    rows: slice,
    part: Any,
    prepare: Prepare,
    own: PredictOptions,
    second: PredictOptions | None,
) -> Tensor:
    if isinstance(reference, Tensor):
        return reference[rows]
    options = own if second is None else replace(second, progress=own.progress)
    return Predictive.of(model, reference, part, options, prepare=prepare).mean


def _scores(predictive: Predictive) -> Sums:
    """The scores of `ood_scores` at each pixel (images, pixels)."""
    p, logits, information = predictive.mean, predictive.logits, predictive.mutual_information
    found = ood_scores(_flat(p.flatten(2)), _flat(logits.flatten(2)), information.reshape(-1))
    return {name: scores.reshape(len(p), -1) for name, scores in found.items()}


def _flat(values: Tensor) -> Tensor:
    """(images, classes, pixels) as (all pixels, classes)."""
    return values.movedim(1, 2).reshape(-1, values.shape[1])


def _chosen(counted: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Places of `most` random pixels of each image (images, most), those that count first."""
    order = torch.stack([torch.rand(counted.shape[1], generator=generator) for _ in range(len(counted))])
    return (order.to(counted.device) + counted).topk(most, dim=1).indices


def _summed(values: Tensor, counted: Tensor) -> Tensor:
    return torch.where(counted, values, 0.0).double().sum(1)


def _group(tensors: Sums, prefix: str) -> Sums:
    return {name.removeprefix(f"{prefix}."): value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
