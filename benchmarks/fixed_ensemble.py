"""The ensemble that several benchmarks talk about: five MAP networks 784-512-10 on MNIST, kept in `.cache/`.

Prior N(0, 1) on weights and biases, Adam 1e-3, batches of 100, as in paper 1; 15 epochs with a cosine schedule instead
of its 50 at one rate.

    python -m benchmarks.fixed_ensemble     # train it now, where it is not kept yet
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.mnist import ABSENT, Digits, load
from benchmarks.train import CACHE, mlp
from onebasin import Ensemble, Population, sample

VERSION = 1  # part of the cache key: raise it when training itself changes


@dataclass(frozen=True)
class Settings:
    """Everything that decides the members."""

    widths: tuple[int, ...] = (784, 512, 10)
    members: int = 5
    epochs: int = 15
    batch: int = 100
    rate: float = 1e-3
    schedule: str = "cosine"
    prior: float = 1.0
    examples: int = 60_000
    seed: int = 0


PAPER = Settings()


def network(settings: Settings = PAPER) -> nn.Module:
    """The function of the members."""
    return mlp(settings.widths)


def ensemble(digits: Digits, settings: Settings = PAPER) -> Population:
    """The members, from the cache where they are known."""
    folder = place(settings)
    if not folder.is_dir():
        data = digits.train_images[: settings.examples], digits.train_labels[: settings.examples]
        method = Ensemble(epochs=settings.epochs, batch=settings.batch, lr=settings.rate, lr_schedule=settings.schedule)
        members = sample(
            network(settings), data, method, seed=settings.seed, chains=settings.members, prior=settings.prior
        )
        CACHE.mkdir(exist_ok=True)
        members.save(folder)
    return Population.open(folder)


def place(settings: Settings) -> Path:
    """Where the members are kept: the name is a digest of all that decides them."""
    text = json.dumps([VERSION, asdict(settings), torch.__version__], sort_keys=True)
    return CACHE / f"ensemble-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def main() -> int:
    digits = load()
    if digits is None:
        print(ABSENT)
        return 0
    began = time.perf_counter()
    print(f"{ensemble(digits)}; {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
