"""The smooth calibration error against sums over reflected Gaussians, and where it is known; MCE against netcal."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from onebasin.metrics import ece, mce, smooth_ece


def examples(count: int, seed: int, sharper: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return (sharper * z).softmax(1), torch.multinomial(z.softmax(1), 1, generator=generator)[:, 0]


def by_images(p: np.ndarray, y: np.ndarray, bandwidth: float) -> float:
    """E(s): the Gaussian and its mirror images at 0 and 1, on a fine grid."""
    confidence, right = p.max(1), (p.argmax(1) == y).astype(float)
    t = (np.arange(4000) + 0.5) / 4000
    total = np.zeros_like(t)
    for image in range(-4, 5):
        for sign in (1, -1):
            z = (t[:, None] - (2 * image + sign * confidence)) / bandwidth
            density = np.exp(-0.5 * z**2) / (bandwidth * math.sqrt(2 * math.pi))
            total += density @ (right - confidence) / len(p)
    return float(np.abs(total).mean())


@pytest.mark.parametrize("bandwidth", [0.01, 0.05, 0.3])
def test_cosines_are_reflected_gaussians(bandwidth: float) -> None:
    p, y = examples(80, 0, 2.0)
    found = float(smooth_ece(p, y, bandwidth=bandwidth))
    assert found == pytest.approx(by_images(p.numpy(), y.numpy(), bandwidth), abs=1e-5)


def test_the_bandwidth_is_its_own_error() -> None:
    for seed, sharper in ((0, 1.0), (1, 2.0), (2, 0.5)):
        p, y = examples(300, seed, sharper)
        found = float(smooth_ece(p, y))
        assert float(smooth_ece(p, y, bandwidth=found)) == pytest.approx(found, abs=1e-9)
        narrow, wide = (float(smooth_ece(p, y, bandwidth=share * found)) for share in (0.5, 2))
        assert narrow + 1e-9 >= found >= wide - 1e-9  # equal where all gaps have one sign


def test_known_errors() -> None:
    """One confidence c with accuracy a: smoothing keeps the whole gap, so the error is |a - c|."""
    p = torch.tensor([[0.9, 0.1]], dtype=torch.float64).expand(100, 2)
    y = (torch.arange(100) < 40).long()  # 60 % right
    assert float(smooth_ece(p, y)) == pytest.approx(0.3, abs=1e-6)
    sure = torch.tensor([[1.0, 0.0]]).expand(10, 2)
    assert float(smooth_ece(sure, torch.zeros(10, dtype=torch.int64))) == 0


def test_weights_are_repetitions_and_a_larger_sample_is_closer_to_nothing() -> None:
    p, y = examples(60, 3)
    weights = torch.randint(0, 3, (2, 60), generator=torch.Generator().manual_seed(0)).double()
    found = smooth_ece(p, y, weights=weights)
    for row, value in zip(weights, found, strict=True):
        rows = torch.repeat_interleave(torch.arange(60), row.long())
        assert float(value) == pytest.approx(float(smooth_ece(p[rows], y[rows])), abs=1e-8)
    large = examples(20000, 5)
    assert float(smooth_ece(*large)) < 0.015 < float(smooth_ece(*examples(20000, 5, 2.0)))


def test_the_maximum_calibration_error_is_that_of_netcal() -> None:
    metrics = pytest.importorskip("netcal.metrics")
    for seed in range(5):
        p, y = examples(200, seed, 1.5)
        theirs = metrics.MCE(15).measure(p.numpy(), y.numpy())
        assert float(mce(p, y)) == pytest.approx(theirs, abs=1e-9)
        assert float(mce(p, y)) >= float(ece(p, y))


def test_the_maximum_skips_empty_bins_and_takes_weights() -> None:
    p, y = examples(50, 1)
    weights = torch.randint(0, 3, (50,), generator=torch.Generator().manual_seed(0)).double()
    rows = torch.repeat_interleave(torch.arange(50), weights.long())
    assert float(mce(p, y, weights=weights)) == pytest.approx(float(mce(p[rows], y[rows])))
    assert float(mce(p, y, bins=1)) == pytest.approx(float(ece(p, y, bins=1)))
