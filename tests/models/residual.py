"""Convolutional networks with a residual stream, one per kind of normalisation."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import bn, head
from .expect import Case, Expected, numbers, seeded


class FilterResponse(nn.Module):
    """Filter response norm: x / rms over the picture, gamma, beta, and optionally the threshold max(., tau)."""

    def __init__(self, channels: int, threshold: bool = False) -> None:
        super().__init__()
        shape = (1, channels, 1, 1)
        self.gamma, self.beta = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))
        self.eps = 1e-3  # large enough that nobody can mistake the norm for a scale invariant one
        self.tau = nn.Parameter(torch.zeros(shape)) if threshold else None

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.square().mean(dim=(2, 3), keepdim=True) + self.eps)
        x = self.gamma * x + self.beta
        return x if self.tau is None else torch.maximum(x, self.tau)


class Block(nn.Module):
    """act(norm(conv(act(norm(conv(x))))) + shortcut(x)); the shortcut is projected where the width changes."""

    def __init__(self, width: int, hidden: int, out: int, norm: Callable[[int], nn.Module], act: nn.Module) -> None:
        super().__init__()
        stride = 1 if width == out else 2
        self.conv1, self.norm1 = nn.Conv2d(width, hidden, 3, stride, padding=1, bias=False), norm(hidden)
        self.conv2, self.norm2 = nn.Conv2d(hidden, out, 3, padding=1, bias=False), norm(out)
        self.short: nn.Module = nn.Identity()
        if width != out:
            self.short = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), norm(out))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(hidden)) + self.short(x))


class ResNet(nn.Module):
    """Stem, blocks given as (width, hidden, out), global average pooling, Linear."""

    def __init__(
        self, blocks: tuple[tuple[int, int, int], ...], norm: Callable[[int], nn.Module], act: nn.Module
    ) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(2, blocks[0][0], 3, padding=1), norm(blocks[0][0]), act
        self.blocks = nn.Sequential(*(Block(*widths, norm, act) for widths in blocks))
        self.head = head(blocks[-1][2])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.act(self.norm(self.conv(x)))))


ONE = ((5, 7, 5),)
TWO = ((5, 7, 5), (5, 3, 11))
GROUPED = ((12, 20, 12),)
THREE = ((3, 5, 3), (3, 7, 11), (11, 9, 11), (11, 13, 8))


def affine(name: str, where: str = "u") -> str:
    """The legs of a norm with weight and bias only."""
    return f"{name}.weight({where}) {name}.bias({where})"


def response(name: str, where: str = "u") -> str:
    """The legs of a filter response norm."""
    return f"{name}.gamma(*,{where}) {name}.beta(*,{where})"


def spaces(
    blocks: tuple[tuple[int, int, int], ...],
    norm: Callable[[str], str],
    freedoms: Callable[[int], dict[str, int]],
) -> tuple[Expected, ...]:
    """Hidden and stream spaces of a ResNet; `freedoms` of a space into which that many norms write."""
    found, writers = [], 1
    legs = ["conv.weight(u)&conv.bias(u)", norm("norm")]
    for i, (width, hidden, out) in enumerate(blocks):
        at = f"blocks.{i}."
        inner = f"{at}conv1.weight(u) {norm(at + 'norm1')} {at}conv2.weight(*,u)"
        found.append(Expected(hidden, **freedoms(1), legs=inner))
        legs.append(f"{at}conv1.weight(*,u)")
        if width != out:
            legs.append(f"{at}short.0.weight(*,u)")
            found.append(Expected(width, **freedoms(writers), legs=" ".join(legs)))
            legs, writers = [f"{at}short.0.weight(u)", norm(f"{at}short.1")], 1
        legs += [f"{at}conv2.weight(u)", norm(f"{at}norm2")]
        writers += 1
    legs.append("head.2.weight(*,u)")
    return (*found, Expected(blocks[-1][2], **freedoms(writers), legs=" ".join(legs)))


def group_spaces() -> tuple[Expected, ...]:
    """GroupNorm(4) over 12 and 20 channels: blocks of 3 and of 5."""
    found = []
    for inner, writers in ((3, 2), (5, 1)):
        for where, size, copies in (("u.*", 4, 1), ("a4.u", inner, 4)):
            if inner == 3:
                legs = (
                    f"conv.weight({where})&conv.bias({where}) {affine('norm', where)} blocks.0.conv1.weight(*,{where}) "
                )
                legs += f"blocks.0.conv2.weight({where}) {affine('blocks.0.norm2', where)} head.2.weight(*,{where})"
            else:
                legs = f"blocks.0.conv1.weight({where}) {affine('blocks.0.norm1', where)} "
                legs += f"blocks.0.conv2.weight(*,{where})"
            if copies == 1:
                found.append(Expected(size, signs=writers, covered=(1, 0, 0, 0), legs=legs))
            else:
                found.append(Expected(size, copies, scales=1, legs=legs))
    return tuple(found)


def plain_convolution(act: nn.Module, affine_norm: bool) -> nn.Module:
    """conv, instance norm, activation, conv, activation, head."""
    first = [nn.Conv2d(2, 5, 3), nn.InstanceNorm2d(5, affine=affine_norm), act]
    return nn.Sequential(*first, nn.Conv2d(5, 7, 1), act, head(7))


class Squeeze(nn.Module):
    """conv, bn, relu, squeeze-and-excitation, conv, relu, head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 7, 3, bias=False), nn.BatchNorm2d(7)
        self.squeeze, self.excite = nn.Linear(7, 3), nn.Linear(3, 7)
        self.next, self.head = nn.Conv2d(7, 5, 1), head(5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3))))))
        return self.head(F.relu(self.next(x * gate[:, :, None, None])))


