"""Random programs of operations that have rules: what discovery claims about them holds, at other inputs as well.

The analysis itself must be right: a freedom that only the proof removes is a wrong rule, and counts as a failure. For a
longer search: `python -m tests.test_random_programs FIRST LAST`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob

PROGRAMS = 20
WIDEST = 200  # entries of one example
Step = Callable[["Program", Tensor], Tensor]


class Unfit(Exception):  # noqa: N818 - the generator tries another step
    """The step cannot follow a tensor of this shape."""


class Program(nn.Module):
    """A Linear layer, up to six random steps on what it writes, and a Linear layer that reads the result."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.weights = nn.ParameterList()
        units = self.rng.choice([6, 8, 12])
        self.stem, self.steps, self.names = nn.Linear(3, units), [], []
        h = torch.randn(2, units)
        length = self.rng.randrange(1, 7)
        for _ in range(50):
            make = self.rng.choice(STEPS)
            try:
                step = make(self, h)
                after = step(self, h)
            except (Unfit, RuntimeError, IndexError, ValueError):  # a shape that this step cannot take
                continue
            if after.dim() > 1 and len(after) == 2 and 2 <= after[0].numel() <= WIDEST and len(self.steps) < length:
                self.steps.append(step)
                self.names.append(make.__name__)
                h = after
        self.out = nn.Linear(h[0].numel(), 2)

    def weight(self, *shape: int) -> int:
        """A new parameter; its number."""
        self.weights.append(nn.Parameter(torch.randn(shape)))
        return len(self.weights) - 1

    def axis(self, h: Tensor, multiple_of: int = 1) -> int:
        """An axis other than the batch."""
        axis = self.rng.randrange(1, h.dim())
        if h.shape[axis] % multiple_of or h.shape[axis] <= multiple_of:
            raise Unfit
        return axis

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for step in self.steps:
            h = step(self, h)
        return self.out(h.flatten(1))


def function(net: Program, h: Tensor) -> Step:
    chosen = net.rng.choice([F.relu, torch.tanh, torch.abs, F.gelu, torch.square, torch.neg, lambda x: x + F.relu(x)])
    return lambda net, h: chosen(h)


def window(net: Program, h: Tensor) -> Step:
    axis = net.axis(h)
    start = net.rng.randrange(h.shape[axis])
    length = net.rng.randrange(1, h.shape[axis] - start + 1)
    return lambda net, h: h.narrow(axis, start, length)


def stride(net: Program, h: Tensor) -> Step:
    axis, start, step = net.axis(h), net.rng.randrange(3), net.rng.choice([2, 3])
    index = (*[slice(None)] * axis, slice(start, None, step))
    return lambda net, h: h[index]


def rearranged(net: Program, h: Tensor) -> Step:
    axis = net.axis(h)
    cut = net.rng.randrange(1, h.shape[axis])
    chosen = net.rng.choice(
        [
            lambda x: x.flip(axis),
            lambda x: x.roll(cut, axis),
            lambda x: x.repeat_interleave(2, axis),
            lambda x: torch.cat([x, x], axis),
            lambda x: torch.cat([x.narrow(axis, cut, x.shape[axis] - cut), torch.tanh(x.narrow(axis, 0, cut))], axis),
            lambda x: torch.stack([x, -x], axis),
        ]
    )
    return lambda net, h: chosen(h)


def picked(net: Program, h: Tensor) -> Step:
    axis = net.axis(h)
    size = h.shape[axis]
    places = torch.tensor([net.rng.randrange(size) for _ in range(net.rng.randrange(1, size + 1))])
    if net.rng.random() < 0.5:
        places = torch.arange(size)[places.min() : places.max() + 1]
    return lambda net, h: h.index_select(axis, places)


def masked(net: Program, h: Tensor) -> Step:
    axis = net.axis(h)
    mask = torch.tensor([net.rng.random() < 0.5 for _ in range(h.shape[axis])])
    mask = mask.view([-1 if a == axis else 1 for a in range(h.dim())])
    fill = net.rng.choice([0.0, 0.0, 1.0])
    return lambda net, h: h.masked_fill(mask, fill)


def summed(net: Program, h: Tensor) -> Step:
    axis, keep = net.axis(h), h.dim() == 2
    chosen = net.rng.choice(
        [
            lambda x: x.sum(axis, keepdim=keep),
            lambda x: x.amax(axis, keepdim=keep),
            lambda x: x.cumsum(axis),
            lambda x: x.softmax(axis),
            lambda x: x.sort(axis).values,
            lambda x: x.topk(2, axis).values,
            lambda x: F.avg_pool1d(x.flatten(1)[:, None], 2).squeeze(1),
            lambda x: F.max_pool1d(x.flatten(1)[:, None], 3, 2).squeeze(1),
        ]
    )
    return lambda net, h: chosen(h)


