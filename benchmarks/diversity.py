"""What does the mutual information of every pair of a thousand networks cost, and what does it say about thirty?

    python -m benchmarks.diversity [--members 1000] [--examples 10000] [--classes 10] [--loop 300]

The competitor is the loop that one would write: for each pair of networks the entropy of their mean prediction with
numpy, entropies of single networks computed once before. It is timed on a sample of pairs, in float64 and, for those
who keep float32, in float32; numpy runs it on one core, and what is compared uses all that torch is given (2 here).
Loop and product are timed in alternation, and medians are compared. That is fair on an idle machine only: on a busy one
two threads wait for each other, which one does not. Seconds of processor are therefore printed as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.memory import Peak
from benchmarks.targets import Targets, head
from onebasin import Ensemble, sample
from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.evaluation.diversity import diversity
from onebasin.metrics.pairs import mutual_information_of_pairs, pairwise_mutual_information

RATIO, GIGABYTES, ROUNDS = 20, 4.0, 3


def make_probabilities(members: int, examples: int, classes: int) -> Tensor:
    """Networks that share two thirds of the variance of their logits, float32 (members, examples, classes)."""
    generator = torch.Generator().manual_seed(0)
    together = 4 * torch.randn(1, examples, classes, generator=generator)
    made = torch.empty(members, examples, classes)
    for own in made:
        own.copy_((together[0] + 2.8 * torch.randn(examples, classes, generator=generator)).softmax(1))
    return made


def loop_seconds(probabilities: Tensor, pairs: Tensor, dtype: type) -> tuple[float, np.ndarray]:
    """Seconds for one pair in the straightforward loop, and what it finds."""
    chosen, places = pairs.unique(return_inverse=True)
    p = probabilities[chosen].numpy().astype(dtype)
    single = [-(own * np.log(own + 1e-38)).sum(-1).mean() for own in p]
    found = np.zeros(len(pairs))
    start = time.perf_counter()
    for number, (i, j) in enumerate(places.tolist()):
        mean = (p[i] + p[j]) / 2
        found[number] = -(mean * np.log(mean)).sum(-1).mean() - (single[i] + single[j]) / 2
    return (time.perf_counter() - start) / len(pairs), found


def sampled_pairs(members: int, count: int, pool: int = 40) -> Tensor:
    """Pairs among a few members, so that the loop finds its data in no better place than memory."""
    generator = torch.Generator().manual_seed(1)
    few = torch.randperm(members, generator=generator)[:pool].sort().values
    rows = torch.triu_indices(len(few), len(few), 1).T
    return few[rows[torch.randperm(len(rows), generator=generator)[:count]]]


def speed(targets: Targets, members: int, examples: int, classes: int, loop: int) -> None:
    head(
        "Every pair of a population",
        f"{members:,} networks x {examples:,} inputs x {classes} classes, {members * (members - 1) // 2:,} pairs, "
        f"{torch.get_num_threads()} threads; load of the machine {os.getloadavg()[0]:.2f}",
    )
    probabilities = make_probabilities(members, examples, classes)
    pairs = sampled_pairs(members, loop)
    wide, narrow, ours, worked, peak = [], [], [], [], 0
    for _ in range(ROUNDS):
        seconds, found = loop_seconds(probabilities, pairs, np.float64)
        wide.append(seconds)
        narrow.append(loop_seconds(probabilities, pairs, np.float32)[0])
        with Peak() as memory:
            start, before = time.perf_counter(), time.process_time()
            matrix = pairwise_mutual_information(probabilities)
            ours.append(time.perf_counter() - start)
            worked.append(time.process_time() - before)
        peak = max(peak, memory.nbytes)
    count, mine = members * (members - 1) / 2, statistics.median(ours)
    loops = {"float64": count * statistics.median(wide), "float32": count * statistics.median(narrow)}
    for name, total in loops.items():
        print(
            f"  numpy loop in {name}: {total / count * 1e3:.3f} ms a pair, {total:,.0f} s for all: {total / mine:.1f}x"
        )
    shown = ", ".join(f"{one:.2f}" for one in ours)
    print(f"  all pairs at once: {mine:.2f} s ({shown}), {statistics.median(worked):.1f} s of processor on all cores")
    exact = mutual_information_of_pairs(probabilities, pairs[:50])
    error = (matrix[pairs[:50, 0], pairs[:50, 1]] - exact).abs() / exact
    loop_error = np.abs(found[:50] - exact.numpy()).max()
    print(f"  mean {float(matrix.sum() / count / 2):.4f} nats; against float64 relative error {float(error.max()):.1e}")
    targets.judge("the loop is the definition", f"differs by {loop_error:.0e} nats", bool(loop_error < 1e-6))
    targets.judge("relative error <= 1e-3", f"{float(error.max()):.1e}", bool(error.max() <= 1e-3))
    held = (probabilities.nbytes + peak) / 1e9
    targets.judge(f">= {RATIO}x the loop", f"{loops['float64'] / mine:.1f}x", loops["float64"] >= RATIO * mine)
    shown = f"{held:.2f} GB, {probabilities.nbytes / 1e9:.2f} of it the probabilities"
    targets.judge(f"< {GIGABYTES:g} GB", shown, held < GIGABYTES)


def report(runs: int, draws: int) -> None:
    head(
        f"{runs * draws} networks trained on digits",
        f"{runs} runs of a 64-32-10 network, the last {draws} checkpoints of each; foreign inputs: pixels shuffled",
    )
    train, (held, _) = split(*digits(), seed=0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    population = sample(model, train, Ensemble(draws=draws, epochs=60), chains=runs, seed=0)
    order = torch.randperm(held.numel(), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    found = diversity(model, population, held, ood=held.flatten()[order].reshape(held.shape), closest=5)
    print(f"{found}\n\n  report: {time.perf_counter() - start:.2f} s")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("members", 1000),
        ("examples", 10_000),
        ("classes", 10),
        ("loop", 300),
        ("runs", 10),
        ("draws", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    targets = Targets()
    speed(targets, options.members, options.examples, options.classes, options.loop)
    if options.runs:
        report(options.runs, options.draws)
    return targets.close()


if __name__ == "__main__":
    sys.exit(main())