IMAGE = numbers(3, 2, 6, 6)
BN_LEGS = f"0.weight(u)&0.bias(u) {bn('1')} 3.weight(*,u)"
INSTANCE_REST = Expected(7, scales=1, legs="3.weight(u)&3.bias(u) 5.2.weight(*,u)")

RESIDUAL: tuple[Case, ...] = (
    Case(
        "resnet_bn",
        seeded(lambda: ResNet(TWO, nn.BatchNorm2d, nn.ReLU())),
        IMAGE,
        spaces(TWO, bn, lambda n: {"scales": 1, "norm_scales": n, "norm_signs": n}),
        why="one scale per space (all gammas and betas | all readers); every norm that writes into a space adds the "
        "one-sided "
        "scale and the sign of its own input. Stream 5: stem and block 0. Stream 11: projection and block 1",
    ),
    Case(
        "resnet_group_1",
        seeded(lambda: ResNet(ONE, lambda n: nn.GroupNorm(1, n), nn.ReLU())),
        IMAGE,
        spaces(ONE, affine, lambda n: {"scales": 1}),
        why="normalised over all channels at once: permutation passes, the input neither scales nor flips per channel; "
        "gamma, beta | readers scale. The stem's bias matters (mean over channels)",
    ),
    Case(
        "resnet_group_4",
        seeded(lambda: ResNet(GROUPED, lambda n: nn.GroupNorm(4, n), nn.ReLU())),
        IMAGE,
        group_spaces(),
        why="four groups permute, channels permute inside each. A whole group in front of the norm may flip with "
        "its gammas "
        "(the norm is odd per group): one sign of the group space per norm that writes",
    ),
    Case(
        "resnet_frn_silu",
        seeded(lambda: ResNet(THREE, FilterResponse, nn.SiLU())),
        IMAGE,
        spaces(THREE, response, lambda n: {"signs": n}),
        why="SiLU pins what leaves the norms; the norm is odd in its input: (kernel rows, gamma) flip, one sign per "
        "norm; "
        "no scale because of the norm's eps",
    ),
    Case(
        "resnet_frn_relu",
        seeded(lambda: ResNet(ONE, FilterResponse, nn.ReLU())),
        IMAGE,
        spaces(ONE, response, lambda n: {"scales": 1, "signs": n}),
        why="as with SiLU, and relu passes the scale of gamma and beta",
    ),
    Case(
        "frn_tlu",
        seeded(
            lambda: nn.Sequential(nn.Conv2d(2, 5, 3), FilterResponse(5, True), nn.Conv2d(5, 7, 1), nn.ReLU(), head(7))
        ),
        IMAGE,
        (
            Expected(5, scales=1, signs=1, legs=f"0.weight(u)&0.bias(u) {response('1')} 1.tau(*,u) 2.weight(*,u)"),
            Expected(7, scales=1, legs="2.weight(u)&2.bias(u) 4.2.weight(*,u)"),
        ),
        why="max(y, tau): gamma, beta and tau scale together; (kernel rows, bias, gamma) flip",
    ),
    Case(
        "instance_norm",
        seeded(lambda: plain_convolution(nn.ReLU(), False)),
        IMAGE,
        (Expected(5, legs="0.weight(u) 3.weight(*,u)"), INSTANCE_REST),
        extra=5,
        why="eps pins the scale in front, and behind the norm there is no weight before relu to scale. Not counted: "
        "the bias in "
        "front of the norm is dead",
    ),
    Case(
        "instance_norm_affine",
        seeded(lambda: plain_convolution(nn.ReLU(), True)),
        IMAGE,
        (Expected(5, scales=1, signs=1, legs=f"0.weight(u)&0.bias(u) {affine('1')} 3.weight(*,u)"), INSTANCE_REST),
        extra=5,
        why="(gamma, beta | reader) scale; the norm is odd per channel: (rows, gamma) flip. The bias in front is dead",
    ),
    Case(
        "bn_mlp_tanh",
        seeded(lambda: nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))),
        numbers(8, 3),
        (Expected(7, signs=1, norm_scales=1, norm_signs=1, legs=BN_LEGS),),
        why="tanh pins the scale and passes the sign of (gamma, beta | reader); the norm's input flips with mean "
        "and gamma",
    ),
    Case(
        "squeeze_excite",
        seeded(Squeeze),
        IMAGE,
        (
            Expected(
                7,
                scales=1,
                norm_scales=1,
                norm_signs=1,
                legs=f"conv.weight(u) {bn('bn')} squeeze.weight(*,u) excite.weight(u)&excite.bias(u) next.weight(*,u)",
            ),
            Expected(3, scales=1, legs="squeeze.weight(u)&squeeze.bias(u) excite.weight(*,u)"),
            Expected(5, scales=1, legs="next.weight(u)&next.bias(u) head.2.weight(*,u)"),
        ),
        why="the excitation's rows are tied to the channels they gate; the sigmoid pins them, the channels scale "
        "against "
        "squeeze and reader",
    ),
)
