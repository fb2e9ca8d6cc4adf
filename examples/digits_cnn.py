"""A model file as `onebasin discover` likes it: a factory without arguments, and an example input beside it.

onebasin discover examples/digits_cnn.py:digits_cnn
"""

import torch
from torch import Tensor, nn


def digits_cnn() -> nn.Module:
    """Build a small convolutional network for 8x8 digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def example_input() -> Tensor:
    """Make one batch that runs through the network; the values do not matter, the shape does."""
    return torch.randn(2, 1, 8, 8)
