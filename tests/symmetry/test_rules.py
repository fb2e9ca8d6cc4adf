"""Rules where they must hold back: the same operations with a freedom taken away, proved at other inputs as well.

`spaces` lists (size, copies, permutable, generators), worked out by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob

Space = tuple[int, int, bool, tuple[str, ...]]
FREE, SCALED, SIGNED, LINEAR = (), ("scale",), ("sign",), ("scale", "sign")


class Net(nn.Module):
    """Parts and a function of them."""

    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(forward: Callable[..., Tensor], hidden: int = 6, read: int = 6, **parts: Any) -> Net:
    """`forward(net, h)` between a layer of `hidden` units and a reader of `read` inputs; h is what the layer writes."""
    layers = {"one": nn.Linear(3, hidden), "out": nn.Linear(read, 2), **parts}
    return Net(lambda net, x: net.out(forward(net, net.one(x), x)), **layers)


def gathered(net: Net, h: Tensor, x: Tensor) -> Tensor:
    return net.two(x).gather(1, h.topk(3).indices)


def looked_up(shift: int, flip: bool = False) -> Callable[..., Tensor]:
    """Each of two heads has 7 codes of 3 numbers; positions found in one head are used in the same or the other one."""

    def forward(net: Net, h: Tensor, x: Tensor) -> Tensor:
        place = torch.cdist(h.view(-1, 2, 3).transpose(0, 1), net.codes).argmin(-1)
        place = (place + shift) % 7 if shift else place
        codes = net.codes.flip(0) if flip else net.codes
        return codes.gather(1, place[..., None].expand(-1, -1, 3)).transpose(0, 1).flatten(1)

    return forward


def fixed_index(net: Net, h: Tensor, x: Tensor) -> Tensor:
    return torch.zeros_like(h).index_add(1, torch.tensor([0, 1, 1, 2, 5, 4]), h)


def per_unit_index(net: Net, h: Tensor, x: Tensor) -> Tensor:
    """Where an entry is added depends on the unit and on the input."""
    place = (x[:, :1] > torch.linspace(-1, 1, 6, dtype=x.dtype)).long()
    return torch.zeros(2, 6, dtype=x.dtype).scatter_add(0, place, F.relu(h))[place[:, 0]]


def overwritten(net: Net, h: Tensor, x: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0] = 1.0
    return h


def bilinear(net: Net, h: Tensor, x: Tensor) -> Tensor:
    return net.both(F.relu(h), F.relu(h))


def shifted_code(shift: int) -> Callable[..., Tensor]:
    def forward(net: Net, h: Tensor, x: Tensor) -> Tensor:
        place = torch.cdist(h, net.codes).argmin(-1)
        return (place[:, None] == torch.arange(shift, 7 + shift)).to(h.dtype) @ net.codes

    return forward


def rivals(net: Net, h: Tensor, x: Tensor) -> Tensor:
    """Several entries for one place: the last one stays."""
    place = torch.cdist(x[:, None].expand(-1, 4, -1) * torch.arange(1, 5)[:, None], net.codes).argmin(-1)
    return torch.zeros(len(x), 7, dtype=x.dtype).scatter(1, place, h)


def crossed(net: Net, x: Tensor) -> Tensor:
    """Two streams read different rows of one matrix; the same rows once more, overlapping, if `net.again`."""
    left, right = F.relu(net.one(x)), torch.tanh(net.two(x))
    both = left @ net.fused[:4].T + right @ net.fused[4:].T
    return net.out(both + left @ net.fused[2:6].T if net.again else both)


def crossing(again: bool) -> Net:
    net = Net(crossed, one=nn.Linear(3, 5), two=nn.Linear(3, 5), fused=weights(8, 5), out=nn.Linear(4, 2))
    net.again = again
    return net


def fused_heads(mixed: bool) -> Callable[..., Tensor]:
    """Three heads of queries, a key and a value of two numbers each, in one projection of 5 x 2 rows."""

    def forward(net: Net, h: Tensor, x: Tensor) -> Tensor:
        heads = h.view(-1, 5, 2)
        query, key, value = heads[:, :3], heads[:, [-2]], heads[:, [-1]]
        out = (query * key).sum(-1, keepdim=True).softmax(1) * value
        return (out + heads[:, :3] if mixed else out).flatten(1)

    return forward


def group_in_pieces(net: Net, h: Tensor, x: Tensor) -> Tensor:
    """A group's members are cut into two pieces, which share its mean: they keep one sign."""
    members = net.norm(h).view(-1, 2, 6)
    return torch.cat([torch.tanh(members[..., :2]), F.relu(members[..., 2:])], 2).flatten(1)


