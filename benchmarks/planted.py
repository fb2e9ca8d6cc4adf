"""Planted problems: a network and a copy that was moved along its orbit, so that the answer is known.

B = g.A + noise with g drawn from the symmetry of the architecture. A method recovers g exactly if it moves B back onto
A (without noise: all tensors equal to 1e-6 of their largest entry) or finds g's orders (with noise).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin import Element, State, Symmetry
from tests.models.residual import ResNet

EXACT = 1e-6
KINDS = ("permutation", "scale", "sign", "norm-scale", "norm-sign")


class Block(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, stream: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(stream, hidden), nn.Linear(hidden, stream)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class ResidualMLP(nn.Sequential):
    """Linear into a stream, blocks on it, Linear out of it."""

    def __init__(self, blocks: int = 6, stream: int = 64, hidden: int = 128) -> None:
        super().__init__(nn.Linear(32, stream), *(Block(stream, hidden) for _ in range(blocks)), nn.Linear(stream, 10))


class Recurrent(nn.Module):
    """LSTM, then Linear on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


def dense(activation: Callable[[], nn.Module], widths: Sequence[int] = (32, 64, 64, 10)) -> nn.Sequential:
    """An MLP with any activation."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Problem:
    """An architecture, the freedoms that are planted and searched, and the noise in units of each tensor's std."""

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    freedoms: tuple[str, ...] = KINDS
    noise: float = 0.0

    def symmetry(self) -> Symmetry:
        """The proved symmetry of the architecture, with the planted freedoms only."""
        model = built(self.build, 0)
        return only(ob.discover(model, torch.zeros(self.inputs)), self.freedoms)

    def draw(self, symmetry: Symmetry, seed: int) -> tuple[State, State, Element]:
        """A, B = g.A + noise, and g."""
        generator = torch.Generator().manual_seed(seed)
        a = varied(built(self.build, seed).state_dict(), generator)
        planted = symmetry.random(generator)
        b = symmetry.apply(planted, a)
        if self.noise:
            b = {
                name: value + self.noise * a[name].std() * torch.randn(value.shape, generator=generator)
                for name, value in b.items()
            }
        return a, b, planted


def built(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model with weights from a seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def varied(state: State, generator: torch.Generator) -> State:
    """Make what is constant at the start (gains, shifts, statistics of norms) different for every unit."""
    made = {}
    for name, value in state.items():
        made[name] = value.detach().clone()
        if value.is_floating_point() and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            made[name] += 0.5 * torch.rand(value.shape, generator=generator)
    return made


def only(symmetry: Symmetry, freedoms: Sequence[str]) -> Symmetry:
    """The same symmetry with some kinds of freedom; those left out are held, not searched."""
    spaces = [space.without(set(KINDS) - set(freedoms)) for space in symmetry.spaces]
    return replace(symmetry, spaces=tuple(space for space in spaces if space.permutable or space.generators))


def returned(a: State, moved: State) -> bool:
    """Whether a network was moved back onto A."""
    return all(
        float((moved[name].double() - value.double()).abs().max()) <= EXACT * max(float(value.abs().max()), 1e-30)
        for name, value in a.items()
        if value.numel()
    )


def small_resnet() -> nn.Module:
    """Stem and three blocks with batch norm; the last one changes the width through a projected shortcut."""
    return ResNet(((8, 12, 8), (8, 12, 8), (8, 16, 16)), nn.BatchNorm2d, nn.ReLU())


def encoder() -> nn.Module:
    """A transformer encoder layer: 4 heads of 8, feed-forward of 64."""
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


PROBLEMS = (
    Problem("residual MLP, permutations", ResidualMLP, (1, 32), ("permutation",)),
    Problem("residual MLP, permutations, unit noise", ResidualMLP, (1, 32), ("permutation",), 1.0),
    Problem("residual MLP, permutations, scales, signs", ResidualMLP, (1, 32)),
    Problem("ResNet with batch norm", small_resnet, (2, 2, 8, 8)),
    Problem("transformer encoder layer", encoder, (2, 5, 32)),
    Problem("LSTM + linear", Recurrent, (2, 4, 8)),
    Problem("tanh MLP with signs", lambda: dense(nn.Tanh), (1, 32)),
    Problem("relu MLP with scales", lambda: dense(nn.ReLU), (1, 32)),
)