def viewed(net: Program, h: Tensor) -> Step:
    size = net.rng.choice([2, 3, 4])
    axis = net.axis(h, size)
    shape = net.rng.choice([(size, -1), (-1, size)])
    shuffled = net.rng.random() < 0.5
    if not shuffled:
        return lambda net, h: h.unflatten(axis, shape)
    return lambda net, h: h.unflatten(axis, shape).transpose(axis, axis + 1).flatten(axis, axis + 1)


def turned(net: Program, h: Tensor) -> Step:
    order = list(range(1, h.dim()))
    net.rng.shuffle(order)
    flat = net.rng.random() < 0.5 and h.dim() > 2
    return lambda net, h: h.permute(0, *order).flatten(1, 2) if flat else h.permute(0, *order)


def in_pieces(net: Program, h: Tensor) -> Step:
    """Heads in two pieces that are treated differently."""
    width = net.rng.choice([2, 3])
    axis = net.axis(h, width)
    cut = net.rng.randrange(1, h.shape[axis] // width)

    def step(net: Program, h: Tensor) -> Tensor:
        heads = h.unflatten(axis, (-1, width))
        left, right = heads.narrow(axis, 0, cut), heads.narrow(axis, cut, heads.shape[axis] - cut)
        return torch.cat([torch.tanh(left).flatten(axis, axis + 1), F.relu(right).flatten(axis, axis + 1)], axis)

    return step


def halves(net: Program, h: Tensor) -> Step:
    axis = net.axis(h, 2)
    chosen = net.rng.choice([lambda a, b: a * b, lambda a, b: a + 2 * b, lambda a, b: a * torch.sigmoid(b)])
    return lambda net, h: chosen(*h.chunk(2, axis))


def weighted(net: Program, h: Tensor) -> Step:
    """Layers with weights of their own."""
    last, channels, kind = h.shape[-1], h.shape[1], net.rng.randrange(6)
    if kind == 0:
        a, b = net.weight(4, last), net.weight(4)
        return lambda net, h: F.linear(h, net.weights[a], net.weights[b])
    if kind == 1:
        a, b = net.weight(last), net.weight(last)
        return lambda net, h: h * net.weights[a] + net.weights[b]
    if kind == 2:
        a, b = net.weight(last), net.weight(last)
        return lambda net, h: F.layer_norm(h, (last,), net.weights[a], net.weights[b])
    if kind == 3:
        groups = net.rng.choice([1, 2, 3])
        a, b = net.weight(channels), net.weight(channels)
        return lambda net, h: F.group_norm(h, groups, net.weights[a], net.weights[b])
    if kind == 4:
        groups = net.rng.choice([1, 2])
        a = net.weight(4, channels // groups, net.rng.choice([1, 2]))
        return lambda net, h: F.conv1d(h, net.weights[a], groups=groups)
    a = net.weight(3, last)
    return lambda net, h: torch.cdist(h if h.dim() > 2 else h[:, None], net.weights[a], p=1.0)


def padded(net: Program, h: Tensor) -> Step:
    widths = net.rng.randrange(2), net.rng.randrange(3)
    return lambda net, h: F.pad(h, widths)


def outer(net: Program, h: Tensor) -> Step:
    return lambda net, h: torch.einsum("bi,bj->bij", h.flatten(1)[:, :6], h.flatten(1)[:, :6])


def scattered(net: Program, h: Tensor) -> Step:
    axis = net.axis(h)
    places = torch.tensor([net.rng.randrange(h.shape[axis]) for _ in range(h.shape[axis])])
    return lambda net, h: torch.zeros_like(h).index_add(axis, places, h)


STEPS = [
    function, function, window, stride, rearranged, rearranged, picked, masked, summed, summed, viewed, viewed, turned,
    in_pieces, halves, weighted, weighted, padded, outer, scattered,
]  # fmt: skip


def complaint(seed: int) -> str:
    """What is wrong with the symmetry that is found for a program; "" if nothing is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Program(seed).double().eval()
        inputs = [2 * torch.randn(2, 3, dtype=torch.float64) for _ in range(3)]
        state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
        other = {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in state.items()}
    symmetry = ob.discover(net, inputs[0])
    for sentence in symmetry.unexplained:
        if "proof" in sentence:
            return f"{net.names}: {sentence}"
    for draw in range(6):
        moved, x = symmetry.apply(symmetry.random(draw), other), inputs[1 + draw % 2]
        with torch.no_grad():
            before, after = (torch.func.functional_call(net, tensors, (x,)) for tensors in (other, moved))
        if not torch.allclose(before, after, rtol=1e-8, atol=1e-8 * float(before.abs().max())):
            return f"{net.names}: the function changes by {float((after - before).abs().max()):.2g}\n{symmetry}"
    return ""


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_random_programs_keep_their_function(seed: int) -> None:
    assert not complaint(seed)


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        if found := complaint(number):
            sys.stdout.write(f"{number} {found}\n")
