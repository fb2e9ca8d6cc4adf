"""Networks whose units can be rescaled. Filter response norm and SiLU leave no such freedom, so ResNet-20 is none."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from onebasin.calling import global_seed
from onebasin.examples import optunet
from onebasin.studies.bench import Bench
from onebasin.studies.problem import Problem
from onebasin.studies.symmetry import crowds
from onebasin.studies.symmetry.plan import SymmetryPlan
from onebasin.symmetry import Symmetry, discover


def convnet() -> nn.Sequential:
    """OptuNet for 8 x 8 pixels in a row: the same layers and symmetries with smaller kernels, 168 weights.

    >>> sum(weight.numel() for weight in convnet().parameters())
    168
    """
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *optunet(first=3, pool=2, second=2))


def scaled(bench: Bench[SymmetryPlan]) -> dict[str, Problem]:
    """Networks in words -> with their data: first of the kind that the paper looks at, then a perceptron."""
    perceptron = crowds.problem(bench, "mlp")
    if bench.plan.preset == "full":
        return {"OptuNet": crowds.problem(bench, "optunet"), "perceptron": perceptron}
    with global_seed(0):
        small = convnet().eval()
    return {"small OptuNet": replace(perceptron, model=small), "perceptron": perceptron}


def scales_of(bench: Bench[SymmetryPlan], kind: str, own: Problem) -> Symmetry:
    """What leaves such a network's function unchanged."""
    return bench.once(f"symmetry/scaled/{kind}", lambda: discover(own.model, own.train[0][:2]))
