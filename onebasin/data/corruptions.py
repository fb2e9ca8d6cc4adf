"""Image corruptions in five severities, after Hendrycks and Dietterich (2019): noise, blur, contrast, light, pixels.

They are computed here from the definitions below, with strengths of our own: numbers do not compare with those of
CIFAR-10-C or ImageNet-C. Lengths are shares of the shorter side, so 8 x 8 and 224 x 224 pixels lose alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onebasin.errors import InputError

SEVERITIES = (1, 2, 3, 4, 5)
_NOISE = (0.04, 0.08, 0.12, 0.18, 0.26)  # standard deviation
_BLUR = (0.03, 0.04, 0.055, 0.075, 0.1)  # standard deviation of the kernel, of the shorter side
_CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)  # what is left of the distance from the mean
_BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)  # added
_PIXELATE = (0.875, 0.75, 0.625, 0.5, 0.375)  # pixels along a side that are left
_REACH = 4.0  # standard deviations that a kernel reaches
_SLACK = 1e-4  # beyond the range, of its width

Range = tuple[float | Tensor, float | Tensor]


def corrupt(
    inputs: Tensor,
    corruption: str = "gaussian_noise",
    severity: int = 3,
    *,
    seed: int = 0,
    range: Range = (0.0, 1.0),
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Corrupted images of the shape, dtype and device of the inputs, which stay as they are.

    In units in which the range is [0, 1], and cut to it afterwards:

    - "gaussian_noise": + normal noise, a number for each pixel and channel;
    - "gaussian_blur": averages with Gaussian weights, the edge repeated;
    - "contrast": m + c (x - m), m the mean of an image over its pixels, channel by channel;
    - "brightness": + c;
    - "pixelate": means of rectangles, as many as a smaller image has pixels.

    >>> corrupt(torch.tensor([[[0.0, 1.0], [1.0, 0.0]]]), "contrast", severity=2)
    tensor([[[0.2500, 0.7500],
             [0.7500, 0.2500]]])

    Args:
        inputs: images (n, height, width) or (n, channels, height, width); rows of pixels (n, height * width) with
            `size`.
        corruption: one of `CORRUPTIONS`.
        severity: 1 to 5.
        seed: of the noise.
        range: what black and white are in the inputs: numbers, or tensors with one per channel. Of inputs standardised
            by a mean and a deviation per channel they are (0 - mean) / deviation and (1 - mean) / deviation.
        size: height and width of rows of pixels.

    Raises:
        InputError: there is no such corruption, or the inputs are no images of this range.
    """
    if corruption not in CORRUPTIONS:
        raise InputError(
            f"expected a corruption out of {', '.join(CORRUPTIONS)}, found {corruption!r}: give 'gaussian_noise'"
        )
    if severity not in SEVERITIES:
        raise InputError(f"expected a severity from 1 to 5, found {severity!r}: 3 is in the middle")
    images = _as_images(inputs, size)
    low, high = (_per_channel(end, images) for end in range)
    if not bool((high > low).all()):
        raise InputError("expected a range whose second end is above its first, found others: give (0.0, 1.0)")
    wide = images if images.dtype.itemsize >= 4 else images.float()
    unit = (wide - low) / (high - low)
    if not bool(unit.isfinite().all()):
        raise InputError("expected finite pixels, found NaN or infinity: leave these images out")
    least, most = float(unit.min()), float(unit.max())
    if not (least >= -_SLACK and most <= 1 + _SLACK):
        raise InputError(
            f"expected pixels inside the range, found some at {least:.3g} to {most:.3g} of it: give range=(black, "
            "white), as ((0 - mean) / deviation, (1 - mean) / deviation) of standardised inputs"
        )
    changed = CORRUPTIONS[corruption](unit, severity - 1, seed).clamp(0, 1)
    return (low + changed * (high - low)).to(inputs.dtype).reshape(inputs.shape)


