"""Tabular regression sets beside the project, standardised by their training part."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "uci"
ABSENT = "skipped: ../shared/data/uci is not beside the project, and this part needs its files"


@dataclass(frozen=True)
class Split:
    """Inputs (n, features) and targets (n, 1), float32, with mean 0 and spread 1 in the training part.

    Attributes:
        unit: the standard deviation of the targets as they were, which the standardised ones are multiples of.
        reference: log likelihood and RMSE of MC dropout on the same split in the original unit, where known.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unit: float
    reference: tuple[float, float] | None = None


def present() -> bool:
    """Whether the files are there."""
    return DATA.is_dir()


def standardised(inputs: Tensor, targets: Tensor, train: Tensor, test: Tensor) -> Split:
    """Cut float64 inputs (n, features) and targets (n,) into two parts by their rows."""
    spread = inputs[train].std(0, correction=0)
    x = (inputs - inputs[train].mean(0)) / torch.where(spread > 0, spread, 1.0)
    unit = targets[train].std(correction=0)
    y = ((targets - targets[train].mean()) / unit)[:, None]
    x, y = x.float(), y.float()
    return Split((x[train], y[train]), (x[test], y[test]), float(unit))


# The chords in the order of the original file, whose rows then ascend in angle, descend in velocity and ascend in
# frequency. Ours is a shuffled and centred copy: chords are told apart by their rank.
_CHORDS = (5, 4, 3, 1, 0, 2)
_LINEAR = 0.6599  # RMSE of linear regression on the published split, which tells whether it is the same


def published_airfoil() -> Split:
    """The split of bde's published figures: scikit-learn's `train_test_split(..., 0.2, random_state=0)` of the file.

    Raises:
        ValueError: linear regression does not reach the published RMSE, so that it is another split.
    """
    from sklearn.linear_model import LinearRegression
    from sklearn.model_selection import train_test_split

    with np.load(DATA / "airfoil.npz") as file:
        inputs, targets = file["X"], file["y"]
    rank = np.unique(inputs[:, 2].round(6), return_inverse=True)[1]
    chord = np.argsort(_CHORDS)[rank]
    order = np.lexsort((inputs[:, 0], -inputs[:, 3], inputs[:, 1], chord))
    train, test = (torch.from_numpy(rows) for rows in train_test_split(order, test_size=0.2, random_state=0))
    split = standardised(torch.from_numpy(inputs), torch.from_numpy(targets), train, test)
    fit = LinearRegression().fit(*split.train)
    found = float(np.sqrt(np.mean((fit.predict(split.test[0]) - split.test[1].numpy()) ** 2)))
    if round(found, 4) != _LINEAR:
        raise ValueError(f"linear regression has an RMSE of {found:.4f}, not {_LINEAR}: another split")
    return split


def fixed_splits(name: str) -> list[Split]:
    """The published splits of a set, each with what MC dropout reached on it."""
    with np.load(DATA / f"{name}.npz") as file:
        inputs, targets = torch.from_numpy(file["X"]), torch.from_numpy(file["y"])
        rows = [torch.from_numpy(file[part].astype(np.int64)) for part in ("train_idx", "test_idx")]
        likelihoods, errors = file["ref_mcdropout_ll"].tolist(), file["ref_mcdropout_rmse"].tolist()
    found = []
    for train, test, likelihood, error in zip(*rows, likelihoods, errors, strict=True):
        split = standardised(inputs, targets, train, test)
        found.append(Split(split.train, split.test, split.unit, (likelihood, error)))
    return found
