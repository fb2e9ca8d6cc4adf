"""Architectures of the data set "Checkpoints" (Laurent, Aldea & Franchi, 2024), with the names in its files.

Residual networks are those of torch-uncertainty in their style for small images: conv1, bn1, layer1.0.conv1, ...,
layer2.0.shortcut.0, ..., linear. Filter response norm has gamma, beta and tau under the names of batch norm. No loader
of OptuNet is published: its layers follow from its 392 weights, and their names are those of a plain Sequential.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onebasin.errors import InputError

EPSILON = 1e-6  # of filter response norm

Activation = Callable[[Tensor], Tensor]
Norm = Callable[[int], nn.Module]


class FilterResponseNorm(nn.Module):
    """gamma x / sqrt(mean of x^2 over pixels + 1e-6) + beta, not below tau; each example by itself.

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
    """Two convolutions beside a shortcut, which is projected where the number of channels or of pixels changes."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm, activation: Activation) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        same = channels == width and stride == 1
        self.shortcut = nn.Sequential(
            *() if same else (nn.Conv2d(channels, width, 1, stride, bias=False), norm(width)),
        )
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Pass (examples, channels, height, width)."""
        inner = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x)))))
        return self.activation(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network for small colour images.

    Args:
        width: channels of the first stage; each further stage has twice as many and half as many pixels a side.
        blocks: their number in each stage.
        classes: outputs.
        norm: makes what normalises so many channels.
        activation: of one number at a time.
    """

    def __init__(
        self,
        width: int = 16,
        blocks: Sequence[int] = (3, 3, 3),
        classes: int = 10,
        norm: Norm = FilterResponseNorm,
        activation: Activation = nn.functional.silu,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = norm(width)
        self.stages, self.activation = len(blocks), activation
        channels = width
        for stage, count in enumerate(blocks):
            after = width << stage
            rows = []
            for stride in [1 if stage == 0 else 2] + [1] * (count - 1):
                rows.append(Block(channels, after, stride, norm, activation))
                channels = after
            self.add_module(f"layer{stage + 1}", nn.Sequential(*rows))
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images (examples, 3, height, width)."""
        x = self.activation(self.bn1(self.conv1(x)))
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.linear(x.mean((-2, -1)))
        return logits


NORMS: dict[str, Norm] = {"frn": FilterResponseNorm, "bn": nn.BatchNorm2d, "none": lambda channels: nn.Identity()}
ACTIVATIONS: dict[str, Activation] = {"silu": nn.functional.silu, "relu": torch.relu}


def resnet8(width: int = 16, classes: int = 10, norm: str = "frn", activation: str = "silu") -> nn.Module:
    """ResNet-8, one block in each of three stages, for small colour images; 78 thousand weights with width 16.

    >>> sum(value.numel() for value in resnet8().parameters())
    78378
    """
    return _small(1, width, classes, norm, activation)


def resnet20(width: int = 16, classes: int = 10, norm: str = "frn", activation: str = "silu") -> nn.Module:
    """ResNet-20, three blocks in each of three stages, for small colour images.

    >>> resnet20(4, norm="bn", activation="relu").eval()(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])

    Args:
        width: channels of the first stage.
        classes: outputs.
        norm: "frn" for filter response norm, "bn" for batch norm, or "none".
        activation: "silu" or "relu".
    """
    return _small(3, width, classes, norm, activation)


def _small(blocks: int, width: int, classes: int, norm: str, activation: str) -> nn.Module:
    for name, value, known in (("norm", norm, NORMS), ("activation", activation, ACTIVATIONS)):
        if value not in known:
            words = ", ".join(known)
            raise InputError(f"expected a {name} out of {words}, found {value!r}: give {name}={next(iter(known))!r}")
    return ResNet(width, (blocks,) * 3, classes, NORMS[norm], ACTIVATIONS[activation])


def resnet20_frn_silu(width: int = 16) -> nn.Module:
    """ResNet-20 with filter response norm and SiLU for CIFAR-10, 0.27 million weights.

    >>> resnet20_frn_silu(4)(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    return ResNet(width)


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """ResNet-18 with batch norm and ReLU for CIFAR-10, 11 million weights.

    >>> resnet18(width=4).eval()(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """
    return ResNet(width, (2, 2, 2, 2), classes, nn.BatchNorm2d, torch.relu)


def cifar100_resnet18() -> nn.Module:
    """ResNet-18 for 100 classes."""
    return resnet18(100)


def tiny_imagenet_resnet18() -> nn.Module:
    """ResNet-18 for 200 classes; that its first convolution is that for small images is inferred, not published."""
    return resnet18(200)


def optunet(first: int = 4, pool: int = 3, second: int = 5) -> nn.Sequential:
    """A convolutional network of 392 weights for grey images of 28 x 28 pixels.

    >>> sum(weight.numel() for weight in optunet().parameters())
    392

    Args:
        first: side of the first kernels; smaller ones suit smaller images.
        pool: side of the pooling behind them.
        second: side of the second kernels.
    """
    return nn.Sequential(
        nn.Conv2d(1, 2, first, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(pool),
        nn.Conv2d(2, 10, second, groups=2, bias=False),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 10),
    )


class Published(NamedTuple):
    """Which factory makes the networks of a folder, and the shape of an example input."""

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]


PUBLISHED = {  # by folder of the data set
    "mnist-optunet": Published(optunet, (2, 1, 28, 28)),
    "cifar10-resnet20-frn-silu": Published(resnet20_frn_silu, (2, 3, 32, 32)),
    "cifar10-resnet18": Published(resnet18, (2, 3, 32, 32)),
    "cifar100-resnet18": Published(cifar100_resnet18, (2, 3, 32, 32)),
    "tiny-imagenet-resnet18": Published(tiny_imagenet_resnet18, (2, 3, 64, 64)),
}
