from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onebasin.population.population import Population
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import LowRank
from onebasin.posterior.moments import RowMatrix, leading_factor
from onebasin.posterior.posterior import Posterior


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def planted(members: int, size: int, values: Tensor, seed: int = 0) -> Tensor:
    """A centred matrix (members, size) with these singular values."""
    left = torch.randn(members, len(values), generator=seeded(seed), dtype=torch.float64)
    left = torch.linalg.qr(left - left.mean(0)).Q
    right = torch.linalg.qr(torch.randn(size, len(values), generator=seeded(seed + 1), dtype=torch.float64)).Q
    return (left * values) @ right.T


def factor_of(posterior: Posterior) -> Tensor:
    shape = posterior.components[0].covariance
    assert isinstance(shape, LowRank)
    return shape.factor


def best(rows: Tensor, rank: int) -> Tensor:
    """The covariance of this rank that is closest to that of the rows, through torch's SVD."""
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    return (right[:rank].T * values[:rank].square()) @ right[:rank] / (len(rows) - 1)


@settings(max_examples=25, deadline=None)
@given(members=st.integers(2, 12), size=st.integers(1, 20), rank=st.integers(1, 25), seed=st.integers(0, 99))
def test_small_populations_are_exact(members: int, size: int, rank: int, seed: int) -> None:
    rows = 5 + torch.randn(members, size, generator=seeded(seed), dtype=torch.float64)
    found = fit(Population.from_stacked({"w": rows}), "low-rank", rank=rank, oversample=members)
    factor, centred = factor_of(found), rows - rows.mean(0)
    assert factor.shape == (size, min(rank, members - 1))
    torch.testing.assert_close(factor @ factor.T, best(centred, rank), rtol=1e-9, atol=1e-9)
    exact = torch.cov(rows.T, correction=1).reshape(size, size)
    made = found.components[0].covariance
    torch.testing.assert_close(made.std(), exact.diagonal().sqrt(), rtol=1e-9, atol=1e-9)
    if rank >= members - 1:
        torch.testing.assert_close(factor @ factor.T, exact, rtol=1e-9, atol=1e-9)


def test_planted_directions_are_found_with_their_variances() -> None:
    values = torch.cat([torch.tensor([100.0, 60.0, 30.0, 20.0]), torch.full((60,), 1.0)]).double()
    rows = planted(200, 500, values)
    found = factor_of(fit(Population.from_stacked({"w": rows + 3}), "low-rank", rank=4, passes=3))
    torch.testing.assert_close(found.norm(dim=0), values[:4] / 199**0.5, rtol=1e-5, atol=0)
    gram = found.T @ found
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-9)
    assert bool((found.norm(dim=0).diff() < 0).all())
    torch.testing.assert_close(found @ found.T, best(rows, 4), rtol=0, atol=1e-3 * float(gram[0, 0]))


def captured(rows: Tensor, rank: int, passes: int) -> float:
    """Variance in the found directions, as part of what the best directions hold."""
    factor = factor_of(fit(Population.from_stacked({"w": rows}), "low-rank", rank=rank, passes=passes))
    return float(factor.square().sum() / best(rows, rank).trace())


def test_power_passes_find_what_a_flat_spectrum_hides() -> None:
    rows = torch.randn(150, 400, generator=seeded(3), dtype=torch.float64)
    rows -= rows.mean(0)
    shares = [captured(rows, 10, passes) for passes in (0, 2, 60)]
    assert shares[0] < shares[1] < shares[2] <= 1 + 1e-12
    assert shares[2] > 0.999  # subspace iteration converges to the best directions


@settings(max_examples=15, deadline=None)
@given(rank=st.integers(1, 8), passes=st.integers(0, 2), seed=st.integers(0, 99))
def test_no_weight_gets_more_variance_than_the_population_has(rank: int, passes: int, seed: int) -> None:
    rows = torch.randn(40, 60, generator=seeded(seed), dtype=torch.float64).exp()
    factor = factor_of(fit(Population.from_stacked({"w": rows}), "low-rank", rank=rank, passes=passes, oversample=2))
    left = torch.cov(rows.T) - factor @ factor.T
    assert float(torch.linalg.eigvalsh(left).min()) > -1e-9 * float(left.trace())


def test_seed_decides_and_float32_is_as_good_as_its_precision() -> None:
    rows = planted(90, 300, torch.logspace(1, -2, 60, dtype=torch.float64))
    wide, narrow = Population.from_stacked({"w": rows}), Population.from_stacked({"w": rows.float()})
    first, again, other = (factor_of(fit(wide, "low-rank", rank=5, seed=seed, passes=0)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    found = factor_of(fit(narrow, "low-rank", rank=5, passes=2))
    assert found.dtype == torch.float32
    scale = float(best(rows, 1).trace())
    torch.testing.assert_close((found @ found.T).double(), best(rows, 5), rtol=0, atol=1e-4 * scale)


def test_rows_are_read_as_often_as_promised_and_never_held_together() -> None:
    rows = torch.randn(64, 50, generator=seeded(0), dtype=torch.float64)
    readings = 0

    def read() -> Iterator[tuple[int, Tensor]]:
        nonlocal readings
        readings += 1
        room = torch.empty(10, 50, dtype=torch.float64)  # reused, as `deviations` does
        for start in range(0, 64, 10):
            part = rows[start : start + 10]
            room[: len(part)] = part
            yield start, room[: len(part)]

    for passes in (0, 2):
        readings = 0
        found = leading_factor(RowMatrix(read), (64, 50), 6, degrees=63, oversample=4, passes=passes, like=rows, seed=0)
        assert readings == 3 + passes
        assert found.shape == (50, 6)
    exact = leading_factor(RowMatrix(read), (64, 50), 70, degrees=63, oversample=0, passes=0, like=rows, seed=0)
    torch.testing.assert_close(exact @ exact.T, rows.T @ rows / 63)


def test_a_population_of_equal_networks_has_no_directions() -> None:
    found = fit(Population.from_stacked({"w": torch.ones(30, 5)}), "low-rank", rank=2, oversample=1)
    assert float(factor_of(found).abs().max()) == 0.0
    assert float(found.std["w"].max()) == 0.0


@pytest.mark.parametrize("rank", [1, 7])
def test_blocks_of_any_size_give_the_same_directions(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(33, 21, generator=seeded(0), dtype=torch.float64)
    population = Population.from_stacked({"a": rows[:, :5], "b": rows[:, 5:].reshape(-1, 4, 4)})
    whole = factor_of(fit(population, "low-rank", rank=rank, oversample=3))
    monkeypatch.setattr("onebasin.posterior.moments._BLOCK_BYTES", 21 * 8 * 4)  # four members at a time
    pieces = factor_of(fit(population, "low-rank", rank=rank, oversample=3))
    torch.testing.assert_close(pieces @ pieces.T, whole @ whole.T, rtol=1e-9, atol=1e-10)