def shifts(
    inputs: Tensor,
    corruptions: Iterable[str] | None = None,
    severities: Iterable[int] = SEVERITIES,
    *,
    seed: int = 0,
    range: Range = (0.0, 1.0),
    size: tuple[int, int] | None = None,
) -> dict[str, dict[int, Callable[[], Tensor]]]:
    """Corruption -> severity -> a function that gives the corrupted inputs, for `evaluate(..., shifted=)`.

    Images are made one set at a time, when they are needed.

    >>> found = shifts(torch.zeros(1, 4, 4), ["brightness"], [1, 5])
    >>> float(found["brightness"][5]().mean())
    0.5

    Args:
        inputs: as in `corrupt`.
        corruptions: their names; None takes all of `CORRUPTIONS`.
        severities: some of 1 to 5.
        seed: as in `corrupt`.
        range: as in `corrupt`.
        size: as in `corrupt`.
    """
    if isinstance(corruptions, str):
        raise InputError(
            f"expected corruptions as a list of names, found the text {corruptions!r}: give [{corruptions!r}]"
        )
    names, levels = list(CORRUPTIONS if corruptions is None else corruptions), list(severities)
    for name in names:
        for level in levels:
            corrupt(inputs[:1], name, level, seed=seed, range=range, size=size)  # refused now, not while networks run
    options: dict[str, Any] = {"seed": seed, "range": range, "size": size}
    return {name: {level: partial(corrupt, inputs, name, level, **options) for level in levels} for name in names}


def _gaussian_noise(unit: Tensor, level: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return unit + _NOISE[level] * torch.randn(unit.shape, generator=generator, dtype=unit.dtype).to(unit.device)


def _gaussian_blur(unit: Tensor, level: int, seed: int) -> Tensor:
    height, width = unit.shape[2:]
    deviation = _BLUR[level] * min(height, width)
    reach = max(1, math.ceil(_REACH * deviation))
    places = torch.arange(-reach, reach + 1, dtype=unit.dtype, device=unit.device)
    kernel = torch.exp(-0.5 * (places / deviation).square())
    kernel = kernel / kernel.sum()
    planes = F.pad(unit.reshape(-1, 1, height, width), (reach, reach, reach, reach), mode="replicate")
    planes = F.conv2d(F.conv2d(planes, kernel.reshape(1, 1, -1, 1)), kernel.reshape(1, 1, 1, -1))
    return planes.reshape(unit.shape)


def _contrast(unit: Tensor, level: int, seed: int) -> Tensor:
    mean = unit.mean((2, 3), keepdim=True)
    return mean + _CONTRAST[level] * (unit - mean)


def _brightness(unit: Tensor, level: int, seed: int) -> Tensor:
    return unit + _BRIGHTNESS[level]


def _pixelate(unit: Tensor, level: int, seed: int) -> Tensor:
    height, width = (max(1, round(_PIXELATE[level] * side)) for side in unit.shape[2:])
    return F.interpolate(F.adaptive_avg_pool2d(unit, (height, width)), size=unit.shape[2:], mode="nearest")


CORRUPTIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "gaussian_blur": _gaussian_blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "pixelate": _pixelate,
}


def _as_images(inputs: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Images (n, channels, height, width)."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not inputs.numel():
        found = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
        remedy = (
            "give at least one" if isinstance(inputs, Tensor) and not inputs.numel() else "give inputs.float() / 255"
        )
        raise InputError(f"expected images as a tensor of floating-point pixels, found {found}: {remedy}")
    if size is not None:
        rows = inputs.reshape(len(inputs), -1)
        if rows.shape[1] % (size[0] * size[1]):
            raise InputError(
                f"expected rows of {size[0]} x {size[1]} pixels, found {rows.shape[1]} numbers: give their height and "
                f"width, as size={_square(rows.shape[1])}"
            )
        return rows.reshape(len(inputs), -1, *size)
    if inputs.dim() not in (3, 4):
        raise InputError(
            f"expected images (n, height, width) or (n, channels, height, width), found shape {tuple(inputs.shape)}: "
            "give size=(height, width) for rows of pixels"
        )
    return inputs if inputs.dim() == 4 else inputs[:, None]


def _square(numbers: int) -> tuple[int, int]:
    """A height and a width that so many numbers may have.

    >>> _square(784), _square(3072), _square(30)
    ((28, 28), (32, 32), (5, 6))
    """
    for pixels in (numbers, numbers // 3 if numbers % 3 == 0 else numbers):
        if math.isqrt(pixels) ** 2 == pixels:
            return math.isqrt(pixels), math.isqrt(pixels)
    height = next(side for side in range(math.isqrt(numbers), 0, -1) if numbers % side == 0)
    return height, numbers // height


def _per_channel(end: float | Tensor, images: Tensor) -> Tensor:
    """An end of the range that broadcasts to images."""
    found = torch.as_tensor(end, dtype=torch.promote_types(images.dtype, torch.float32), device=images.device)
    flat = found.reshape(-1)
    if flat.numel() not in (1, images.shape[1]):
        raise InputError(
            f"expected one end of the range, or one for each of {images.shape[1]} channels, found {flat.numel()}: give "
            "as many as there are channels"
        )
    return flat.reshape(1, -1, 1, 1)
