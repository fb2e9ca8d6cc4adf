"""Metrics over pixels, with images as what is drawn: overlap of classes, calibration, and scores in bins.

Pixels of one image are not independent, so a bootstrap draws images. What it needs of an image are a few sums, however
many pixels it has: `areas`, `bin_sums` and `score_counts` make them, (images, ...); `iou_of`, `image_gaps` and
`separation_of` take them, with `weights` (..., images) as elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onebasin.errors import InputError
from onebasin.metrics.arrays import accepts_arrays
from onebasin.metrics.calibration import POOLED, PSEUDO, Gaps, Reliability, bins_of
from onebasin.metrics.detection import separation
from onebasin.metrics.probabilities import as_weights


@accepts_arrays
def iou(
    predicted: Tensor,
    targets: Tensor,
    classes: int | None = None,
    *,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Intersection over union of each class, over the pixels of all images: hits / (predicted + targets - hits).

    >>> predicted, targets = torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 255]])
    >>> iou(predicted, targets, 3, ignore_index=255)
    tensor([0.5000, 0.5000,    nan], dtype=torch.float64)

    Args:
        predicted: class numbers (images, ...).
        targets: class numbers (images, ...).
        classes: how many there are; None for as many as occur.
        ignore_index: a class number of targets whose pixels do not count.
        weights: (..., images).

    Returns:
        (..., classes); NaN for a class that neither occurs nor is predicted.
    """
    if predicted.shape != targets.shape or predicted.dim() < 2 or predicted.is_floating_point():
        raise InputError(
            f"expected class numbers (images, ...) of one shape, found {predicted.dtype} {tuple(predicted.shape)} and "
            f"{tuple(targets.shape)}; give probabilities.argmax(1)"
        )
    counted = torch.ones_like(targets, dtype=torch.bool) if ignore_index is None else targets != ignore_index
    every = torch.cat([predicted[counted], targets[counted]])
    if not len(every):
        raise InputError(f"expected pixels to compare, found none but ignore_index={ignore_index}; check the targets")
    number = int(every.max()) + 1 if classes is None else classes
    if int(every.min()) < 0 or int(every.max()) >= number:
        raise InputError(
            f"expected class numbers from 0 to {number - 1}, found {int(every.min())} to {int(every.max())}; number "
            "the classes from 0, or give ignore_index"
        )
    return iou_of(areas(predicted.flatten(1), targets.flatten(1), counted.flatten(1), number), weights)


