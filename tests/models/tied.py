"""Dense networks in which one parameter serves twice, is reparametrised, or serves nobody."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .dense import mlp
from .expect import Case, Expected, numbers, seeded


class Normed(nn.Module):
    """Weight-normed hidden layers 3-5-7, plain head."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one = weight_norm(nn.Linear(3, 5))
        self.two = weight_norm(nn.Linear(5, 7))
        self.head = nn.Linear(7, 2)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.two(self.act(self.one(x)))))


def normed_spaces(one: tuple[int, int], two: tuple[int, int]) -> tuple[Expected, ...]:
    """(scales, signs) of the two hidden spaces of `Normed`; original0 is g, original1 is v."""
    g, v = "{0}.parametrizations.weight.original0(u)", "{0}.parametrizations.weight.original1(u)"
    rows = f"{g} {v} {{0}}.bias(u) "
    column = "two.parametrizations.weight.original1(*,u)"
    return (
        Expected(5, scales=one[0], signs=one[1], legs=rows.format("one") + column),
        Expected(7, scales=two[0], signs=two[1], legs=rows.format("two") + "head.weight(*,u)"),
    )


class TiedAutoencoder(nn.Module):
    """Encoder 5-7-3, decoder with the transposed weights and its own biases."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.outer, self.inner = nn.Linear(5, 7), nn.Linear(7, 3)
        self.back_inner, self.back_outer = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        code = self.act(self.inner(self.act(self.outer(x))))
        hidden = self.act(F.linear(code, self.inner.weight.t(), self.back_inner))
        return hidden @ self.outer.weight + self.back_outer


def tied_spaces(scales: int = 0, **freedoms: int) -> tuple[Expected, ...]:
    """The hidden width 7 occurs before and after the code of width 3, through the same weights."""
    return (
        Expected(7, scales=scales, **freedoms, legs="outer.weight(u)&outer.bias(u) inner.weight(*,u) back_inner(u)"),
        Expected(3, **freedoms, legs="inner.weight(u) inner.bias(u)"),
    )


class Repeated(nn.Module):
    """The same square Linear applied twice."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.loop, self.head = nn.Linear(3, 7), nn.Linear(7, 7), nn.Linear(7, 2, bias=False)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        return self.head(self.act(self.loop(self.act(self.loop(x)))))


class Siamese(nn.Module):
    """One Linear shared by two inputs; the head reads both results side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = nn.Linear(3, 7), nn.Linear(14, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.shared(left)), F.relu(self.shared(right))], dim=-1))


class Unused(nn.Module):
    """A deep MLP that owns a layer it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3, 5, 7, 11, 13, 2, act=nn.ReLU, bias=False)
        self.never = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


LOOP = "stem.weight(u)&stem.bias(u) loop.weight(u)&loop.bias(u) loop.weight(*,u) head.weight(*,u)"

TIED: tuple[Case, ...] = (
    Case(
        "weight_norm_relu",
        seeded(lambda: Normed(F.relu)),
        numbers(8, 3),
        normed_spaces((1, 1), (2, 1)),
        why="v alone may be rescaled, v and g flipped. Unit 5 is read by a row-normalised v, whose columns must not be "
        "rescaled: no relu scale there; unit 7 is read by a plain Linear. Not counted: the gain of the whole layer "
        "(g and b "
        "of one, b of two, head)",
        extra=1,
    ),
    Case(
        "weight_norm_tanh",
        seeded(lambda: Normed(torch.tanh)),
        numbers(8, 3),
        normed_spaces((1, 2), (1, 2)),
        why="v alone rescaled; signs (v, g) and the tanh sign, whose column flip leaves the row norms alone",
    ),
    Case(
        "tied_autoencoder_tanh",
        seeded(lambda: TiedAutoencoder(torch.tanh)),
        numbers(8, 5),
        tied_spaces(signs=1),
        why="each width occurs twice through one weight: signs cancel (s + s = 0)",
    ),
    Case(
        "tied_autoencoder_relu",
        seeded(lambda: TiedAutoencoder(F.relu)),
        numbers(8, 5),
        tied_spaces(1),
        why="code: inner rows +a on the way in and again +a on the way out must sum to 0: no scale. Width 7: outer "
        "rows +1, "
        "inner columns -1, so on the way back the hidden layer and its bias carry -1 and meet outer rows +1",
    ),
    Case(
        "repeated_linear_relu",
        seeded(lambda: Repeated(F.relu)),
        numbers(8, 3),
        (Expected(7, scales=1, legs=LOOP),),
        why="stem +1, loop rows +1 and columns -1, head -1: the recurrent matrix is conjugated",
    ),
    Case(
        "repeated_linear_tanh",
        seeded(lambda: Repeated(torch.tanh)),
        numbers(8, 3),
        (Expected(7, signs=1, legs=LOOP),),
        why="as with relu, with signs",
    ),
    Case(
        "siamese",
        seeded(Siamese),
        lambda: (numbers(8, 3)(), numbers(8, 3, seed=2)()),
        (Expected(7, scales=1, legs="shared.weight(u)&shared.bias(u) head.weight(*,2.u)"),),
        why="the two halves of the head's columns belong to the same seven units",
    ),
    Case(
        "unused_parameter",
        seeded(Unused),
        numbers(8, 3),
        tuple(
            Expected(n, scales=1, legs=f"body.{2 * i}.weight(u) body.{2 * i + 2}.weight(*,u)")
            for i, n in enumerate((5, 7, 11, 13))
        ),
        unexplained=True,
        why="the layer that is never called is no part of the function: not counted, but named",
        extra=28,
    ),
)
