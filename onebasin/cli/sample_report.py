"""The report at the end of ``sample``: diagnostics, mixing, and how well the draws fit the data together."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.cli.tables import short
from onebasin.functional import Inputs, kind_of_targets, predictions
from onebasin.inference import MIXED, bernoulli, categorical, choose, diagnose, learned_gaussian
from onebasin.population import Population
from onebasin.reporting import table

_EXAMPLES, _MEMBERS, _VALUES = 1000, 100, 20_000_000  # what is cheap to compute, and to hold
_ENOUGH, _FUNCTIONS = 20, 100  # draws per chain to judge mixing by, and examples to judge it on
_CHAINS = ("stuck", "still_falling")  # numbers of chains
_NAMES = {
    "acceptance": "acceptance probability",
    "divergences": "divergences per chain",
    "exp_energy_change": "exp(-dH), 1 if right",
    "ebfmi": "E-BFMI, low below 0.3",
    "final_loss": "loss per example at the end",
    "gradient_norm": "norm of its gradient",
    "loss_fall": "its fall, trained as long again",
    "loss_noise": "how much of this may be noise",
}


def diagnostics_table(diagnostics: Mapping[str, Any]) -> str:
    """The diagnostics of a run over its chains; empty where the method has none.

    >>> print(diagnostics_table({"step_size": [0.01, 0.03], "stuck": [1]}))
               mean  lowest  highest
    --------------------------------
    step size  0.02    0.01     0.03
    chains that hardly move: 1
    """
    rows = [_row(name, values) for name, values in diagnostics.items() if name not in _CHAINS and _numbers(values)]
    parts = [table([("", "mean", "lowest", "highest"), *rows])] if rows else []
    if diagnostics.get("stuck"):
        parts.append(f"chains that hardly move: {', '.join(map(str, diagnostics['stuck']))}")
    parts += [f"note: {text}" for text in diagnostics.get("notes", [])]
    return "\n".join(parts)


def mixing_sentence(model: nn.Module, population: Population, inputs: Inputs) -> str:
    """R-hat and effective sample size of what the chains compute, where there are enough draws to say so."""
    chains = 1 if population.chain is None else len(population.chain.unique())
    if chains < 2 or len(population) < _ENOUGH * chains:
        return ""
    few: Inputs = tree_map(lambda leaf: leaf[:_FUNCTIONS], inputs)
    mixing = diagnose(model, population, few, weights=False).functions
    if mixing is None or not mixing.quantities:
        return ""
    return (
        f"R-hat of outputs: worst {mixing.worst_rhat:.2f}, median {mixing.median_rhat:.2f} (mixed if below {MIXED}); "
        f"effective draws: least {mixing.least_bulk:.0f}, median {mixing.median_bulk:.0f} of {len(population):,}"
    )


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(isinstance(value, int | float) for value in values)


def _row(name: str, values: list[float]) -> tuple[str, str, str, str]:
    label = _NAMES.get(name, name.replace("_", " "))
    mean = short(math.fsum(values) / len(values))
    return (label, mean, short(min(values)), short(max(values))) if len(values) > 1 else (label, mean, "", "")


def fit_sentence(
    model: nn.Module, population: Population, data: tuple[Inputs, Tensor], likelihood: Any, noise: Any
) -> str:
    """Accuracy or RMSE of the pooled prediction, and log mean_m p(y | x, theta_m) averaged over the examples.

    At most 1,000 examples and 100 networks are looked at; `likelihood` and `noise` are those of the run.
    """
    inputs: Inputs = tree_map(lambda leaf: leaf[:_EXAMPLES], data[0])
    targets = data[1][:_EXAMPLES]
    size = predictions(model, population[:1], inputs).numel()
    members = max(1, min(len(population), _MEMBERS, _VALUES // size))
    chosen = torch.linspace(0, len(population) - 1, members).round().long()
    outputs = predictions(model, population[chosen], inputs)
    goals = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    kind = kind_of_targets(data[1], likelihood, noise)
    density = choose(kind, noise, outputs[0], goals)
    each = torch.stack([density(one, goals).double() for one in outputs])  # (members, examples)
    pooled = float((each.logsumexp(0) - math.log(members)).mean())
    right = _rightness(outputs, goals, density)
    return f"{right}, mean log density {short(pooled)}, on {len(goals):,} training examples"


def _rightness(outputs: Tensor, targets: Tensor, density: Any) -> str:
    """Accuracy or RMSE of the mean prediction of outputs (members, examples, ...)."""
    if density is categorical:
        return _accuracy(outputs.softmax(2).mean(0).argmax(1) == targets)
    if density is bernoulli:
        return _accuracy((outputs.sigmoid().mean(0) > 0.5).reshape(targets.shape) == (targets > 0.5))
    mean = outputs.mean(0)
    if density is learned_gaussian:
        mean = mean.chunk(2, dim=1)[0]
    return f"RMSE {short(float((mean.reshape(targets.shape) - targets).double().square().mean().sqrt()))}"


def _accuracy(right: Tensor) -> str:
    return f"accuracy {100 * float(right.double().mean()):.1f} %"
