"""Images with pixels on the command line: trained, sampled and judged from .npz files; some pixels do not count."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from onebasin.evaluation.evaluate import evaluate
from onebasin.examples.pixels import UNet, shapes
from onebasin.population.population import Population

Run = Callable[..., tuple[int, str, str]]
MODELS = "from onebasin.examples import UNet\n\ndef brightness():\n    return UNet(2)\n"
TRAINED = ("--method", "ensemble", "--chains", 2, "--epochs", 1)

pytestmark = pytest.mark.usefixtures("restored_imports")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODELS)
    images, classes, level = (part.numpy() for part in shapes(12))
    mask = np.zeros((12, 16, 16), dtype=np.uint8)
    mask[:, 4:8] = 1
    np.savez(tmp_path / "classes.npz", inputs=images, targets=classes)
    np.savez(tmp_path / "level.npz", inputs=images, targets=level)
    np.savez(tmp_path / "bars.npz", inputs=np.where(mask[:, None] > 0, 5, images).astype(np.float32))
    np.savez(tmp_path / "mask.npz", mask=mask)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_segmentation(run: Run, folder: Path) -> None:
    unet = "onebasin.examples:unet"
    code, out, err = run("sample", unet, "classes.npz", *TRAINED, "--ignore-index", 255, "-o", "draws")
    assert code == 0, err
    assert "accuracy" in out
    options = ("--ignore-index", 255, "--ood", "bars.npz", "--ood-mask", "mask.npz", "--n-resamples", 20, "--json")
    code, out, err = run("evaluate", unet, "draws", "classes.npz", *options)
    assert code == 0, err
    images, classes, _ = shapes(12)
    mask = torch.zeros(12, 16, 16, dtype=torch.bool)
    mask[:, 4:8] = True
    bars = torch.where(mask[:, None], 5.0, images)
    found = evaluate(
        UNet(3), Population.open(folder / "draws"), (images, classes), ignore_index=255, ood=bars, ood_mask=mask,
        n_resamples=20,
    )  # fmt: skip
    record = json.loads(out)
    assert record["inside"] == json.loads(found.to_json())["inside"] and record["pixels"] == 12 * 15 * 16
    assert record["detection"] == json.loads(found.to_json())["detection"]
    code, _, err = run("evaluate", unet, "draws", "classes.npz")
    assert code != 0 and "class numbers from 0 to 2" in err
    code, _, err = run("evaluate", unet, "draws", "classes.npz", *options[:5], "bars.npz")
    assert code != 0 and "an array called mask" in err


def test_values_with_a_distribution(run: Run, folder: Path) -> None:
    model = "model.py:brightness"
    code, out, err = run("sample", model, "level.npz", *TRAINED, "--likelihood", "laplace", "-o", "draws")
    assert code == 0, err
    assert "RMSE" in out and "mean log density" in out
    code, out, err = run("evaluate", model, "draws", "level.npz", "--likelihood", "laplace", "--n-resamples", 20)
    assert code == 0, err
    assert "silog" in out and "2,880 pixels, laplace" in out
    code, out, err = run("sample", model, "level.npz", *TRAINED, "--likelihood", "beta_nll", "-o", "loss")
    assert code == 0 and "mean loss" in out
