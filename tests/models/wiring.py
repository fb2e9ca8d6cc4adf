"""Convolutional networks with unusual wiring: shuffled groups, branches, dense blocks, a U-Net."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .convolution import IMAGE, bn, head
from .expect import Case, Expected, numbers, seeded


class Shuffle(nn.Module):
    """ShuffleNet unit with a residual stream of 2 x 5 channels and 2 x 2 x 3 hidden ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(2, 10, 3, bias=False), nn.BatchNorm2d(10)
        self.one, self.bn1 = nn.Conv2d(10, 12, 1, groups=2, bias=False), nn.BatchNorm2d(12)
        self.deep, self.bn2 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.two, self.bn3 = nn.Conv2d(12, 10, 1, groups=2, bias=False), nn.BatchNorm2d(10)
        self.head = head(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        h = F.relu(self.bn1(self.one(x)))
        h = h.view(h.shape[0], 2, 6, *h.shape[2:]).transpose(1, 2).reshape(h.shape)
        h = self.bn3(self.two(self.bn2(self.deep(h))))
        return self.head(F.relu(x + h))


def shuffle_spaces() -> tuple[Expected, ...]:
    """Hidden channel (g, g', m): written by group g, read by group g'; after the shuffle it sits at (g', m, g)."""
    before, after, group = "a2.b2.u", "b2.u.a2", "u.*"
    outer = [f"stem.weight({group})", bn("bn", group), bn("bn3", group), f"one.weight({group})", f"two.weight({group})"]
    outer += ["one.weight(2.u.3)", f"head.2.weight(*,{group})", "two.weight(*,3.u)"]
    outer += [bn("bn1", group), bn("bn1", "2.u.3"), bn("bn2", group), bn("bn2", "2.3.u")]
    outer += [f"deep.weight({group})", "deep.weight(2.3.u)"]
    inner = f"one.weight({before}) {bn('bn1', before)} deep.weight({after}) {bn('bn2', after)} two.weight(b2.*,u.a2)"
    stream = f"stem.weight(a2.u) {bn('bn', 'a2.u')} one.weight(a2.*,u) two.weight(a2.u) {bn('bn3', 'a2.u')} "
    return (
        Expected(
            2,
            covered=(5, 2, 6, 6),
            legs=" ".join(outer),
            note="groups: on both sides of the shuffle, tied by the residual",
        ),
        Expected(5, 2, scales=1, norm_scales=2, norm_signs=2, legs=stream + "head.2.weight(*,a2.u)"),
        Expected(3, 4, scales=2, signs=1, norm_scales=2, norm_signs=2, legs=inner),
    )


class Branches(nn.Module):
    """Two convolutions of the input side by side, read together."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 5, 1)
        self.join, self.head = nn.Conv2d(8, 7, 1), head(7)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([F.relu(self.left(x)), torch.tanh(self.right(x))], dim=1)
        return self.head(F.relu(self.join(both)))


class Dense(nn.Module):
    """DenseNet block: every convolution reads all earlier features; pre-activation batch norm or none."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.one, self.two = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(8, 7, 3, padding=1)
        make = nn.BatchNorm2d if norm else lambda _: nn.Identity()
        self.bn1, self.bn2, self.bn3 = make(3), make(8), make(15)
        self.head = head(15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.cat([x, self.one(F.relu(self.bn1(x)))], dim=1)
        x = torch.cat([x, self.two(F.relu(self.bn2(x)))], dim=1)
        return self.head(F.relu(self.bn3(x)))


def dense_spaces(norm: bool) -> tuple[Expected, ...]:
    """Features at columns 0:3, 3:8 and 8:15 of whatever reads them."""
    writers, spans = ("stem", "one", "two"), ((0, 3), (3, 8), (8, 15))
    found = []
    for i, (writer, (a, b)) in enumerate(zip(writers, spans, strict=True)):
        legs = [f"{writer}.weight(u)&{writer}.bias(u)", f"head.2.weight(*,{a}:{b}|u)"]
        legs += [f"{reader}.weight(*,{a}:{b}|u)" for reader in writers[i + 1 :]]
        if norm:
            legs += [bn(f"bn{j}", f"{a}:{b}|u") for j in range(i + 1, 4)]
        freedoms = {"scales": 3 - i, "norm_scales": 1, "norm_signs": 1} if norm else {"scales": 1}
        found.append(Expected(b - a, **freedoms, legs=" ".join(legs)))
    return tuple(found)


class UNet(nn.Module):
    """Two levels, transposed convolutions on the way up, skips by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 5, 3, padding=1)
        self.deep = nn.Conv2d(5, 7, 3, padding=1)
        self.up2, self.mid = nn.ConvTranspose2d(7, 4, 2, stride=2), nn.Conv2d(9, 6, 3, padding=1)
        self.up1, self.last = nn.ConvTranspose2d(6, 8, 2, stride=2), nn.Conv2d(11, 9, 3, padding=1)
        self.out = nn.Conv2d(9, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        x = F.relu(self.deep(F.max_pool2d(two, 2)))
        x = F.relu(self.mid(torch.cat([two, self.up2(x)], dim=1)))
        x = F.relu(self.last(torch.cat([self.up1(x), one], dim=1)))
        return self.out(x)


UNET = (
    Expected(3, scales=1, legs="down1.weight(u)&down1.bias(u) down2.weight(*,u) last.weight(*,8:11|u)"),
    Expected(5, scales=1, legs="down2.weight(u)&down2.bias(u) deep.weight(*,u) mid.weight(*,0:5|u)"),
    Expected(7, scales=1, legs="deep.weight(u)&deep.bias(u) up2.weight(u)"),
    Expected(4, scales=1, signs=1, legs="up2.weight(*,u)&up2.bias(u) mid.weight(*,5:9|u)"),
    Expected(6, scales=1, legs="mid.weight(u)&mid.bias(u) up1.weight(u)"),
    Expected(8, scales=1, signs=1, legs="up1.weight(*,u)&up1.bias(u) last.weight(*,0:8|u)"),
    Expected(9, scales=1, legs="last.weight(u)&last.bias(u) out.weight(*,u)"),
)


WIRING: tuple[Case, ...] = (
    Case(
        "shuffle",
        seeded(Shuffle),
        IMAGE,
        shuffle_spaces(),
        why="hidden (g, g', m): bn1 output scale (kernel takes -1), bn2 output scale and sign (no activation up to the "
        "next conv), two norms. Stream (g, c): stem's and the last norm write it. Groups: all freedoms covered inside",
    ),
    Case(
        "branches",
        seeded(Branches),
        IMAGE,
        (
            Expected(3, scales=1, legs="left.weight(u)&left.bias(u) join.weight(*,0:3|u)"),
            Expected(5, signs=1, legs="right.weight(u)&right.bias(u) join.weight(*,3:8|u)"),
            Expected(7, scales=1, legs="join.weight(u)&join.bias(u) head.2.weight(*,u)"),
        ),
        why="each branch is a space of its own with its own activation",
    ),
    Case(
        "densenet",
        seeded(lambda: Dense(norm=False)),
        IMAGE,
        dense_spaces(norm=False),
        why="a relu sits in front of every reader: one scale per feature, shared by all readers",
    ),
    Case(
        "densenet_bn",
        seeded(lambda: Dense(norm=True)),
        IMAGE,
        dense_spaces(norm=True),
        why="features are read only through batch norms: one norm scale and sign of the feature itself (all means and "
        "gammas behind), and one plain scale (gamma, beta | reader) per norm that reads it",
    ),
    Case(
        "unet",
        seeded(UNet),
        numbers(2, 2, 8, 8),
        UNET,
        why="transposed kernels are (in, out); between an up-convolution and its reader there is no activation, hence "
        "also a sign",
    ),
)
