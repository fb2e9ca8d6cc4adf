"""Convolutional networks without a residual stream: groups, depthwise, shuffles, concatenations, U-Net."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded


def bn(name: str, where: str = "u") -> str:
    """The legs of a batch norm; mean and variance belong together (the variance by the square)."""
    affine = f"{name}.weight({where}) {name}.bias({where})"
    return f"{affine} {name}.running_mean({where})&{name}.running_var({where})"


def head(width: int, classes: int = 2) -> nn.Sequential:
    """Global average pooling and a Linear, which is layer 2."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def flatten_net() -> nn.Module:
    """conv, relu, pool, conv, relu, flatten, linear, relu, linear."""
    convs = [nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 3, 2, bias=False), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*convs, nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 2))


def separable() -> nn.Module:
    """conv, depthwise, pointwise, each with bias and relu."""
    depthwise, pointwise = nn.Conv2d(5, 5, 3, groups=5), nn.Conv2d(5, 7, 1)
    stages = [nn.Conv2d(2, 5, 3), nn.ReLU(), depthwise, nn.ReLU(), pointwise, nn.ReLU()]
    return nn.Sequential(*stages, head(7))


def separable_multiplier() -> nn.Module:
    """A depthwise convolution with three outputs per input channel."""
    stages = [nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Conv2d(5, 15, 3, groups=5), nn.ReLU(), nn.Conv2d(15, 7, 1), nn.ReLU()]
    return nn.Sequential(*stages, head(7))


def grouped() -> nn.Module:
    """conv to 2 x 3 channels, grouped conv to 2 x 5, head."""
    stages = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 10, 3, groups=2), nn.ReLU()]
    return nn.Sequential(*stages, head(10, 3))


def grouped_input() -> nn.Module:
    """A grouped convolution that reads the model's input: its groups cannot be exchanged."""
    return nn.Sequential(nn.Conv2d(4, 10, 3, groups=2), nn.ReLU(), nn.Conv2d(10, 7, 1), nn.ReLU(), head(7, 3))


def optunet() -> nn.Module:
    """392 parameters for MNIST, found with Optuna (paper-symmetry.md, section 8)."""
    stages = [nn.Conv2d(1, 2, 4, bias=False), nn.ReLU(), nn.MaxPool2d(3)]
    return nn.Sequential(*stages, nn.Conv2d(2, 10, 5, groups=2, bias=False), nn.ReLU(), head(10, 10))


class Grow(nn.Module):
    """conv, relu, conv to 3 x 2 x 2 channels, PixelShuffle, conv."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 12, 3, padding=1)
        self.shuffle, self.out = nn.PixelShuffle(2), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.shuffle(self.two(F.relu(self.one(x)))))


IMAGE = numbers(3, 2, 6, 6)
CONVOLUTION: tuple[Case, ...] = (
    Case(
        "conv_flatten",
        seeded(flatten_net),
        numbers(3, 2, 8, 8),
        (
            Expected(5, scales=1, legs="0.weight(u)&0.bias(u) 3.weight(*,u)"),
            Expected(3, scales=1, legs="3.weight(u) 6.weight(*,u.4)"),
            Expected(7, scales=1, legs="6.weight(u)&6.bias(u) 8.weight(*,u)"),
        ),
        why="a channel owns a run of 2 x 2 columns behind the flatten; max pooling passes positive scales",
    ),
    Case(
        "depthwise_separable",
        seeded(separable),
        IMAGE,
        (
            Expected(5, scales=2, legs="0.weight(u)&0.bias(u) 2.weight(u) 2.bias(u) 4.weight(*,u)"),
            Expected(7, scales=1, legs="4.weight(u)&4.bias(u) 6.2.weight(*,u)"),
        ),
        why="a depthwise channel passes two relus: (before | kernel) and (kernel, its bias | after)",
    ),
    Case(
        "depthwise_multiplier",
        seeded(separable_multiplier),
        IMAGE,
        (
            Expected(
                5,
                scales=1,
                covered=(1, 0, 0, 0),
                legs="0.weight(u)&0.bias(u) 2.weight(u.3) 2.bias(u.3) 4.weight(*,u.3)",
            ),
            Expected(3, 5, scales=1, legs="2.weight(a5.u)&2.bias(a5.u) 4.weight(*,a5.u)"),
            Expected(7, scales=1, legs="4.weight(u)&4.bias(u) 6.2.weight(*,u)"),
        ),
        why="five groups of one input and three outputs: outputs permute inside their group, groups with their input",
    ),
    Case(
        "grouped",
        seeded(grouped),
        IMAGE,
        (
            Expected(
                2, covered=(2, 0, 0, 0), legs="0.weight(u.3)&0.bias(u.3) 2.weight(u.5) 2.bias(u.5) 4.2.weight(*,u.5)"
            ),
            Expected(3, 2, scales=1, legs="0.weight(a2.u)&0.bias(a2.u) 2.weight(a2.5,u)"),
            Expected(5, 2, scales=1, legs="2.weight(a2.u)&2.bias(a2.u) 4.2.weight(*,a2.u)"),
        ),
        why="whole groups move with their input block; inputs and outputs permute inside each group",
    ),
    Case(
        "grouped_input",
        seeded(grouped_input),
        numbers(3, 4, 6, 6),
        (
            Expected(5, 2, scales=1, legs="0.weight(a2.u)&0.bias(a2.u) 2.weight(*,a2.u)"),
            Expected(7, scales=1, legs="2.weight(u)&2.bias(u) 4.2.weight(*,u)"),
        ),
        why="the groups are told apart by the input channels they read; only the outputs inside a group are free",
    ),
    Case(
        "optunet",
        seeded(optunet),
        numbers(3, 1, 28, 28),
        (
            Expected(2, scales=1, covered=(1, 0, 0, 0), legs="0.weight(u) 3.weight(u.5) 5.2.weight(*,u.5)"),
            Expected(5, 2, scales=1, legs="3.weight(a2.u) 5.2.weight(*,a2.u)"),
        ),
        why="2! (5!)^2 = 28,800 permutations; the outer scale (conv1 | conv2 of that group) is its own",
    ),
    Case(
        "pixel_shuffle",
        seeded(Grow),
        IMAGE,
        (
            Expected(5, scales=1, legs="one.weight(u)&one.bias(u) two.weight(*,u)"),
            Expected(3, scales=1, signs=1, legs="two.weight(u.4)&two.bias(u.4) out.weight(*,u)"),
        ),
        why="a unit is a block of 2 x 2 rows; the positions inside the block are places in the image and rigid",
    ),
)
