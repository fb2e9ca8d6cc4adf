"""Data that come with an installed package, so that nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor

_INK = 16  # the largest pixel value of the digits


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
