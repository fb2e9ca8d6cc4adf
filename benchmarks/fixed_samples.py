"""Two fixed sets of HMC samples that compact forms are judged on, kept in `.cache/` so that a second run is quick.

`digits`: scikit-learn's 8 x 8 digits, 64-32-32-10, out-of-distribution: the test digits with their pixels shuffled.
`mnist`: 2,000 images of 14 x 14 pixels, 196-32-10 (the reduced problem of `benchmarks.mnist_inference`),
out-of-distribution: Fashion-MNIST. Four chains each, prior N(0, 0.3^2).

    python -m benchmarks.fixed_samples [digits] [mnist]
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.mnist import ABSENT, load
from benchmarks.train import CACHE, mlp
from onebasin import HMC, Population, diagnose, sample
from onebasin.data.dataset import split
from onebasin.data.load import digits

PRIOR = 0.3


@dataclass(frozen=True)
class Problem:
    """A model, data in three parts, and how its posterior was sampled.

    Attributes:
        name: "digits" or "mnist".
        widths: of the ReLU network.
        train: inputs and targets that the chains saw.
        test: held-out inputs and targets.
        outside: inputs of another kind.
        settings: of the sampler.
    """

    name: str
    widths: tuple[int, ...]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor
    settings: dict[str, Any]

    @property
    def model(self) -> nn.Module:
        """The function; its own weights do not matter."""
        return mlp(self.widths)

    def samples(self) -> Population:
        """The draws of all chains, from the cache where they are known; an interrupted run goes on."""
        text = json.dumps([self.name, self.widths, self.settings, torch.__version__], sort_keys=True)
        folder = CACHE / f"hmc-{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        return sample(
            self.model,
            self.train,
            HMC(**self.settings),
            chains=4,
            prior=PRIOR,
            path=folder,
            chains_per_batch=2,
            workers=2,
        )


def digits_problem() -> Problem:
    """1,797 digits, three quarters of them for training."""
    train, test = split(*digits(), test=0.25, seed=0)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    settings = {"epochs": 20, "warmup": 200, "draws": 250, "leapfrog": 80}
    return Problem("digits", (64, 32, 32, 10), train, test, test[0][:, shuffled], settings)


def small(images: Tensor) -> Tensor:
    """14 x 14 pixels, standardised with the constants of the first 2,000 training images of MNIST."""
    return (F.avg_pool2d(images.reshape(-1, 1, 28, 28), 2).flatten(1) - 0.1337) / 0.2807


def mnist_problem() -> Problem | None:
    """None where the files are not there."""
    inside, outside = load(), load("fashion-mnist")
    if inside is None or outside is None:
        return None
    settings = {"epochs": 20, "warmup": 200, "draws": 250, "leapfrog": 80}
    train = small(inside.train_images[:2000]), inside.train_labels[:2000]
    test = small(inside.test_images), inside.test_labels
    return Problem("mnist", (196, 32, 10), train, test, small(outside.test_images), settings)


def problems(names: list[str]) -> list[Problem]:
    """The problems by name, all of them without a name; one whose data are absent is left out, with a sentence."""
    made = [digits_problem() if name == "digits" else mnist_problem() for name in names or ["digits", "mnist"]]
    if None in made:
        print(ABSENT)
    return [problem for problem in made if problem is not None]


if __name__ == "__main__":
    for problem in problems(sys.argv[1:]):
        began = time.perf_counter()
        found = problem.samples()
        print(f"{problem.name}: {len(found)} samples, {time.perf_counter() - began:.0f} s")
        print(f"  {diagnose(problem.model, found, problem.test[0][:500], weights=False)}", flush=True)
