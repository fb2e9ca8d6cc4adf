"""MNIST and Fashion-MNIST from the IDX files beside the project, if they are there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from onebasin import data

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
ABSENT = "skipped: ../shared/data is not beside the project, and this part needs its MNIST files"


@dataclass(frozen=True)
class Digits:
    """Images (n, 784) in [0, 1] and labels (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load(name: str = "mnist", train: int = 60_000, test: int = 10_000) -> Digits | None:
    """The first images of each set; None where the files are not there."""
    if not (DATA / name).is_dir():
        return None
    found = data.load(name, directory=DATA)
    images, labels = ((found.train[place][:train], found.test[place][:test]) for place in (0, 1))
    return Digits(images[0].flatten(1), labels[0], images[1].flatten(1), labels[1])
