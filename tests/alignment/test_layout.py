"""The board: blocks hold what the group moves, and moving blocks by coordinates is moving tensors by elements."""

import pytest
import torch
from torch import Tensor

import onebasin as ob
from onebasin.alignment.layout import BlockLayout, TensorBlock
from onebasin.errors import SpecError, SymmetryError
from onebasin.symmetry.apply import ExpandedElement, sources
from onebasin.symmetry.space import Grid
from tests.models import BATTERY, Case
from tests.symmetry.test_discover import prepared

CASES = [pytest.param(case, id=case.name) for case in BATTERY]


def random_state(symmetry: ob.Symmetry, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) + 5 * name.endswith("var")
        for name, shape in symmetry.shapes.items()
    }


def moved_by_coordinates(block: TensorBlock, wide: ExpandedElement, part: Tensor) -> Tensor:
    """What the element does to a block (*dims, rest), worked out from sources of coordinates and factors."""
    places = torch.meshgrid(*[torch.arange(size) for size in block.dims], indexing="ij")
    origin, factor = list(places), torch.ones(block.dims, dtype=torch.float64)
    for axis in block.axes:
        sizes = [block.dims[dim] for dim in axis.dims]
        coordinate = torch.zeros(block.dims, dtype=torch.long)
        for dim in axis.dims:
            coordinate = coordinate * block.dims[dim] + places[dim]
        found = torch.unravel_index(sources(wide, axis.space)[0][coordinate], sizes)
        for dim, index in zip(axis.dims, found, strict=True):
            origin[dim] = index
        for number, power in enumerate(axis.powers):
            factor = factor * wide.factors[axis.space][number].reshape(-1)[coordinate] ** power
    shift = max(axis.shift for axis in block.axes)
    return (part[tuple(origin)] + shift) * factor[..., None] - shift


@pytest.mark.parametrize("case", CASES)
def test_moving_blocks_is_moving_tensors(case: Case) -> None:
    _, _, symmetry = prepared(case)
    state, element = random_state(symmetry, 0), symmetry.random(1)
    moved, wide = symmetry.apply(element, state), ExpandedElement(symmetry, element)
    for block in BlockLayout.of(symmetry, statistics=True).blocks:
        before, after = (block.take(x[block.tensor][None])[0] for x in (state, moved))
        torch.testing.assert_close(after, moved_by_coordinates(block, wide, before), msg=block.tensor)


@pytest.mark.parametrize("case", CASES)
def test_blocks_hold_every_entry_with_a_leg_once(case: Case) -> None:
    """Entries that a random element of full rank moves are exactly those in blocks; no entry is in two."""
    _, _, symmetry = prepared(case)
    board = BlockLayout.of(symmetry, statistics=True)
    seen = {name: torch.zeros(shape) for name, shape in symmetry.shapes.items()}
    index = {name: torch.arange(torch.Size(s).numel()).reshape(s) for name, s in symmetry.shapes.items()}
    for block in board.blocks:
        held = block.take(index[block.tensor][None]).reshape(-1)
        seen[block.tensor].reshape(-1)[held] += 1
    assert all(bool((count <= 1).all()) for count in seen.values())
    covered = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in symmetry.shapes.items()}
    for seed in range(8):
        state = {name: place.double() + 1 for name, place in index.items()}
        for name, value in symmetry.apply(symmetry.random(seed), state).items():
            covered[name] |= value != state[name]
    for name, touched in covered.items():
        assert bool((seen[name][touched] == 1).all()), name


def test_spread_and_gather_are_adjoint() -> None:
    """<spread(t), x> = <t, gather(x)> for every axis."""
    symmetry = prepared(next(case for case in BATTERY if case.name == "grouped"))[2]
    generator = torch.Generator().manual_seed(0)
    for block in BlockLayout.of(symmetry).blocks:
        for axis in block.axes:
            table = torch.randn(3, symmetry.spaces[axis.space].copies * symmetry.spaces[axis.space].size,
                                generator=generator, dtype=torch.float64)  # fmt: skip
            part = torch.randn(3, *block.dims, generator=generator, dtype=torch.float64)
            left = (block.spread(axis, table)[..., 0] * part).sum()
            torch.testing.assert_close(left, (table * block.gather(axis, part)).sum())


def test_statistics_are_left_out_unless_asked_for() -> None:
    symmetry = prepared(next(case for case in BATTERY if case.name == "resnet_bn"))[2]
    assert not any("running" in name for name in BlockLayout.of(symmetry).tensors)
    assert any("running_var" in name for name in BlockLayout.of(symmetry, statistics=True).tensors)


def test_a_ragged_hand_written_leg_is_refused() -> None:
    """Three positions for two heads of two units: no grid."""
    legs = (
        ob.Leg("w", Grid(0, ((0, 2, 1), (2, 1, 1))), powers=()),
        ob.Leg("w", Grid(0, ((0, 2, 2),)), powers=()),
    )
    spaces = tuple(
        ob.Space(f"s{n}", size, True, (), (), (leg,)) for n, (size, leg) in enumerate(zip((3, 2), legs, strict=True))
    )
    with pytest.raises(SymmetryError, match="grid of units"):
        BlockLayout.of(ob.Symmetry(spaces, {"w": (3,)}))


def test_networks_of_other_widths_are_refused() -> None:
    symmetry = prepared(next(case for case in BATTERY if case.name == "mlp_relu"))[2]
    state = random_state(symmetry, 0)
    name = next(iter(state))
    with pytest.raises(SpecError, match="other widths"):
        BlockLayout.of(symmetry).check({**state, name: torch.zeros(2, 2)}, where="it")
    del state[name]
    with pytest.raises(SpecError, match="no tensor"):
        BlockLayout.of(symmetry).check(state, where="it")
