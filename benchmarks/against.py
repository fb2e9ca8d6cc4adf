"""CPU time of discovery, alignment and geometry against another checkout, in one run.

    git worktree add ../before v0.1 && python -m benchmarks.against ../before

Both checkouts run the same calls on the same networks in processes that take turns, one thread each; shown are the
least CPU times over the turns and their ratios. CPU time rather than wall time, because machines are shared.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

LIMIT = 1.05


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.norms[1](self.second(torch.relu(self.norms[0](self.first(x))))))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Residual(16),
        Residual(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (mlp, (2, 64)),
    "residual network": (convnet, (2, 3, 8, 8)),
    "encoder": (encoder, (2, 5, 32)),
    "LSTM": (lambda: nn.LSTM(8, 16, batch_first=True), (2, 4, 8)),
}


def timed(function: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        function()
        best = min(best, time.process_time() - begin)
    return best


def work() -> dict[str, float]:
    """CPU seconds of each task with the onebasin that this process imports."""
    import onebasin as ob

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {}
    for name, (build, shape) in MODELS.items():
        model, inputs = build(), torch.randn(shape)
        ob.discover(model, inputs)  # imports and caches
        found[f"discover {name}"] = timed(lambda model=model, inputs=inputs: ob.discover(model, inputs), 5)
    for name, build, shape in (("perceptron", mlp, (2, 64)), ("residual network", convnet, (2, 3, 8, 8))):
        model = build()
        symmetry = ob.discover(model, torch.randn(shape))
        population = ob.Population.from_models([build() for _ in range(12)])
        a, b = population.member(0), population.member(1)
        found[f"match {name}"] = timed(lambda a=a, b=b, s=symmetry: ob.match(a, b, s), 7)
        found[f"align 12 x {name}"] = timed(lambda p=population, s=symmetry: ob.align(p, s), 3)
        found[f"balance 12 x {name}"] = timed(lambda p=population, s=symmetry: ob.balance(p, s), 5)
        found[f"canonicalise 12 x {name}"] = timed(
            lambda p=population, s=symmetry: ob.canonicalise(p, s, scale="balanced", order="max"), 5
        )
    model, x, y = mlp(), torch.randn(500, 64), torch.randint(10, (500,))
    symmetry = ob.discover(model, x[:2])
    population = ob.Population.from_models([mlp() for _ in range(50)])
    a, b = population.member(0), population.member(1)
    data = ((x, y),) if "data" in inspect.signature(ob.barrier).parameters else (x, y)  # 0.1 took two arguments
    found["barrier perceptron"] = timed(lambda: ob.barrier(model, a, b, *data, symmetry=symmetry, points=11), 5)
    found["predict 50 x perceptron"] = timed(lambda: ob.predict(model, population, x), 7)
    found["fit 50 x perceptron"] = timed(lambda: ob.fit(population), 7)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, nargs="?", help="a checkout of the version to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        print(json.dumps(work()))
        return 0
    if arguments.other is None or not (arguments.other / "onebasin").is_dir():
        parser.error(f"expected a checkout with a folder onebasin, found {arguments.other}: make one with git worktree")
    trees = {"before": arguments.other.resolve(), "now": Path(__file__).resolve().parents[1]}
    best: dict[str, dict[str, float]] = {name: {} for name in trees}
    for _ in range(arguments.turns):
        for name, tree in trees.items():
            command = [sys.executable, __file__, "--work"]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            output = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True, cwd=tree
            ).stdout
            for task, seconds in json.loads(output.splitlines()[-1]).items():
                best[name][task] = min(seconds, best[name].get(task, seconds))
    print(f"{'task':<32} {'before':>9} {'now':>9} {'ratio':>6}")
    for task, before in best["before"].items():
        ratio = best["now"][task] / before
        note = "" if ratio <= LIMIT else "  slower"
        print(f"{task:<32} {1e3 * before:7.1f}ms {1e3 * best['now'][task]:7.1f}ms {ratio:6.2f}{note}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
