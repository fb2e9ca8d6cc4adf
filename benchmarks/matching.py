"""Matching two networks against plain coordinate ascent: CPU time as a ratio, and the objective reached.

    python -m benchmarks.matching [--pairs 10] [--only mlp resnet encoder] [--before CHECKOUT]

Three architectures, independent and trained: an MLP 784-512-512-512-10, a ResNet-20 with batch norm, and a classifier
on a transformer encoder of four blocks of width 64. Both contenders take turns on the same pair; CPU seconds, one
thread, medians. The reference is coordinate ascent over permutations from the identity (`benchmarks.peers.coordinate`),
ours is `match` over all freedoms, and over permutations alone. With `--before`, the same pairs are matched by another
checkout in a process of its own, and objectives are compared pair by pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import onebasin as ob
from benchmarks.mnist import ABSENT, load
from benchmarks.peers import coordinate
from benchmarks.planted import only
from benchmarks.train import CACHE, keep
from onebasin import State, Symmetry
from onebasin.alignment import BlockLayout, weights_of
from onebasin.examples.published import ResNet

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
NETWORKS = 5  # trained ones of each architecture: ten pairs
LIMITS = {"mlp": 1.5, "resnet": 3.0, "encoder": 1.5}
STEPS = {"mlp": 400, "resnet": 120, "encoder": 300}
BATCH = {"mlp": 128, "resnet": 64, "encoder": 64}


class Encoder(nn.Module):
    """Rows of a picture as tokens, four blocks, the mean over tokens, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
        self.embed, self.head = nn.Linear(8, 64), nn.Linear(64, 10)
        self.place = nn.Parameter(0.1 * torch.randn(8, 64))
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x.reshape(-1, 8, 8)) + self.place).mean(1))


def perceptron() -> nn.Module:
    widths = (784, 512, 512, 512, 10)
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (2, 784)),
    "resnet": (lambda: ResNet(16, (3, 3, 3), 10, nn.BatchNorm2d, torch.relu), (2, 3, 16, 16)),
    "encoder": (Encoder, (2, 64)),
}


def examples(name: str) -> tuple[Tensor, Tensor]:
    """Inputs and classes to train on."""
    if name == "encoder":
        return ob.data.digits()
    if name == "mlp":
        digits = load()
        if digits is None:
            raise SystemExit(ABSENT)
        return digits.train_images, digits.train_labels
    raw = np.load(DATA / "cifar10" / "cifar10_small.npz", allow_pickle=False)
    pictures = torch.from_numpy(raw["x_train"]).permute(0, 3, 1, 2).float() / 128 - 1
    return nn.functional.avg_pool2d(pictures, 2), torch.from_numpy(raw["y_train"]).long()


