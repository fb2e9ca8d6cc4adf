"""The geometric half of `reproduce symmetry` with a tiny plan: sections are whole, and verdicts follow numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onebasin as ob
from onebasin.reporting.record import Figure, Number, Section, Table, decode, encode
from onebasin_papers import numbers as figures
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry import checkpoints, marginals, mass, order, two_neurons
from onebasin_papers.symmetry.mass import convnet
from onebasin_papers.symmetry.settings import SymmetrySettings, preset_settings

TINY = replace(
    preset_settings("quick"),
    examples=200,
    test_examples=100,
    reference_networks=48,
    epochs=6,
    batch=100,
    groups=1,
    runs=2,
    draws=20,
    chains=2,
    chain_draws=20,
    warmup=5,
    leapfrog=3,
    swag_collect=4,
    sghmc_warmup=1,
    sghmc_thin=1,
    workers=1,
    toy_networks=60,
    toy_epochs=10,
    mass_decays=(0.0, 1e-2),
    mass_networks=4,
    mass_epochs=4,
    order_networks=3,
    order_epochs=4,
    archive_networks=20,
)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace[SymmetrySettings]:
    return Workspace(TINY, 0, tmp_path_factory.mktemp("geometry"))


def figure(section: Section) -> Figure:
    return next(item for item in section.items if isinstance(item, Figure))


def table(section: Section, name: str) -> Table:
    return next(item for item in section.items if isinstance(item, Table) and item.name == name)


def value(cell: object) -> float:
    assert isinstance(cell, Number)
    assert cell.value is not None
    return cell.value


def whole(section: Section) -> None:
    """It can be stored, its names are its own, and it answers something."""
    assert decode(encode(section), Section, section.name) == section
    assert all(item.name.startswith(f"{section.name}-") for item in section.items)
    assert section.claims
    assert all(claim.found for claim in section.claims)
    assert any(sign.isdigit() for sign in section.text[0])


def test_two_neurons(workspace: Workspace[SymmetrySettings]) -> None:
    section = two_neurons.part(workspace)
    whole(section)
    rows = table(section, "two-neurons-numbers").rows
    assert value(rows[2][1]) == 0  # nobody on the wrong side
    assert value(rows[0][1]) > 0
    assert value(rows[2][2]) > value(rows[0][2])
    panels = figure(section).panels
    assert len(panels) == 3
    for panel in panels[2:]:
        cells = [(row, column, cell) for row, line in enumerate(panel.grid) for column, cell in enumerate(line)]
        assert all(cell is None for row, column, cell in cells if row > column)
        assert sum(cell or 0 for _, _, cell in cells) > 10


def test_the_toy_has_the_symmetries_of_the_figure() -> None:
    found = ob.discover(two_neurons.TwoNeurons(), torch.zeros(1, 2))
    assert found.log10_order == pytest.approx(math.log10(2))
    assert found.dimensions == 2
    inputs, classes = two_neurons.two_clouds(torch.Generator().manual_seed(0))
    for number, centre in ((0, -2.0), (1, 2.0)):
        mean = inputs[classes[:, 0] == number].mean(0)
        assert bool(((mean - centre).abs() < 3.9 / math.sqrt(200)).all())  # z = 3.9: p = 1e-4


def test_marginals(workspace: Workspace[SymmetrySettings]) -> None:
    section = marginals.part(workspace)
    whole(section)
    rows = {row[0]: row for row in table(section, "marginals-tests").rows}
    assert list(rows)[:3] == ["independent trainings", "HMC, all chains", "HMC, each chain"]
    assert value(rows["independent trainings"][2]) == 48
    assert value(rows["HMC, each chain"][1]) == 2
    published = rows["independent trainings"][4]
    assert isinstance(published, Number)
    assert published.published == pytest.approx(7.5, abs=0.05)
    ours, theirs = figure(section).panels
    for panel in (ours, theirs):
        assert all(sum(bar or 0 for bar in series.y) == pytest.approx(100, abs=0.1) for series in panel.series)
    assert rows["SWAG, each run"][9] == "2 of 2"  # a Gaussian around one network keeps every role


def test_mass(workspace: Workspace[SymmetrySettings]) -> None:
    section = mass.part(workspace)
    whole(section)
    rows = table(section, "mass-decay").rows
    assert [(row[0], value(row[1])) for row in rows] == [
        (kind, decay) for kind in ("small OptuNet", "perceptron") for decay in TINY.mass_decays
    ]
    for row in rows:
        assert value(row[2]) >= value(row[3])  # mass and least mass
        assert value(row[4]) > 0
    free, decayed = rows[2], rows[3]
    assert value(decayed[2]) < value(free[2])
    assert value(free[7]) == 100
    # 4 epochs of 2 steps, cosine from 0.05, momentum 0.9: exp(-2 * 0.01 * 8 * 0.025 / 0.1)
    assert value(decayed[7]) == pytest.approx(100 * math.exp(-0.04))


def test_the_small_convnet_is_optunet_in_small() -> None:
    found = ob.discover(convnet(), torch.zeros(2, 64))
    assert found.log10_order == pytest.approx(math.log10(28_800))  # 2! (5!)^2, as in the paper


def test_order(workspace: Workspace[SymmetrySettings]) -> None:
    section = order.part(workspace)
    whole(section)
    falls, stays = figure(section).panels[0].series
    assert falls.x == tuple(range(2, 3 * TINY.order_epochs + 1))
    shared = TINY.order_epochs - 1
    assert falls.y[:shared] == stays.y[:shared]  # the first phase is the same
    assert falls.y[shared:] != stays.y[shared:]
    assert all(0 <= (share or 0) <= 100 for share in falls.y)
    rows = table(section, "order-phases").rows
    assert value(rows[0][2]) == value(rows[0][3])
    assert value(rows[2][2]) < value(rows[0][2])


def test_checkpoints(workspace: Workspace[SymmetrySettings]) -> None:
    section = checkpoints.part(workspace)
    whole(section)
    folder = workspace.folder / "checkpoints" / "models" / "digits-mlp"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"digits-mlp-{first}-{last}.tgz" for first, last in ((0, 19), (20, 39), (40, 47))
    ]
    row = table(section, "checkpoints-sizes").rows[0]
    assert value(row[0]) == 48
    assert value(row[3]) == pytest.approx(sum(path.stat().st_size for path in folder.iterdir()) / 1e6)
    assert section.claims[0].verdict != "not reproduced"
    (folder / "digits-mlp-48-99.tgz").write_bytes(b"left by somebody")
    assert checkpoints.part(workspace).items == section.items  # what an earlier run has left goes


def test_parts_say_the_same_again(tmp_path: Path) -> None:
    first, second = (order.part(Workspace(TINY, 0, tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert order.part(Workspace(TINY, 1, tmp_path / "c")).items != first.items


@pytest.mark.parametrize(
    ("numbers", "verdict"),
    [
        ((500, 0, 1000, 1e-14), "reproduced"),
        ((560, 0, 1000, 1e-14), "not reproduced"),  # z = 3.8: no mirror image
        ((500, 1, 1000, 1e-14), "not reproduced"),
        ((500, 0, 1000, 1e-3), "not reproduced"),  # functions changed
    ],
)
def test_verdicts_of_mirrors(numbers: tuple[int, int, int, float], verdict: str) -> None:
    assert two_neurons.mirror_verdict(*numbers) == verdict


@given(st.lists(st.floats(-5, 60), min_size=1, max_size=6))
def test_verdicts_of_mass_follow_the_bounds(bounds: list[float]) -> None:
    above = [bound > mass.MARGIN for bound in bounds]
    expected = "reproduced" if all(above) else "reproduced with a caveat" if any(above) else "not reproduced"
    assert mass.lightest_verdict(bounds) == expected


@given(st.floats(0.1, 50), st.floats(0, 50), st.floats(0, 50))
def test_verdicts_of_order_need_fewer_changes_than_both(high: float, low: float, control: float) -> None:
    found = order.order_verdict((high, 0.0), (low, 0.0), (control, 0.0))
    assert (found == "not reproduced") == (low >= high or low >= control)
    assert (found == "reproduced") == (low < 0.1 * high and low < control)
    assert order.order_verdict((high, math.inf), (low, 0.0), (control, 0.0)) == "not reproduced"  # one training


@pytest.mark.parametrize(
    ("failed", "rejected", "persistent", "verdict"),
    [
        (False, 8, 8, "reproduced"),
        (False, 0, 8, "reproduced with a caveat"),
        (False, 7, 7, "not reproduced"),
        (True, 8, 8, "not reproduced"),
    ],
)
def test_verdicts_of_marginals(failed: bool, rejected: int, persistent: int, verdict: str) -> None:
    assert marginals.equal_verdict(failed, rejected, persistent, 8) == verdict


def test_verdicts_of_half_precision() -> None:
    assert checkpoints.half_verdict(0.1, True) == "reproduced"
    assert checkpoints.half_verdict(0.11, True) == "reproduced with a caveat"
    assert checkpoints.half_verdict(1.1, True) == "not reproduced"
    assert checkpoints.half_verdict(0.0, False) == "not reproduced"
    one = ob.Population.from_stacked({"w": torch.tensor([[1.0], [2.0]])})
    other = ob.Population.from_stacked({"w": torch.tensor([[1.0], [2.0 + 2**-22]])})
    assert checkpoints.same_bits(one, one)
    assert not checkpoints.same_bits(one, other)
    assert not checkpoints.same_bits(one, one[:1])


@given(st.lists(st.floats(-2, 2), max_size=40), st.integers(1, 9))
def test_bins_count_what_torch_counts(values: list[float], bins: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    places = figures.edges(-1, 1, bins)
    ends = torch.tensor(places, dtype=torch.float64)
    expected = torch.histogram(tensor, ends).hist.long() if len(values) else torch.zeros(bins).long()
    assert torch.equal(figures.counts(tensor, places), expected)
    axes = ob.reporting.Axis("x"), ob.reporting.Axis("y")
    grid = figures.heat("", tensor, torch.zeros(len(values)), places, axes).grid
    assert [sum(row[column] or 0 for row in grid) for column in range(bins)] == expected.tolist()
