"""Whether units keep their roles along a chain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onebasin.alignment.exchangeability import persistence
from onebasin.errors import InputError


def walk(draws: int, units: int, weights: int, memory: float, seed: int) -> Tensor:
    """Stationary draws that remember their predecessors, all units alike."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, units, weights, generator=generator)
    found = [noise[0]]
    for step in noise[1:]:
        found.append(memory * found[-1] + (1 - memory**2) ** 0.5 * step)
    return torch.stack(found)


@pytest.mark.parametrize("memory", [0.0, 0.8])
def test_p_is_uniform_where_units_are_alike(memory: float) -> None:
    # With 19 relabellings p is uniform on 1/20 ... 20/20; memory of 5 draws is lost in the 40 that are left out.
    found = torch.tensor([persistence(walk(200, 6, 4, memory, seed), permutations=19).p for seed in range(300)])
    counts = (found * 20).round().long().bincount(minlength=21)[1:]
    chi_square = float(((counts - 15) ** 2 / 15).sum())
    assert chi_square < 43.8  # p = 0.001 on 19 degrees of freedom


def test_the_correlation_is_that_of_early_and_late_means() -> None:
    draws = walk(100, 8, 5, 0.5, 0) + torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    early, late = draws[:40].mean(0), draws[60:].mean(0)
    early, late = early - early.mean(0), late - late.mean(0)
    expected = torch.corrcoef(torch.stack([early.flatten(), late.flatten()]).double())[0, 1]
    assert persistence(draws).correlation == pytest.approx(float(expected), abs=1e-6)


def test_exchanged_roles_are_not_kept() -> None:
    roles = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    draws = walk(100, 8, 5, 0.0, 0) + roles
    assert persistence(draws).p == 0.001
    draws[50:] = draws[50:, torch.arange(8).roll(3)]
    assert persistence(draws).p > 0.01


def test_a_chain_of_equal_units_and_one_that_is_too_short() -> None:
    assert persistence(torch.ones(10, 3, 2)).p == 1
    for shape in ((4, 3, 2), (10, 1, 2), (10,)):
        with pytest.raises(InputError, match="at least 5 draws"):
            persistence(torch.zeros(shape))
