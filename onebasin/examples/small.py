"""Small models with interesting symmetries, for the demo and for first steps.

They use only torch, and nothing of the rest of the package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Example:
    """A named model: a sentence about it, its factory, and a function that makes an input for it."""

    name: str
    summary: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]


def relu_mlp() -> nn.Module:
    """Two hidden layers with relu: units permute and scale.

    >>> relu_mlp()(torch.zeros(2, 16)).shape
    torch.Size([2, 4])
    """
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))


def residual_cnn() -> nn.Module:
    """Two residual blocks with batch norm: one stream shared by all blocks, one free width inside each.

    >>> residual_cnn().eval()(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(_ConvNorm(3, 8), nn.ReLU(), _Residual(8, 12), _Residual(8, 12), head)


def separable_cnn() -> nn.Module:
    """Depthwise and grouped convolutions: channels that must move together.

    >>> separable_cnn().eval()(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 5])
    """
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 1, groups=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 5),
    )


def lstm_classifier() -> nn.Module:
    """An LSTM over a sequence: one hidden width tied across four gates, two axes of one weight, and time.

    >>> lstm_classifier()(torch.zeros(2, 6, 10)).shape
    torch.Size([2, 3])
    """
    return _LastStep()


def transformer() -> nn.Module:
    """Token ids through an embedding and one encoder layer: heads permute, and each head has its own widths.

    >>> transformer().eval()(torch.zeros(2, 6, dtype=torch.int64)).shape
    torch.Size([2, 6, 20])
    """
    layer = nn.TransformerEncoderLayer(16, nhead=4, dim_feedforward=24, activation="gelu", batch_first=True)
    return nn.Sequential(nn.Embedding(20, 16), layer, nn.Linear(16, 20))


def digits_mlp() -> nn.Module:
    """A classifier of 8 x 8 digits with one hidden layer: ``onebasin sample onebasin.examples:digits_mlp digits``.

    >>> digits_mlp()(torch.zeros(2, 64)).shape
    torch.Size([2, 10])
    """
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class _ConvNorm(nn.Sequential):
    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out))


class _Residual(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.first = _ConvNorm(channels, width)
        self.second = _ConvNorm(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


class _LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 14, batch_first=True)
        self.head = nn.Linear(14, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.lstm(x)
        last: Tensor = self.head(outputs[:, -1])
        return last


def _normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _ids(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(20, shape, generator=torch.Generator().manual_seed(0))


EXAMPLES = (
    Example("relu_mlp", "a small multilayer perceptron", relu_mlp, _normal(4, 16)),
    Example("residual_cnn", "a residual network with batch norm", residual_cnn, _normal(2, 3, 8, 8)),
    Example("separable_cnn", "depthwise and grouped convolutions", separable_cnn, _normal(2, 3, 8, 8)),
    Example("lstm_classifier", "a recurrent classifier", lstm_classifier, _normal(2, 6, 10)),
    Example("transformer", "an embedding and an encoder layer", transformer, _ids(2, 6)),
)
