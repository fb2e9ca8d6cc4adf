"""Models that do not fit elsewhere: experts, many inputs and outputs, operations nobody has a rule for, buffers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dense import mlp
from .expect import Case, Expected, numbers, seeded, tokens


class Experts(nn.Module):
    """Five experts 3-7-2 in stacked parameters, mixed by a softmax gate over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(4, 3), nn.Linear(3, 5)
        self.up, self.up_bias = nn.Parameter(torch.randn(5, 7, 3)), nn.Parameter(torch.randn(5, 7))
        self.down, self.down_bias = nn.Parameter(torch.randn(5, 2, 7)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        hidden = F.relu(torch.einsum("ehi,bi->beh", self.up, x) + self.up_bias)
        each = torch.einsum("eoh,beh->beo", self.down, hidden) + self.down_bias
        return (self.gate(x).softmax(dim=-1)[:, :, None] * each).sum(dim=1)


class Routed(nn.Module):
    """The same mixture with experts as separate modules: they could only be exchanged module for module."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(mlp(4, width, 2, act=nn.ReLU) for width in (5, 7, 11))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        return torch.stack([weights[:, i, None] * e(x) for i, e in enumerate(self.experts)]).sum(dim=0)


class Several(nn.Module):
    """Named inputs, a picture and some numbers and a word; a dictionary of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.read = nn.Conv2d(2, 5, 3), nn.Embedding(11, 3)
        self.join, self.names = nn.Linear(5 + 3 + 2, 7), nn.Linear(7, 4)
        self.size = nn.Linear(5, 1)

    def forward(self, picture: Tensor, word: Tensor, extra: Tensor) -> dict[str, Tensor]:
        seen = F.relu(self.look(picture)).mean(dim=(2, 3))
        both = torch.tanh(self.join(torch.cat([seen, self.read(word), extra], dim=-1)))
        return {"names": self.names(both), "size": self.size(seen)}


class Exposed(nn.Module):
    """Returns its first hidden layer beside the answer: that layer is an output and rigid."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(self.one(x))
        return self.out(F.relu(self.two(hidden))), hidden


class Fourier(nn.Module):
    """A Fourier transform along a hidden axis: every unit has a place."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.fft(torch.tanh(self.one(x)), dim=-1)
        return self.out(torch.tanh(self.two(waves.real + waves.imag)))


class Inverse(nn.Module):
    """A matrix made of the hidden layer is inverted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 9), nn.Linear(9, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        square = torch.tanh(self.one(x)).view(-1, 3, 3)
        inverse = torch.linalg.inv(square @ square.transpose(1, 2) + torch.eye(3, dtype=x.dtype))
        return self.out(F.relu(self.two(inverse.reshape(-1, 9))))


class Product(nn.Module):
    """A cumulative product along the hidden axis."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.two(torch.cumprod(torch.sigmoid(self.one(x)), dim=-1))))


class Normaliser(nn.Module):
    """Inputs are standardised by buffers, outputs scaled back by others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 7, 2, act=nn.ReLU)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("std", torch.ones(3))
        self.register_buffer("out_std", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body((x - self.mean) / self.std) * self.out_std


class Addressed(nn.Module):
    """The first of five hidden units is picked out by its position and read once more."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(3, 5), nn.Linear(6, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.one(x))
        return self.out(F.relu(self.two(torch.cat([hidden, 2.0 * hidden[:, :1]], dim=-1))))


def routed_spaces() -> tuple[Expected, ...]:
    """The hidden layer of each expert."""
    return tuple(
        Expected(n, scales=1, legs=f"experts.{i}.0.weight(u)&experts.{i}.0.bias(u) experts.{i}.2.weight(*,u)")
        for i, n in enumerate((5, 7, 11))
    )


def several_inputs() -> dict[str, Tensor]:
    """Keyword inputs of `Several`."""
    return {"picture": numbers(4, 2, 5, 5)(), "word": tokens(4, high=11)(), "extra": numbers(4, 2, seed=2)()}


EXPERTS = "gate.weight(u)&gate.bias(u) up(u)&up_bias(u) down(u) down_bias(u)"
TANH_FIVE = Expected(5, signs=1, legs="two.weight(u)&two.bias(u) out.weight(*,u)")
RELU_FIVE = Expected(5, scales=1, legs="two.weight(u)&two.bias(u) out.weight(*,u)")

MIXED: tuple[Case, ...] = (
    Case(
        "experts",
        seeded(Experts),
        numbers(8, 4),
        (
            Expected(3, signs=1, legs="stem.weight(u)&stem.bias(u) gate.weight(*,u) up(*,*,u)"),
            Expected(5, covered=(1, 0, 0, 0), legs=EXPERTS),
            Expected(7, 5, scales=1, legs="up(a5,u)&up_bias(a5,u) down(a5,*,u)"),
        ),
        why="experts permute with their gate row; hidden units permute inside each expert. Softmax pins the gate",
    ),
    Case(
        "experts_modules",
        seeded(Routed),
        numbers(8, 4),
        routed_spaces(),
        why="experts of different width in a ModuleList; the gate's rows are addressed by position and rigid",
    ),
    Case(
        "several_inputs",
        seeded(Several),
        several_inputs,
        (
            Expected(5, scales=1, legs="look.weight(u)&look.bias(u) join.weight(*,0:5|u) size.weight(*,u)"),
            Expected(3, scales=1, signs=1, legs="read.weight(*,u) join.weight(*,5:8|u)"),
            Expected(7, signs=1, legs="join.weight(u)&join.bias(u) names.weight(*,u)"),
        ),
        why="embedding columns against their reader are linear: scale and sign; two of the joint columns are inputs",
    ),
    Case(
        "hidden_output",
        seeded(Exposed),
        numbers(8, 3),
        (Expected(7, scales=1, legs="two.weight(u)&two.bias(u) out.weight(*,u)"),),
        why="the width 5 is returned: rigid",
    ),
    Case(
        "fourier",
        seeded(Fourier),
        numbers(8, 3),
        (TANH_FIVE,),
        unexplained=True,
        why="no rule for the transform: width 7 stays rigid, width 5 is found",
    ),
    Case(
        "inverse",
        seeded(Inverse),
        numbers(8, 3),
        (RELU_FIVE, Expected(3, signs=1, legs="one.weight(3.u)&one.bias(3.u)")),
        unexplained=True,
        why="width 9 = 3 x 3: columns are contracted with themselves before the inverse, hence permute and flip; "
        "rows reach the "
        "inverse, for which there is no rule, and stay rigid (a rule would find that they permute)",
    ),
    Case(
        "cumulative_product",
        seeded(Product),
        numbers(8, 3),
        (RELU_FIVE,),
        unexplained=True,
        why="the order of the units matters: rigid; sigmoid pins scales and signs as well",
    ),
    Case(
        "normaliser",
        seeded(Normaliser),
        numbers(8, 3),
        (Expected(7, scales=1, legs="body.0.weight(u)&body.0.bias(u) body.2.weight(*,u)"),),
        why="buffers act on the input and output axes, which are rigid (std against columns is a freedom of the "
        "input axis)",
    ),
    Case(
        "addressed_unit",
        seeded(Addressed),
        numbers(8, 3),
        (
            Expected(
                1,
                permutation=False,
                scales=1,
                legs="one.weight(0:1|u)&one.bias(0:1|u) two.weight(*,0:1|u)&two.weight(*,5:6|u)",
            ),
            Expected(4, scales=1, legs="one.weight(1:5|u)&one.bias(1:5|u) two.weight(*,1:5|u)"),
            Expected(7, scales=1, legs="two.weight(u)&two.bias(u) out.weight(*,u)"),
        ),
        why="the axis falls into the piece 0:1, which is read twice, and the piece 1:5, whose units are alike",
    ),
)
