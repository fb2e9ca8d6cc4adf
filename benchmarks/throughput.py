"""Gradients per second on one thread: compiled chains against JAX, eager vmap and a Python loop over chains.

Three networks and 1, 10 and 32 chains make nine cells. All get the same data and weights, random ones, and their
gradients are compared. 32 chains are computed in windows, as a run computes them. The time is the CPU time of the
process, which on an idle machine is the time on the clock; rounds alternate with those of JAX, and the best counts.

    python -m benchmarks.throughput [--rounds 3] [--seconds 0.3] [--no-peers]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from benchmarks.peers.environment import PeerMissing, call
from benchmarks.targets import Targets, head
from benchmarks.train import mlp
from onebasin.inference.job import chains_per_batch_for
from onebasin.inference.target import Target, target_of

NETWORKS = {
    "airfoil": ((5, 16, 16, 16, 16, 2), 1202, 0),
    "yacht": ((6, 50, 2), 277, 0),
    "mnist": ((784, 32, 10), 1000, 10),
}  # widths, examples, classes: 0 for a Gaussian with learned variance
CHAINS = (1, 10, 32)
WAYS = ("loop", "eager", "compiled")
NEAR_JAX, OVER_LOOP, SAME = 0.9, 3.0, 1e-4


@dataclass(frozen=True)
class Cell:
    """One network at one number of chains."""

    network: str
    chains: int

    @property
    def name(self) -> str:
        return f"{self.network}/{self.chains}"

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        widths, examples, classes = NETWORKS[self.network]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(examples, widths[0], generator=generator)
        if classes:
            return x, torch.randint(classes, (examples,), generator=generator)
        return x, torch.randn(examples, generator=generator)

    @cached_property
    def position(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return 0.1 * torch.randn(self.chains, self.target(False).layout.size, generator=generator)

    def target(self, compiled: bool) -> Target:
        return target_of(mlp(NETWORKS[self.network][0]), self.data, compile=compiled)

    @property
    def arrays(self) -> dict[str, Tensor]:
        """What the driver of JAX reads."""
        widths = torch.tensor(NETWORKS[self.network][0])
        parts = {"x": self.data[0], "y": self.data[1], "position": self.position, "widths": widths}
        return {f"{self.name}/{key}": value for key, value in parts.items()}

    def jobs(self) -> dict[str, Callable[[], Tensor]]:
        """The gradients of all chains (chains, D) in each of `WAYS`."""
        eager, compiled = self.target(False), self.target(True)
        return {
            "loop": lambda: torch.stack([one_by_one(eager, weights) for weights in self.position]),
            "eager": lambda: in_windows(eager, self.position),
            "compiled": lambda: in_windows(compiled, self.position),
        }


def in_windows(target: Target, position: Tensor) -> Tensor:
    parts = position.split(chains_per_batch_for(len(position)))
    found = [target(part, {}).gradient for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def one_by_one(target: Target, weights: Tensor) -> Tensor:
    """What one writes without a chain axis: autograd of one network's potential."""
    sampled = {name: value.clone().requires_grad_() for name, value in target.layout.split(weights).items()}
    values, _ = target.one(sampled, {}, tree_unflatten(target.leaves, target.structure), False)
    log_prior = -0.5 * sum((value.square().sum() for value in sampled.values()), torch.zeros(()))
    slopes = torch.autograd.grad(-(values.sum() + log_prior), list(sampled.values()))
    return torch.cat([slope.flatten() for slope in slopes])


def milliseconds(job: Callable[[], object], seconds: float) -> float:
    """The lower quartile of the process's CPU time for one call."""
    for _ in range(3):
        job()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 8:
        started = time.process_time()
        job()
        times.append(time.process_time() - started)
    return 1e3 * sorted(times)[len(times) // 4]


@contextmanager
def one_core() -> Iterator[None]:
    """One thread on one core, for this process and those it starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if allowed:
        os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if allowed:
            os.sched_setaffinity(0, allowed)


def measured(cells: list[Cell], rounds: int, seconds: float, peers: bool) -> tuple[dict[str, dict[str, float]], float]:
    """The best milliseconds by cell and way, JAX among them where it is there, and the worst error against it."""
    best: dict[str, dict[str, float]] = {cell.name: {} for cell in cells}
    worst = 0.0
    jobs = {cell.name: cell.jobs() for cell in cells}
    for _ in range(rounds):
        for name, ways in jobs.items():
            for way in WAYS:
                best[name][way] = min(best[name].get(way, torch.inf), milliseconds(ways[way], seconds))
        if not peers:
            continue
        arrays = {key: value for cell in cells for key, value in cell.arrays.items()}
        try:
            told, gradients = call("jax", arrays, "--seconds", str(seconds))
        except PeerMissing as reason:
            print(f"skipped: {reason}")
            peers = False
            continue
        for name, ways in jobs.items():
            best[name]["jax"] = min(best[name].get("jax", torch.inf), told["milliseconds"][name])
            theirs = gradients[name.replace("/", "|")]
            errors = [float((ways[way]() - theirs).abs().max() / theirs.abs().max()) for way in WAYS]
            worst = max(worst, *errors)
    return best, worst


def table(targets: Targets, rounds: int = 3, seconds: float = 0.3, peers: bool = True) -> None:
    """Print the nine cells, and judge them."""
    head("Throughput of gradients on one thread", "milliseconds of CPU time for potential and gradient of all chains")
    cells = [Cell(network, chains) for network in NETWORKS for chains in CHAINS]
    with one_core():
        best, worst = measured(cells, rounds, seconds, peers)
    print(f"{'':<12}{'loop':>10}{'eager':>10}{'compiled':>10}{'JAX':>10}{'x JAX':>10}{'x loop':>10}")
    for name, found in best.items():
        ours, jax = found["compiled"], found.get("jax", torch.nan)
        shown = "".join(f"{value:10.3f}" for value in (found["loop"], found["eager"], ours, jax))
        print(f"{name:<12}{shown}{jax / ours:10.2f}{found['loop'] / ours:10.2f}")
    for cell in cells:
        found = best[cell.name]
        if "jax" in found:
            ratio = found["jax"] / found["compiled"]
            targets.judge(f"{NEAR_JAX} x JAX, {cell.name}", f"{ratio:.2f} x", ratio >= NEAR_JAX)
    for cell in cells:
        if cell.chains == 10:
            ratio = best[cell.name]["loop"] / best[cell.name]["compiled"]
            targets.judge(f"{OVER_LOOP:.0f} x a Python loop, {cell.name}", f"{ratio:.2f} x", ratio >= OVER_LOOP)
    if any("jax" in found for found in best.values()):
        targets.judge("the gradients of JAX to 1e-4 of the largest entry", f"{worst:.1e}", worst <= SAME)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    targets = Targets()
    table(targets, options.rounds, options.seconds, not options.no_peers)
    return targets.close()


if __name__ == "__main__":
    sys.exit(main())
