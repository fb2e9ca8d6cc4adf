"""Corruptions against their definitions, pixel by pixel; ranges, seeds, severities; what is refused."""

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter1d
from torch import Tensor
from torch.nn import functional as F

from onebasin.data import CORRUPTIONS, SEVERITIES, corrupt, shifts
from onebasin.errors import InputError


def images(channels: int = 3, height: int = 12, width: int = 10, count: int = 4) -> Tensor:
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_keeps_shape_dtype_range_and_inputs_and_grows(corruption: str) -> None:
    x = F.interpolate(images(height=5, width=4), size=(25, 20), mode="bilinear")  # neighbours alike, as in photographs
    before, last = x.clone(), 0.0
    for severity in SEVERITIES:
        found = corrupt(x, corruption, severity)
        assert found.shape == x.shape
        assert found.dtype == x.dtype
        assert float(found.min()) >= 0
        assert float(found.max()) <= 1
        change = float((found - x).square().mean())
        assert change > last, severity
        last = change
    assert torch.equal(x, before)
    assert corrupt(x.half(), corruption).dtype == torch.float16
    grey = corrupt(x[:, 0], corruption, 2)
    rows = corrupt(x[:, 0].reshape(4, -1), corruption, 2, size=(25, 20))
    assert torch.equal(grey.reshape(4, -1), rows)


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_standardised_images_are_corrupted_like_plain_ones(corruption: str) -> None:
    mean, deviation = torch.tensor([0.4, 0.5, 0.6]).double(), torch.tensor([0.2, 0.3, 0.25]).double()
    x = images()
    scaled = (x - mean[:, None, None]) / deviation[:, None, None]
    found = corrupt(scaled, corruption, 4, range=((0 - mean) / deviation, (1 - mean) / deviation))
    assert torch.allclose(found * deviation[:, None, None] + mean[:, None, None], corrupt(x, corruption, 4))


def test_noise_has_its_deviation_and_its_seed() -> None:
    grey = torch.full((20, 3, 40, 40), 0.5, dtype=torch.float64)
    found = corrupt(grey, "gaussian_noise", 1, seed=3)
    noise = found - grey
    assert float(noise.std()) == pytest.approx(0.04, rel=4 / math.sqrt(2 * noise.numel()))
    assert torch.equal(found, corrupt(grey, "gaussian_noise", 1, seed=3))
    assert not torch.equal(found, corrupt(grey, "gaussian_noise", 1, seed=4))


def test_blur_is_the_gaussian_filter_of_scipy() -> None:
    x = images(height=20, width=16)
    deviation = 0.075 * 16
    wanted = x.numpy()
    for axis in (2, 3):
        wanted = gaussian_filter1d(wanted, deviation, axis=axis, mode="nearest", radius=math.ceil(4 * deviation))
    assert np.allclose(corrupt(x, "gaussian_blur", 4).numpy(), wanted, atol=1e-12)


def test_contrast_brightness_and_pixels_by_hand() -> None:
    x = images()
    mean = x.numpy().mean((2, 3), keepdims=True)
    assert np.allclose(corrupt(x, "contrast", 5).numpy(), mean + 0.15 * (x.numpy() - mean))
    assert np.allclose(corrupt(x, "brightness", 3).numpy(), np.minimum(x.numpy() + 0.3, 1))
    square = images(1, 10, 10)
    found = corrupt(square, "pixelate", 5)[:, 0]  # 4 x 4 rectangles are left of 10 x 10 pixels: round(3.75)
    assert all(len(one.unique()) == 16 for one in found)
    four = torch.arange(16.0).reshape(1, 1, 4, 4) / 16  # at severity 4 two pixels along a side are left
    blocks = corrupt(four, "pixelate", 4)[0, 0]
    assert torch.allclose(blocks[:2, :2], four[0, 0, :2, :2].mean())
    assert torch.allclose(blocks[2:, 2:], four[0, 0, 2:, 2:].mean())


def test_shifts_are_functions_that_make_the_images_when_they_are_called() -> None:
    x = images()
    found = shifts(x, seed=2)
    assert {name: list(levels) for name, levels in found.items()} == {key: list(SEVERITIES) for key in CORRUPTIONS}
    assert torch.equal(found["gaussian_noise"][2](), corrupt(x, "gaussian_noise", 2, seed=2))


def test_refusals_name_the_remedy() -> None:
    x = images()
    with pytest.raises(InputError, match="give 'gaussian_noise'"):
        corrupt(x, "snow")
    with pytest.raises(InputError, match="3 is in the middle"):
        corrupt(x, severity=6)
    with pytest.raises(InputError, match=r"give range=\(black, white\)"):
        corrupt(3 * x - 1)
    with pytest.raises(InputError, match=r"size=\(height, width\)"):
        corrupt(x.reshape(4, -1))
    with pytest.raises(InputError, match=r"height and width, as size=\(18, 20\)"):
        corrupt(x.reshape(4, -1), size=(7, 7))
    with pytest.raises(InputError, match=r"found torch.uint8 .*: give inputs.float\(\) / 255"):
        corrupt((255 * x).to(torch.uint8))
    with pytest.raises(InputError, match="as many as there are channels"):
        corrupt(x, range=(torch.zeros(2), torch.ones(2)))
    with pytest.raises(InputError, match=r"give \(0.0, 1.0\)"):
        corrupt(x, range=(1.0, 0.0))
    with pytest.raises(InputError, match="give 'gaussian_noise'"):
        shifts(x, ["fog"])