def fresh(name: str, seed: int) -> State:
    """A network as torch initialises it; what starts constant (norms) is varied, as training would."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = MODELS[name][0]().state_dict()
        for key, value in state.items():
            if value.dim() == 1 and value.is_floating_point():
                state[key] = value + 0.1 * torch.rand(value.shape)
    return {key: value.detach().clone() for key, value in state.items()}


def trained(name: str, seed: int) -> State:
    """A network after some hundred steps of Adam, from the cache where it is there."""
    file = CACHE / f"matching-{name}-{STEPS[name]}-{seed}.safetensors"
    if not file.is_file():
        CACHE.mkdir(exist_ok=True)
        x, y = examples(name)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = MODELS[name][0]()
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            for _ in range(STEPS[name]):
                rows = torch.randint(len(x), (BATCH[name],))
                loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        keep(file, {key: value.detach().clone() for key, value in model.state_dict().items()})
    return dict(load_file(file))


def pairs(name: str, kind: str, count: int) -> list[tuple[State, State]]:
    if kind == "trained":
        networks = [trained(name, seed) for seed in range(NETWORKS)]
        return list(itertools.combinations(networks, 2))[:count]
    return [(fresh(name, 2 * seed), fresh(name, 2 * seed + 1)) for seed in range(count)]


def symmetry_of(name: str, freedoms: str) -> Symmetry:
    build, shape = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        symmetry = ob.discover(build().eval(), torch.randn(shape))
    return symmetry if freedoms == "all" else only(symmetry, ("permutation",))


def overlaps(name: str, count: int) -> dict[str, list[float]]:
    """What `match` reaches on every pair, with the onebasin that this process imports: (overlap, -distance)."""
    found: dict[str, list[float]] = {}
    for freedoms, kind in itertools.product(("all", "permutations"), ("independent", "trained")):
        symmetry = symmetry_of(name, freedoms)
        matches = [ob.match(a, b, symmetry) for a, b in pairs(name, kind, count)]
        found[f"{freedoms} {kind}"] = [match.after for match in matches]
        found[f"{freedoms} {kind} distance"] = [match.distance_after for match in matches]
    return found


def plain_ascent(name: str, symmetry: Symmetry) -> Callable[[State, State, int], Callable[[], float]]:
    """Plain coordinate ascent for one architecture; it returns what computes the overlap that it reached."""
    weights = weights_of(BlockLayout.of(symmetry))
    lay_out, axes, heads = coordinate.cut(symmetry)

    def run(a: State, b: State, seed: int) -> Callable[[], float]:
        left, right = lay_out(a), lay_out(b)
        orders = coordinate.match(left, right, axes, torch.Generator().manual_seed(seed), heads)

        def reached() -> float:
            moved = coordinate.permuted(right, axes, orders)
            inside = sum(float((left[key] * moved[key]).double().sum()) for key in left)
            legs = {block.tensor for block in BlockLayout.of(symmetry).blocks}
            return inside + sum(float((a[key] * b[key]).double().sum()) for key in weights if key not in legs)

        return reached

    return run


def timed(function: Callable[[], object]) -> float:
    begin = time.process_time()
    function()
    return time.process_time() - begin


def race(name: str, count: int, repeats: int = 3) -> None:
    plain, full = symmetry_of(name, "permutations"), symmetry_of(name, "all")
    ascent = plain_ascent(name, plain)
    for kind in ("independent", "trained"):
        times: dict[str, list[float]] = {"ascent": [], "all": [], "permutations": []}
        gains = []
        for number, (a, b) in enumerate(pairs(name, kind, count)):
            work: dict[str, Callable[[], object]] = {
                "ascent": lambda a=a, b=b, n=number: ascent(a, b, n),
                "all": lambda a=a, b=b: ob.match(a, b, full),
                "permutations": lambda a=a, b=b: ob.match(a, b, plain),
            }
            seconds = {what: [timed(call) for call in [function] * repeats] for what, function in work.items()}
            for what, values in seconds.items():
                times[what].append(min(values))
            gains.append(ob.match(a, b, plain).after / ascent(a, b, number)() - 1)
        base = statistics.median(times["ascent"])
        ratios = {w: statistics.median(map(float.__truediv__, v, times["ascent"])) for w, v in times.items()}
        print(
            f"{name:8} {kind:12} coordinate ascent {1e3 * base:7.1f} ms;  all freedoms {ratios['all']:5.2f} x, "
            f"permutations {ratios['permutations']:5.2f} x;  "
            f"objective {100 * min(gains):+.2f} to {100 * max(gains):+.2f} %  (limit {LIMITS[name]})",
            flush=True,
        )


def compare(before: Path, names: list[str], count: int) -> bool:
    """Objectives of another checkout, pair by pair; whether none is worse here."""
    command = [sys.executable, str(Path(__file__).resolve()), "--overlaps", "--pairs", str(count), "--only", *names]
    paths = os.pathsep.join((str(before.resolve()), str(Path(__file__).resolve().parents[1])))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    there, fine = json.loads(done.stdout.splitlines()[-1]), True
    for name in names:
        here = overlaps(name, count)
        for case, values in there[name].items():
            sign = -1 if case.endswith("distance") else 1
            changes = [sign * (new - old) / abs(old) for new, old in zip(here[case], values, strict=True)]
            worse = sum(change < -1e-6 for change in changes)
            better = sum(change > 1e-6 for change in changes)
            fine &= not worse
            ends = f"{100 * min(changes):+.4f} to {100 * max(changes):+.4f} %"
            print(f"{name:8} {case:32} better {better}, worse {worse}, {ends}")
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--before", type=Path, help="a checkout whose objectives are compared")
    parser.add_argument("--overlaps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.overlaps:
        print(json.dumps({name: overlaps(name, options.pairs) for name in options.only}))
        return 0
    for name in options.only:
        race(name, options.pairs)
    return 0 if options.before is None or compare(options.before, options.only, options.pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
