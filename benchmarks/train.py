"""Small ReLU MLPs trained on MNIST, several at once, kept in `.cache/` so that a second run is quick.

Networks of one recipe are trained side by side as stacked tensors: layer k of K networks is one batched product
(K, batch, in) @ (K, in, out). Each network has its own initial weights and its own order of the examples, both from
seeds, so that the side-by-side training is that of each network alone up to the order of floating-point sums.

    python -m benchmarks.train [--widths 784 512 10] [--batch 64] [--steps 60]     # what side by side is worth
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.mnist import ABSENT, Digits, load
from onebasin import State

CACHE = Path(__file__).resolve().parents[1] / ".cache"
VERSION = 1  # part of every cache key: raise it when training itself changes


@dataclass(frozen=True)
class Recipe:
    """How networks are trained; everything but their weights and the order of their examples."""

    widths: tuple[int, ...] = (784, 512, 10)
    method: str = "sgd"
    rate: float = 1e-3
    momentum: float = 0.9
    batch: int = 64
    epochs: int = 50
    examples: int = 60_000
    data: str = "mnist"


PAPER = Recipe()
DEEP = Recipe(widths=(784, 512, 512, 512, 10), method="adam", batch=512, epochs=8)


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them; its weights are placeholders."""
    with torch.random.fork_rng(devices=[]):
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).eval()


def fresh(widths: Sequence[int], seed: int) -> State:
    """Initial weights as torch's Linear draws them: U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        bound = 1 / math.sqrt(fan_in)
        for name, shape in (("weight", (fan_out, fan_in)), ("bias", (fan_out,))):
            made[f"{2 * number}.{name}"] = (2 * torch.rand(shape, generator=generator) - 1) * bound
    return made


def logits(stacked: State, images: Tensor) -> Tensor:
    """Outputs of K networks on their own images: (K, n, in) -> (K, n, classes)."""
    layers = len(stacked) // 2
    for number in range(layers):
        weight, bias = stacked[f"{2 * number}.weight"], stacked[f"{2 * number}.bias"]
        images = torch.baddbmm(bias[:, None], images, weight.mT)
        images = images.relu() if number < layers - 1 else images
    return images


def epochs(recipe: Recipe, starts: Sequence[State], orders: Sequence[int], digits: Digits) -> Iterator[State]:
    """Train networks side by side; yields their stacked weights after each epoch (the same tensors, changed)."""
    stacked = {name: torch.stack([start[name] for start in starts]).requires_grad_() for name in starts[0]}
    generators = [torch.Generator().manual_seed(order) for order in orders]
    images, labels = digits.train_images[: recipe.examples], digits.train_labels[: recipe.examples]
    if recipe.method == "adam":
        optimiser: torch.optim.Optimizer = torch.optim.Adam(stacked.values(), lr=recipe.rate, fused=True)
    else:
        optimiser = torch.optim.SGD(stacked.values(), lr=recipe.rate, momentum=recipe.momentum, fused=True)
    for _ in range(recipe.epochs):
        rows = torch.stack([torch.randperm(len(images), generator=generator) for generator in generators])
        for batch in rows.split(recipe.batch, dim=1):
            found = logits(stacked, images[batch])
            # A sum over networks of means over examples: each network sees the gradient of its own mean.
            loss = F.cross_entropy(found.flatten(0, 1), labels[batch].flatten(), reduction="sum") / batch.shape[1]
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        yield {name: tensor.detach() for name, tensor in stacked.items()}


def trained(
    recipe: Recipe, starts: Sequence[State], orders: Sequence[int], digits: Digits, group: int = 4
) -> list[State]:
    """Networks after the last epoch, from the cache where they are known; `group` are trained side by side."""
    files = [_file(recipe, start, order) for start, order in zip(starts, orders, strict=True)]
    wanted = [number for number, file in enumerate(files) if not file.is_file()]
    CACHE.mkdir(exist_ok=True)
    for first in range(0, len(wanted), group):
        chosen = wanted[first : first + group]
        *_, stacked = epochs(recipe, [starts[n] for n in chosen], [orders[n] for n in chosen], digits)
        for place, number in enumerate(chosen):
            keep(files[number], {name: tensor[place].clone() for name, tensor in stacked.items()})
    return [load_file(file) for file in files]


def _file(recipe: Recipe, start: State, order: int) -> Path:
    """Where a trained network is kept: the name is a digest of all that decides its weights."""
    text = json.dumps([VERSION, asdict(recipe), order, torch.__version__], sort_keys=True)
    digest = hashlib.sha256(text.encode())
    for name, tensor in start.items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return CACHE / f"{recipe.data}-{'-'.join(map(str, recipe.widths))}-{digest.hexdigest()[:20]}.safetensors"


def keep(file: Path, state: State) -> None:
    """Write and rename, so that an interrupted run leaves no half file under a good name."""
    part = file.with_suffix(".part")
    save_file(state, part)
    part.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=PAPER.widths)
    parser.add_argument("--batch", type=int, default=PAPER.batch)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    digits = load()
    if digits is None:
        print(ABSENT)
        return
    method = "sgd" if len(options.widths) == 3 else "adam"
    recipe = Recipe(
        tuple(options.widths), method, batch=options.batch, epochs=1, examples=options.steps * options.batch
    )
    whole = math.ceil(60_000 / options.batch) / options.steps
    print(f"{method}, batch {options.batch}, {torch.get_num_threads()} threads: seconds per network and epoch of MNIST")
    for many in (1, 2, 3, 4, 6, 8, 12):
        starts = [fresh(recipe.widths, seed) for seed in range(many)]
        times = []
        for _ in range(3):
            begun = time.perf_counter()
            list(epochs(recipe, starts, range(many), digits))
            times.append(time.perf_counter() - begun)
        print(f"{many:>3} side by side {min(times) * whole / many:>8.2f} s")


if __name__ == "__main__":
    main()
