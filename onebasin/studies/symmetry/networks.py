"""Architectures of the study, and the data that each is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onebasin.calling import global_seed
from onebasin.data import load
from onebasin.studies.problem import Problem, digits_problem

EPSILON = 1e-6  # of filter response norm


class FilterResponseNorm(nn.Module):
    """gamma x / sqrt(mean of x^2 over pixels + 1e-6) + beta, not below tau; each example by itself.

    Names and shapes are those of published checkpoints.

    >>> FilterResponseNorm(3)(torch.ones(2, 3, 4, 4)).shape
    torch.Size([2, 3, 4, 4])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.tau = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def reset_parameters(self) -> None:
        """As they are at the start of a training."""
        with torch.no_grad():
            self.gamma.fill_(1)
            self.beta.zero_()
            self.tau.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (examples, channels, height, width)."""
        power = x.square().mean((-2, -1), keepdim=True)
        return torch.maximum(self.gamma * x * torch.rsqrt(power + EPSILON) + self.beta, self.tau)


class Block(nn.Module):
    """Two convolutions beside a shortcut, which is projected where the number of channels changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = FilterResponseNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = FilterResponseNorm(width)
        same = channels == width and stride == 1
        projection = () if same else (nn.Conv2d(channels, width, 1, stride, bias=False), FilterResponseNorm(width))
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Pass (examples, channels, height, width)."""
        inner = self.bn2(self.conv2(nn.functional.silu(self.bn1(self.conv1(x)))))
        return nn.functional.silu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network with filter response norm and SiLU for 10 classes.

    Three stages of `blocks` blocks with `width`, 2 `width` and 4 `width` channels; 16 and 3 give ResNet-20.
    """

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = FilterResponseNorm(width)
        channels = width
        for stage in range(3):
            after = width << stage
            strides = [1 if stage == 0 else 2] + [1] * (blocks - 1)
            rows = []
            for stride in strides:
                rows.append(Block(channels, after, stride))
                channels = after
            self.add_module(f"layer{stage + 1}", nn.Sequential(*rows))
        self.linear = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (examples, 3, height, width)."""
        x = nn.functional.silu(self.bn1(self.conv1(x)))
        for stage in range(3):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.linear(x.mean((-2, -1)))
        return logits


def optunet() -> nn.Sequential:
    """A convolutional network of 392 weights for grey images of 28 x 28 pixels.

    >>> sum(weight.numel() for weight in optunet().parameters())
    392
    """
    return nn.Sequential(
        nn.Conv2d(1, 2, 4, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(3),
        nn.Conv2d(2, 10, 5, groups=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 10),
    )


class Architecture(NamedTuple):
    """A network and its data.

    Attributes:
        title: in words.
        build: makes one.
        data: name of the training and test images, as `load` takes it.
        outside: name of the foreign images.
    """

    title: str
    build: Callable[[], nn.Module]
    data: str
    outside: str


ARCHITECTURES = {
    "optunet": Architecture("OptuNet, a ConvNet of 392 weights", optunet, "mnist", "fashion-mnist"),
    "resnet20": Architecture("ResNet-20 with filter response norm and SiLU", ResNet, "cifar10", "cifar100"),
}
HIDDEN = (16, 16)  # widths of the network on embedded digits


def words(architecture: str) -> str:
    """What an architecture is, for people.

    >>> words("mlp")
    'a perceptron with hidden layers of 16 and 16 relu units'
    """
    if architecture == "mlp":
        return f"a perceptron with hidden layers of {' and '.join(map(str, HIDDEN))} relu units"
    return ARCHITECTURES[architecture].title


def problem_of(architecture: str, directory: str | None, seed: int) -> Problem:
    """The network and its data.

    Args:
        architecture: "mlp" on embedded digits, or a key of `ARCHITECTURES`.
        directory: where data sets are that do not come with the package.
        seed: of the division of the digits.
    """
    if architecture == "mlp":
        return digits_problem(*HIDDEN, seed=seed)
    chosen = ARCHITECTURES[architecture]
    data, outside = (load(name, directory=directory) for name in (chosen.data, chosen.outside))
    with global_seed(0):
        model = chosen.build().eval()
    return Problem(chosen.data, model, data.train, data.test, outside.test[0], f"images of {chosen.outside}")
