"""Random changes of mini-batches in training: crops and flips of images, mixtures of examples.

Transforms act on the rows of a step, (chains, n, ...), after they have been taken out of the data and before the
gradient, all examples at once. Their random numbers derive from (seed, chain, step) alone, so they are the same
whoever computes a chain and wherever a run was interrupted. Data that are kept, log densities and statistics never see
them.

With changed examples the training no longer descends the posterior of the data: an image counts once for each of its
versions, but the potential weighs it once, and mixtures have targets that were never observed. Tempering and cold
posteriors are discussed in these terms (Wenzel et al., 2020; Izmailov et al., 2021; Nabarro et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from onebasin.errors import InputError


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The examples of one step of every chain.

    Attributes:
        inputs: the tensors of the inputs, each (chains, n, ...).
        targets: (chains, n, ...).
        partners: the targets of the examples that were mixed in, shaped as `targets`; None without mixtures.
        share: what `targets` count, and 1 - share what `partners` count, (chains, n); None without mixtures.
    """

    inputs: list[Tensor]
    targets: Tensor
    partners: Tensor | None = None
    share: Tensor | None = None


class BatchTransform(Protocol):
    """A random change of mini-batches. A run on disk is compared by the `repr` of its transforms."""

    def check(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        """Raise `InputError` for data (N, ...) that cannot be changed so."""

    def apply(self, batch: MiniBatch, generators: Sequence[torch.Generator]) -> MiniBatch:
        """The changed mini-batch; `generators` holds one per chain."""


def is_image(values: Tensor) -> bool:
    """Whether examples on the first axis are images (channels, height, width)."""
    return values.dim() == 4


def check_images(inputs: Sequence[Tensor], name: str) -> tuple[int, int]:
    """Height and width of the images among the inputs, which all have the same."""
    sizes = {tuple(leaf.shape[-2:]) for leaf in inputs if is_image(leaf)}
    if len(sizes) != 1:
        found = ", ".join(str(tuple(leaf.shape)) for leaf in inputs)
        raise InputError(
            f"expected images (examples, channels, height, width) of one size for {name}, found inputs of shape "
            f"{found}: give images so, as in x.reshape(-1, 1, 28, 28), or leave {name} out of augment"
        )
    return cast(tuple[int, int], sizes.pop())


def is_map(targets: Tensor, size: tuple[int, int]) -> bool:
    """Whether targets (..., height, width) have one entry per pixel."""
    return targets.dim() >= 3 and tuple(targets.shape[-2:]) == size


@dataclass(frozen=True)
class RandomCrop:
    """Random crops: images are padded on all sides, and a window of the old size is cut out of each.

    Images among the inputs, (examples, channels, height, width), of one example get the same window.

    Attributes:
        padding: pixels on each side; windows are shifted by up to so many, both ways.
        fill: the value of padded pixels.
    """

    padding: int = 4
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.padding, int) or isinstance(self.padding, bool) or self.padding < 1:
            raise InputError(
                f"expected a whole number of pixels from 1 on as padding, found {self.padding!r}: give padding=4"
            )

    def check(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        """Raise for data without images, and for targets with one entry per pixel."""
        if is_map(targets, check_images(inputs, "crop")):
            raise InputError(
                f"expected one target per image for crop, found targets of shape {tuple(targets.shape)} with one per "
                'pixel: padded pixels have no target; leave crop out, as in augment=("flip",)'
            )

    def apply(self, batch: MiniBatch, generators: Sequence[torch.Generator]) -> MiniBatch:
        """Cut a window out of every image."""
        count, reach = batch.targets.shape[1], 2 * self.padding + 1
        corners = torch.stack([torch.randint(reach, (2, count), generator=one) for one in generators])
        down, right = corners.transpose(0, 1).flatten(1)
        return replace(batch, inputs=[self._cut(leaf, down, right) for leaf in batch.inputs])

    def _cut(self, images: Tensor, down: Tensor, right: Tensor) -> Tensor:
        if images.dim() != 5:
            return images
        height, width = images.shape[-2:]
        padded = F.pad(images.flatten(0, 1), (self.padding,) * 4, value=self.fill)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view (B, channels, reach, reach, height, width)
        rows = torch.arange(len(padded), device=images.device)
        return windows[rows, :, down.to(images.device), right.to(images.device)].reshape(images.shape)


@dataclass(frozen=True)
class RandomFlip:
    """Random horizontal flips of images; targets with one entry per pixel are flipped too.

    Attributes:
        probability: that an image is flipped.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise InputError(f"expected a probability of flips from 0 to 1, found {self.probability}: give 0.5")

    def check(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        """Raise for data without images."""
        check_images(inputs, "flip")

    def apply(self, batch: MiniBatch, generators: Sequence[torch.Generator]) -> MiniBatch:
        """Flip some images."""
        count = batch.targets.shape[1]
        flipped = torch.stack([torch.rand(count, generator=one) < self.probability for one in generators])
        images = [leaf for leaf in batch.inputs if leaf.dim() == 5]
        size = cast(tuple[int, int], tuple(images[0].shape[-2:]))
        inputs = [_flip(leaf, flipped) if leaf.dim() == 5 else leaf for leaf in batch.inputs]
        if batch.targets.dim() < 4 or not is_map(batch.targets, size):
            return replace(batch, inputs=inputs)
        partners = None if batch.partners is None else _flip(batch.partners, flipped)
        return replace(batch, inputs=inputs, targets=_flip(batch.targets, flipped), partners=partners)


def _flip(values: Tensor, flipped: Tensor) -> Tensor:
    """The last axis of `values` (chains, n, ...) reversed where `flipped` (chains, n)."""
    chosen = flipped.to(values.device).reshape(*flipped.shape, *[1] * (values.dim() - 2))
    return torch.where(chosen, values.flip(-1), values)


@dataclass(frozen=True)
class Mixup:
    """Mixtures of examples (Zhang et al., 2018): x = s x_i + (1 - s) x_j, judged by both targets.

        log likelihood = s log p(y_i | x) + (1 - s) log p(y_j | x),    s ~ Beta(alpha, alpha)

    One s per mini-batch and chain; j is a random order of the same mini-batch. For classes this is the cross-entropy
    with soft targets; for other likelihoods it is the same mixture of log likelihoods.

    Attributes:
        alpha: how evenly examples are mixed; small values leave most as they are.
    """

    alpha: float = 0.2

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise InputError(f"expected alpha above 0 for mix-up, found {self.alpha}: give alpha=0.2")

    def check(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        """Raise for inputs that are no real numbers."""
        odd = [leaf for leaf in inputs if not leaf.is_floating_point()]
        if odd:
            raise InputError(
                f"expected real inputs for mixup, found {odd[0].dtype}: token ids and other whole numbers cannot be "
                "averaged; leave mixup out of augment"
            )

    def apply(self, batch: MiniBatch, generators: Sequence[torch.Generator]) -> MiniBatch:
        """Mix every example with another one of its mini-batch."""
        chains, count = batch.targets.shape[:2]
        device = batch.targets.device
        order = torch.stack([torch.randperm(count, generator=one) for one in generators]).to(device)
        share = torch.tensor([self._share(one) for one in generators], dtype=torch.float64)
        each = torch.arange(chains, device=device)[:, None]
        mixed = []
        for leaf in batch.inputs:
            weight = share.to(leaf).reshape(-1, *[1] * (leaf.dim() - 1))
            mixed.append(torch.lerp(leaf[each, order], leaf, weight))
        kind = mixed[0].dtype
        columns = share.to(device=device, dtype=kind)[:, None].expand(chains, count).contiguous()
        return MiniBatch(mixed, batch.targets, batch.targets[each, order], columns)

    def _share(self, generator: torch.Generator) -> float:
        """A draw of Beta(alpha, alpha): the share of one of two gamma numbers in their sum."""
        first, second = (_log_gamma(self.alpha, generator) for _ in range(2))
        return float(torch.sigmoid(torch.tensor(first - second, dtype=torch.float64)))


def _log_gamma(shape: float, generator: torch.Generator) -> float:
    """The logarithm of a gamma number with this shape (Marsaglia and Tsang, 2000); torch's own takes no generator.

    Gamma(shape) = Gamma(shape + 1) U^(1 / shape), in logarithms, for small shapes make numbers below any float.
    """
    d = shape + 2 / 3
    while True:
        normal = float(torch.randn((), generator=generator, dtype=torch.float64))
        uniforms = torch.rand(2, generator=generator, dtype=torch.float64)
        cube = (1 + normal / math.sqrt(9 * d)) ** 3
        if cube <= 0:
            continue
        accept, power = (math.log1p(-float(one)) for one in uniforms)
        if accept < 0.5 * normal**2 + d - d * cube + d * math.log(cube):
            return math.log(d * cube) + power / shape


def changed(batch: MiniBatch, transforms: Sequence[BatchTransform], generators: Sequence[torch.Generator]) -> MiniBatch:
    """The mini-batch after all transforms in turn."""
    for transform in transforms:
        batch = transform.apply(batch, generators)
    return batch


TRANSFORMS: dict[str, type[RandomCrop] | type[RandomFlip] | type[Mixup]] = {
    "crop": RandomCrop,
    "flip": RandomFlip,
    "mixup": Mixup,
}


def transforms_of(augment: object) -> tuple[BatchTransform, ...]:
    """Transforms from words and objects, one or several.

    >>> transforms_of(("crop", Mixup(alpha=1.0)))
    (RandomCrop(padding=4, fill=0.0), Mixup(alpha=1.0))
    """
    several = augment if isinstance(augment, tuple | list) else () if augment is None else (augment,)
    chosen: list[BatchTransform] = []
    for one in several:
        transform = TRANSFORMS[one]() if isinstance(one, str) and one in TRANSFORMS else one
        if isinstance(transform, str | type) or not callable(getattr(transform, "apply", None)):
            raise InputError(
                f"expected transforms in augment out of {', '.join(TRANSFORMS)}, or objects such as "
                f'onebasin.RandomCrop(padding=4), found {one!r}: give augment=("crop", "flip")'
            )
        chosen.append(transform)
    if sum(isinstance(one, Mixup) for one in chosen) > 1:
        raise InputError('expected mixup once in augment, found it twice: give augment=("crop", "flip", "mixup")')
    return tuple(chosen)
