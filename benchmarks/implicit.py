"""What implicit ensembles cost: CPU time of a step and numbers stored, against a deep ensemble of as many networks.

Both train in the library's own loop, M networks on mini-batches of 100: `Ensemble` with M chains in the windows that a
run computes them in, the others with one chain of M members (MIMO: one network with M slots). The steps of all methods
alternate, the time is the CPU time of the process on one thread, and medians over rounds are compared. Numbers are
those that are trained, in networks of the base; what a run of the ensemble stores is M.

    python -m benchmarks.implicit [--members 4] [--rounds 15] [--steps 20] [--networks mlp mnist cnn] [--ways eager]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.inference.job import chains_per_batch_for
from onebasin.inference.kernel import StepIndex
from onebasin.inference.seeds import Streams
from onebasin.inference.start import first_networks
from onebasin.inference.target import target_of

LIMIT = 1.3  # times the ensemble
BATCH, EXAMPLES, LARGE = 100, 1000, 50_000
METHODS = ("batchensemble", "lpbnn", "masksembles", "mimo")


def perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for before, behind in itertools.pairwise(widths):
        layers += [nn.Linear(before, behind), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    def block(before: int, behind: int) -> list[nn.Module]:
        return [nn.Conv2d(before, behind, 3, padding=1, bias=False), nn.BatchNorm2d(behind), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 16), *block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (partial(perceptron, 64, 64, 64, 10), (64,)),
    "mnist": (partial(perceptron, 784, 256, 256, 10), (784,)),
    "cnn": (convolutional, (3, 16, 16)),
}


@dataclass(eq=False)
class Work:
    """A method in training: each call makes some steps of all its networks."""

    steps: Callable[[int], None]
    numbers: float

    @classmethod
    def of(cls, method: Any, model: nn.Module, data: tuple[Tensor, Tensor], chains: int, compiled: bool) -> Work:
        target = target_of(model, data, compile=compiled)
        kernel = method.plan(target).stages[0].kernel
        size = chains_per_batch_for(chains, small=target.layout.size < LARGE)
        windows = [range(first, first + size) for first in range(0, chains, size)]
        states, count = [], [0]
        for window in windows:
            start = first_networks(model, target.layout, "fresh", window, 0)
            states.append(kernel.init(start, Streams(0, window, "init")))
        numbers = sum(state.position.shape[0] * state.position.shape[1] for state in states) / target.layout.size

        def steps(number: int) -> None:
            streams = [Streams(0, window, f"step {count[0]}") for window in windows]
            for step in range(count[0], count[0] + number):
                for place, own in enumerate(streams):
                    states[place], _ = kernel.step(states[place], StepIndex(step, 1 << 30), own)
            count[0] += number

        return cls(steps, numbers)


def timed(work: Work, steps: int) -> float:
    """Milliseconds of CPU time for one step."""
    before = time.process_time()
    work.steps(steps)
    return 1e3 * (time.process_time() - before) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of implicit ensembles")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--ways", nargs="*", default=["eager", "compiled"])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'network':8} {'way':9} {'method':14} {'ms a step':>10} {'ratio':>6} {'networks stored':>16}")
    missed = []
    for name in chosen.networks:
        make, shape = NETWORKS[name]
        generator = torch.Generator().manual_seed(0)
        data = torch.randn(EXAMPLES, *shape, generator=generator), torch.randint(10, (EXAMPLES,), generator=generator)
        for way in chosen.ways:
            works = {"ensemble": Work.of(ob.Ensemble(batch=BATCH), make(), data, chosen.members, way == "compiled")}
            for word in METHODS:
                method = ob.inference.METHODS[word](members=chosen.members, batch=BATCH)  # type: ignore[call-arg]
                works[word] = Work.of(method, make(), data, 1, way == "compiled")
            for work in works.values():
                work.steps(3)
            times: dict[str, list[float]] = {word: [] for word in works}
            for _ in range(chosen.rounds):
                for word, work in works.items():
                    times[word].append(timed(work, chosen.steps))
            base = statistics.median(times["ensemble"])
            for word, work in works.items():
                middle = statistics.median(times[word])
                ratio = statistics.median(a / b for a, b in zip(times[word], times["ensemble"], strict=True))
                print(f"{name:8} {way:9} {word:14} {middle:10.3f} {ratio:6.2f} {work.numbers:16.2f}", flush=True)
                if ratio > LIMIT:
                    missed.append(f"{word} on {name}, {way}: {ratio:.2f}")
            assert base > 0
    print(f"over {LIMIT} times the ensemble: {'; '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