CASES: dict[str, tuple[Callable[[], nn.Module], list[Space] | None]] = {  # None: nothing but soundness is asked
    "index_add_along_units": (lambda: mlp(fixed_index), []),
    "scatter_by_unit": (lambda: mlp(per_unit_index), [(6, 1, False, SCALED)]),
    "sort_along_batch": (lambda: mlp(lambda net, h, x: F.relu(h).sort(0).values), [(6, 1, True, SCALED)]),
    "sort_along_units": (lambda: mlp(lambda net, h, x: h.sort(1, descending=True).values), [(6, 1, True, FREE)]),
    "topk_unsorted": (lambda: mlp(lambda net, h, x: h.topk(3, sorted=False).values, read=3), []),
    "positions_as_numbers": (lambda: mlp(lambda net, h, x: h.topk(3).indices.to(h.dtype), read=3), []),
    "positions_added": (lambda: mlp(lambda net, h, x: h + h.argsort(1)), []),
    "positions_of_another_layer": (lambda: mlp(gathered, read=3, two=nn.Linear(3, 6)), [(6, 1, True, FREE)]),
    "positions_of_ties": (
        lambda: mlp(lambda net, h, x: gathered(net, F.relu(h), x), read=3, two=nn.Linear(3, 6)),
        [],
    ),
    "positions_of_ties_shifted": (
        lambda: mlp(lambda net, h, x: gathered(net, F.relu(h) + x[:, :1], x), read=3, two=nn.Linear(3, 6)),
        [],
    ),
    "positions_behind_a_dead_layer": (
        lambda: mlp(
            lambda net, h, x: gathered(net, net.deep(F.relu(h)), x),
            read=3,
            two=nn.Linear(3, 5),
            deep=nn.Linear(6, 5, bias=False),
        ),
        [(6, 1, True, SCALED)],
    ),
    "position_in_all": (lambda: mlp(lambda net, h, x: h * (h.argmax() % 2)), []),
    "position_of_maximum": (
        lambda: mlp(
            lambda net, h, x: net.two(x).gather(1, h.max(1, keepdim=True).indices), read=1, two=nn.Linear(3, 6)
        ),
        [(6, 1, True, FREE)],
    ),
    "codes": (  # a factor of a head makes no code nearer than another
        lambda: mlp(looked_up(0), codes=weights(2, 7, 3)),
        [(2, 1, True, SCALED), (7, 1, True, FREE), (3, 2, True, SIGNED)],
    ),
    "codes_of_the_other_head": (
        lambda: mlp(looked_up(0, flip=True), codes=weights(2, 7, 3)),
        [(7, 1, True, FREE), (3, 1, True, SIGNED)],
    ),
    "code_after_the_nearest": (
        lambda: mlp(looked_up(1), codes=weights(2, 7, 3)),
        [(2, 1, True, SCALED), (3, 2, True, SIGNED)],
    ),
    "one_hot": (lambda: mlp(shifted_code(0), 5, 5, codes=weights(7, 5)), [(7, 1, True, FREE), (5, 1, True, SIGNED)]),
    "one_hot_shifted": (lambda: mlp(shifted_code(1), 5, 5, codes=weights(7, 5)), [(5, 1, True, SIGNED)]),
    "last_of_several": (lambda: mlp(rivals, 4, 7, codes=weights(7, 3)), []),
    "maximal_distance": (
        lambda: mlp(lambda net, h, x: torch.cdist(h, net.codes, p=float("inf")), 5, 4, codes=weights(4, 5)),
        [(4, 1, True, FREE), (5, 1, True, SIGNED)],
    ),
    "overwritten_by_ones": (lambda: mlp(overwritten), [(6, 1, True, FREE)]),
    "windows_along_units": (lambda: mlp(lambda net, h, x: h.unfold(1, 2, 1).flatten(1), read=10), []),
    "bilinear_with_itself": (
        lambda: mlp(bilinear, 5, 4, both=nn.Bilinear(5, 5, 4)),
        [(5, 1, True, SCALED), (4, 1, True, LINEAR)],
    ),
    "rows_of_two_streams": (
        lambda: crossing(False),
        [(5, 1, True, SCALED), (5, 1, True, SIGNED), (4, 1, True, LINEAR)],
    ),
    "rows_that_overlap": (  # rows 0, 2, 4, 6 change places with 1, 3, 5, 7; relu and tanh share their columns
        lambda: crossing(True),
        [(2, 1, True, LINEAR), (5, 1, True, FREE)],
    ),
    "heads_in_pieces": (
        lambda: mlp(fused_heads(False), 10, 6),
        [(3, 1, True, FREE), (2, 1, True, LINEAR), (2, 1, True, LINEAR)],
    ),
    "heads_in_pieces_mixed": (lambda: mlp(fused_heads(True), 10, 6), [(3, 1, True, FREE), (2, 1, True, LINEAR)]),
    "dropout_always_on": (
        lambda: mlp(lambda net, h, x: F.dropout(F.relu(h), 0.3, training=True)),
        [(6, 1, False, SCALED)],
    ),
    "dropout_of_copies": (
        lambda: mlp(lambda net, h, x: F.dropout(F.gelu(h).repeat(1, 2), 0.3, training=True), read=12),
        [],
    ),
    "mask_on_copies": (
        lambda: mlp(lambda net, h, x: F.gelu(h).repeat(1, 2) * (torch.arange(12) % 5 > 1), read=12),
        [],
    ),
    "running_sum_of_copies": (
        lambda: mlp(lambda net, h, x: h.repeat_interleave(2, 1).cumsum(1).softmax(1), read=12),
        [],
    ),
    "copies_cut_in_two": (lambda: mlp(lambda net, h, x: F.relu(h).repeat_interleave(2, 1)[:, 3:9], read=6), None),
    "one_sign_per_group": (
        lambda: mlp(group_in_pieces, 12, 12, norm=nn.GroupNorm(2, 12)),
        [(2, 1, True, SIGNED), (2, 2, True, SIGNED), (4, 2, True, SCALED)],
    ),
    "noise": (lambda: mlp(lambda net, h, x: F.relu(h) * torch.rand_like(h)), [(6, 1, False, SCALED)]),
}


def outputs(model: nn.Module, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return torch.func.functional_call(model, state, (inputs,))


@pytest.mark.parametrize("name", CASES)
def test_freedoms_are_those_worked_out_and_hold_elsewhere(name: str) -> None:
    build, spaces = CASES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().double().eval()
    symmetry = ob.discover(model, numbers(8, 3))
    found = [(space.size, space.copies, space.permutable, space.generators) for space in symmetry.spaces]
    assert spaces is None or sorted(found) == sorted(spaces), symmetry
    assert symmetry.unexplained == () if spaces is not None else "proof" not in str(symmetry.unexplained)
    proof = ob.verify(model, symmetry, numbers(16, 3, seed=5), seed=3)
    assert proof.passed, str(proof)
    state = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    for seed, batch in enumerate((8, 8, 11)):
        other = 2 * numbers(batch, 3, seed=10 + seed)
        moved = symmetry.apply(symmetry.random(seed), state)
        torch.testing.assert_close(outputs(model, moved, other), outputs(model, state, other), rtol=1e-9, atol=1e-9)
