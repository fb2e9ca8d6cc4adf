"""Data that come with an installed package, so that nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor

_INK = 16  # the largest pixel value of the digits
_BRIGHTEST = 255  # the same of the photographs


def digits() -> tuple[Tensor, Tensor]:
    """The handwritten digits of scikit-learn: 1,797 images of 8 x 8 pixels in ten classes.

    >>> inputs, targets = digits()
    >>> inputs.shape, targets.shape, float(inputs.min()), float(inputs.max())
    (torch.Size([1797, 64]), torch.Size([1797]), 0.0, 1.0)

    Returns:
        Pixels in [0, 1], float32 (1797, 64), and class numbers, int64 (1797,).
    """
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return torch.from_numpy(pixels / _INK).float(), torch.from_numpy(classes).long()


def photographs(side: int = 8, zoom: int = 4) -> Tensor:
    """Grey patches of scikit-learn's two photographs, a temple and a flower: real images that are no digits.

    >>> patches = photographs()
    >>> patches.shape, float(patches.min()) >= 0, float(patches.max()) <= 1
    (torch.Size([1950, 64]), True, True)

    Args:
        side: of the square patches, in pixels. Neighbours overlap by half.
        zoom: how many pixels of the photograph are averaged into one, in each direction.

    Returns:
        Pixels in [0, 1], float32 (patches, side * side).
    """
    from sklearn.datasets import load_sample_images

    patches = []
    for photograph in load_sample_images().images:
        grey = torch.from_numpy(photograph.copy()).float().mean(-1)[None] / _BRIGHTEST
        small = torch.nn.functional.avg_pool2d(grey, zoom)[0]
        cut = small.unfold(0, side, side // 2).unfold(1, side, side // 2)
        patches.append(cut.reshape(-1, side * side))
    return torch.cat(patches)