@accepts_arrays
def mean_iou(
    predicted: Tensor,
    targets: Tensor,
    classes: int | None = None,
    *,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean of `iou` over the classes that occur or are predicted; arguments as there.

    >>> mean_iou(torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]]))  # (1/2 + 2/3) / 2
    tensor(0.5833, dtype=torch.float64)
    """
    return iou(predicted, targets, classes, ignore_index=ignore_index, weights=weights).nanmean(-1)


def areas(predicted: Tensor, targets: Tensor, counted: Tensor, classes: int) -> Tensor:
    """Pixels of each image that are hit, predicted and true, of each class: float64 (images, 3, classes).

    >>> areas(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]]), torch.tensor([[True, True, True]]), 2)
    tensor([[[1., 1.],
             [1., 2.],
             [2., 1.]]], dtype=torch.float64)

    Args:
        predicted: class numbers (images, pixels).
        targets: class numbers (images, pixels).
        counted: whether a pixel counts (images, pixels).
        classes: how many.
    """
    ones = counted.double()
    labels = torch.where(counted, targets, 0)
    hits = ones * (predicted == labels)
    parts = [_sums(place, values, classes) for place, values in ((labels, hits), (predicted, ones), (labels, ones))]
    return torch.stack(parts, 1)


def iou_of(areas: Tensor, weights: Tensor | None = None) -> Tensor:
    """Intersection over union (..., classes) from `areas` (images, 3, classes)."""
    total = _weighed(areas, weights)
    hits, predicted, true = total.unbind(-2)
    return hits / (predicted + true - hits)


def bin_sums(confidence: Tensor, right: Tensor, counted: Tensor, bins: int) -> Tensor:
    """Pixels of each image, their confidence, and how many are right, by bins of `ece`: float64 (images, 3, bins).

    >>> bin_sums(torch.tensor([[0.9, 0.3]]), torch.tensor([[True, False]]), torch.tensor([[True, True]]), 2)
    tensor([[[1.0000, 1.0000],
             [0.3000, 0.9000],
             [0.0000, 1.0000]]], dtype=torch.float64)

    Args:
        confidence: largest probability (images, pixels).
        right: whether that class is the target (images, pixels).
        counted: whether a pixel counts (images, pixels).
        bins: bins of equal width.
    """
    place, ones = bins_of(confidence, bins), counted.double()
    return torch.stack([_sums(place, ones * values, bins) for values in (ones, confidence, right)], 1)


def image_gaps(sums: Tensor, weights: Tensor | None = None) -> Gaps:
    """The signed parts of the calibration error of pixels, by images; with one pixel per image those of `ece_gaps`.

    The share of bin b is x_b = sum_i w_i g_ib / sum_i w_i n_i, g_ib what image i has in it of rightness less
    confidence, n_i its pixels. Its variance is that of a ratio of sums over images, sum_i (g_ib - n_i x_b)^2 / n^2.
    What resampling cannot show of it is judged as in `ece_gaps`, with as many examples in a bin as would have the
    variance that images show: at least its images, at most its pixels.

    Args:
        sums: of each image, from `bin_sums`, (images, 3, bins).
        weights: (..., images).
    """
    count, confidence, right = sums.unbind(1)
    gap = right - confidence
    pixels = count.sum(1)
    if weights is not None:
        counts = as_weights(weights, len(sums), sums.device)
        values = (counts @ gap) / (counts @ pixels)[..., None]
        nothing = values.new_zeros(values.shape[-1])
        return Gaps(values, nothing, nothing)
    whole = pixels.sum()
    values = gap.sum(0) / whole
    seen = (gap - pixels[:, None] * values).square().sum(0) / whole**2
    share = count.sum(0) / whole
    rate = torch.where(share > 0, right.sum(0) / count.sum(0), 0.5)
    of_rate = (right - count * rate).square().sum(0) / whole**2
    images = (count > 0).sum(0).double()
    spread = rate * (1 - rate)
    alike = (share.square() * spread / of_rate).nan_to_num(nan=0.0, posinf=0.0)
    examples = torch.minimum(torch.maximum(alike, images), count.sum(0)).clamp(min=1)
    more = (POOLED * share).clamp(min=PSEUDO)
    smooth = (examples * rate + more / 2) / (examples + more)
    unseen = share.square() * (smooth * (1 - smooth) - spread).clamp(min=0) / examples
    return Gaps(values, seen + unseen, unseen)


def pixel_reliability(sums: Tensor) -> Reliability:
    """The reliability diagram of all pixels, from `bin_sums` (images, 3, bins)."""
    count, confidence, right = sums.sum(0).unbind(0)
    edges = torch.arange(len(count) + 1, dtype=torch.float64, device=count.device) / len(count)
    return Reliability(edges, count.long(), confidence / count, right / count)


def score_counts(scores: Tensor, counted: Tensor, borders: Tensor) -> Tensor:
    """Pixels of each image by bins of a score: float64 (images, borders + 1).

    >>> score_counts(torch.tensor([[0.1, 0.7, 0.8]]), torch.tensor([[True, True, True]]), torch.tensor([0.5]))
    tensor([[1., 2.]], dtype=torch.float64)

    Args:
        scores: (images, pixels).
        counted: whether a pixel counts (images, pixels).
        borders: between the bins, ascending.
    """
    return _sums(torch.searchsorted(borders, scores.contiguous()), counted.double(), len(borders) + 1)


def separation_of(near: Tensor, far: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """As `separation`, from counts of pixels by bins (images, bins); pixels of one bin are ties.

    >>> found = separation_of(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
    >>> found["auroc"]  # half of the pairs are ties
    tensor(0.7500, dtype=torch.float64)

    Args:
        near: in-distribution pixels.
        far: out-of-distribution pixels of the same images.
        weights: (..., images).
    """
    place = torch.arange(near.shape[1], dtype=torch.float64, device=near.device)
    return separation(place, place, weights=(_weighed(near, weights), _weighed(far, weights)))


def _weighed(sums: Tensor, weights: Tensor | None) -> Tensor:
    """Sums over images (images, *shape), each counted by its weight: (..., *shape)."""
    if weights is None:
        return sums.sum(0)
    counts = as_weights(weights, len(sums), sums.device)
    return (counts @ sums.flatten(1)).reshape(*counts.shape[:-1], *sums.shape[1:])


def _sums(place: Tensor, values: Tensor, size: int) -> Tensor:
    """Sums of values (images, pixels) by place, float64 (images, size)."""
    total = torch.zeros(len(place), size, dtype=torch.float64, device=place.device)
    return total.scatter_add_(1, place, values.double())
