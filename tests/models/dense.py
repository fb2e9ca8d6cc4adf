"""Dense networks: activations, residuals, gates, ties."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded


def mlp(*widths: int, act: Callable[[], nn.Module], bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [act()] * bool(i) + [nn.Linear(a, b, bias=bias)]
    return nn.Sequential(*layers)


class Act(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def two_hidden(first: str = "", second: str = "", **freedoms: int) -> tuple[Expected, ...]:
    """The two hidden spaces of a 3-5-7-2 MLP with layers 0, 2, 4."""
    return (
        Expected(5, **freedoms, legs=f"0.weight(u)&0.bias(u) {first} 2.weight(*,u)"),
        Expected(7, **freedoms, legs=f"2.weight(u)&2.bias(u) {second} 4.weight(*,u)"),
    )


def activation(name: str, act: Callable[[], nn.Module], why: str, **freedoms: int) -> Case:
    """The case of a 3-5-7-2 MLP with one activation everywhere."""
    build = seeded(lambda: mlp(3, 5, 7, 2, act=act))
    return Case(f"mlp_{name}", build, numbers(8, 3), two_hidden(**freedoms), why=why)


class Residual(nn.Module):
    """stem, relu, x + f(x) twice, head; optionally a LayerNorm in front of every f and of the head."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 7)
        self.up = nn.ModuleList([nn.Linear(7, 5), nn.Linear(7, 11)])
        self.down = nn.ModuleList([nn.Linear(5, 7), nn.Linear(11, 7)])
        self.norm = nn.ModuleList([nn.LayerNorm(7) if norm else nn.Identity() for _ in range(3)])
        self.head = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for norm, up, down in zip(self.norm, self.up, self.down, strict=False):
            x = x + down(F.relu(up(norm(x))))
        return self.head(self.norm[2](x))


RESIDUAL_HIDDEN = tuple(
    Expected(n, scales=1, legs=f"up.{i}.weight(u)&up.{i}.bias(u) down.{i}.weight(*,u)") for i, n in enumerate((5, 11))
)
STREAM = "stem.weight(u)&stem.bias(u) up.0.weight(*,u) down.0.weight(u)&down.0.bias(u) up.1.weight(*,u) "
STREAM += "down.1.weight(u)&down.1.bias(u) head.weight(*,u)"
NORMS = " ".join(f"norm.{i}.weight(u)&norm.{i}.bias(u)" for i in range(3))


class Gated(nn.Module):
    """down(f(gate x) * up x), or fused through F.glu."""

    def __init__(self, kind: str, bias: bool = True) -> None:
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(3, 14 if kind == "glu" else 7, bias=bias)
        self.gate = None if kind == "glu" else nn.Linear(3, 7, bias=bias)
        self.down = nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.glu(self.up(x)))
        gate = self.gate(x)
        return self.down((F.silu(gate) if self.kind == "swiglu" else gate) * self.up(x))


ROW = "up.weight(u)&up.bias(u) gate.weight(u)&gate.bias(u) down.weight(*,u)"
GLU = "up.weight(0#2.u)&up.bias(0#2.u) up.weight(1#2.u)&up.bias(1#2.u) down.weight(*,u)"

DENSE: tuple[Case, ...] = (
    activation("relu", nn.ReLU, "relu passes positive scales, no sign", scales=1),
    activation("tanh", nn.Tanh, "tanh is odd: rows, bias and next columns flip together", signs=1),
    activation("gelu", nn.GELU, "gelu passes neither scale nor sign: permutation only"),
    activation("leaky", lambda: nn.LeakyReLU(0.1), "homogeneous of degree one, not odd", scales=1),
    activation("abs", lambda: Act(torch.abs), "even: absorbs the row's sign; passes scale", scales=1, signs=1),
    activation("square", lambda: Act(torch.square), "even; rows +1, next columns -2", scales=1, signs=1),
    activation("sin", lambda: Act(torch.sin), "odd, not homogeneous", signs=1),
    activation("cos", lambda: Act(torch.cos), "even: the row's sign is absorbed (no column moves)", signs=1),
    activation("prelu", nn.PReLU, "one shared slope: its only entry belongs to no unit", scales=1),
    Case(
        "mlp_prelu_channels",
        seeded(lambda: nn.Sequential(*[nn.Linear(3, 5), nn.PReLU(5), nn.Linear(5, 7), nn.PReLU(7), nn.Linear(7, 2)])),
        numbers(8, 3),
        two_hidden(first="1.weight(u)", second="3.weight(u)", scales=1),
        why="a slope per unit moves with it under permutation and has exponent 0 under scale",
    ),
    Case(
        "mlp_width_one",
        seeded(lambda: mlp(3, 1, 2, act=nn.ReLU)),
        numbers(8, 3),
        (Expected(1, permutation=False, scales=1, legs="0.weight(u)&0.bias(u) 2.weight(*,u)"),),
        why="one unit cannot be permuted but can be rescaled",
    ),
    Case(
        "perceptron_2_2_1",
        seeded(lambda: mlp(2, 2, 1, act=nn.ReLU, bias=False)),
        numbers(8, 2),
        (Expected(2, scales=1, legs="0.weight(u) 2.weight(*,u)"),),
        why="the input axis has size 2 as well and is rigid; no biases",
    ),
    Case(
        "residual_mlp",
        seeded(lambda: Residual(norm=False)),
        numbers(8, 3),
        (Expected(7, scales=1, legs=STREAM), *RESIDUAL_HIDDEN),
        why="writers of the stream +1, readers -1; the stem's relu forbids its sign",
    ),
    Case(
        "residual_mlp_prenorm",
        seeded(lambda: Residual(norm=True)),
        numbers(8, 3),
        (Expected(7, scales=3, signs=3, legs=f"{STREAM} {NORMS}"), *RESIDUAL_HIDDEN),
        why="LayerNorm pins the stream itself; each of the three (gamma, beta | linear reader) has a scale and a sign",
    ),
    Case(
        "glu",
        seeded(lambda: Gated("glu")),
        numbers(8, 3),
        (Expected(7, scales=1, signs=1, legs=GLU),),
        why="a * sigmoid(b): the b half is pinned, the a half against the reader is linear",
    ),
    Case(
        "swiglu",
        seeded(lambda: Gated("swiglu")),
        numbers(8, 3),
        (Expected(7, scales=1, signs=1, legs=ROW),),
        why="gate rows 0, up rows +1, down columns -1, with positive or negative factor",
    ),
    Case(
        "bilinear_gate",
        seeded(lambda: Gated("bilinear")),
        numbers(8, 3),
        (Expected(7, scales=2, signs=2, legs=ROW),),
        why="exponents of gate, up, down sum to zero: two dimensions (swapping gate and up is not counted)",
    ),
)
