"""The fidelity of a posterior: does it predict what its networks predict, on inputs and around them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.functional import (
    AnyInputs,
    Call,
    Inputs,
    OutputPart,
    call_arguments,
    examples_in,
    inputs_of,
    measured_of,
    rows_of,
    select_output,
)
from onebasin.parallel import Executor, Progress, executor_for, progress_of
from onebasin.population import Population
from onebasin.posterior.figures import draws_note, fidelity_table
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import Quantity, predict
from onebasin.reporting import Axis, Record, Result, Series, one_panel, result_record

Change = Callable[[Tensor], Tensor]


def augment(inputs: Inputs, *, noise: float, mixed: int, generator: torch.Generator) -> Inputs:
    """The inputs x themselves, a noisy copy of each, and `mixed` copies that are mixtures of two of them.

    >>> given = torch.tensor([[0.0], [1.0]])
    >>> wide = augment(given, noise=2.0, mixed=3, generator=torch.Generator().manual_seed(0))
    >>> wide[0].shape, bool(((wide[0][4:] >= 0) & (wide[0][4:] <= 1)).all())
    (torch.Size([10, 1]), True)

    Noisy: x + noise s u z, with s the standard deviation of the tensor, z standard normal numbers and u uniform in
    (0, 1) for each example, so that copies are near and far. Mixed: u x + (1 - u) x', with x' another input. Tensors
    of whole numbers, such as tokens, are copied as they are; where there are no others, nothing is added.
    """
    call, count = call_arguments(inputs), examples_in(inputs)
    if not any(map(_continuous, (*call[0], *call[1].values()))):
        return inputs
    kinds: list[Change] = [lambda value: value]
    if noise:
        kinds.append(_noisy(count, noise, generator))
    kinds += [_mixed(count, generator) for _ in range(mixed)]
    return _joined(call, kinds)


def perturbed(inputs: Inputs, generator: torch.Generator) -> dict[str, Inputs]:
    """As many inputs of three other kinds; nothing where there are only whole numbers, such as tokens.

    "noisy inputs" and "mixed inputs" are those of `augment` with noise=2 and mixed=1. "uniform noise" is drawn
    between the smallest and the largest number of each tensor: inputs that look like nothing.
    """
    call, count = call_arguments(inputs), examples_in(inputs)
    if not any(map(_continuous, (*call[0], *call[1].values()))):
        return {}
    kinds = {
        "noisy inputs": _noisy(count, 2.0, generator),
        "mixed inputs": _mixed(count, generator),
        "uniform noise": _uniform(generator),
    }
    return {name: _joined(call, [kind]) for name, kind in kinds.items()}


def _joined(call: Call, kinds: list[Change]) -> Inputs:
    """All kinds of copies of every tensor, one below the other."""

    def every(value: object) -> object:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch.cat([kind(value) if _continuous(value) else value for kind in kinds])

    arguments, options = call
    if options:
        return {name: every(value) for name, value in options.items()}
    return tuple(every(value) for value in arguments)


def _noisy(count: int, noise: float, generator: torch.Generator) -> Change:
    near = torch.rand(count, generator=generator, device=generator.device)

    def change(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, device=generator.device).to(value)
        return value + noise * value.std(correction=0) * _per_example(near, value) * drawn

    return change


def _mixed(count: int, generator: torch.Generator) -> Change:
    """One partner and one share for each example, the same for all its tensors."""
    partner = torch.randperm(count, generator=generator, device=generator.device)
    share = torch.rand(count, generator=generator, device=generator.device)

    def change(value: Tensor) -> Tensor:
        part = _per_example(share, value)
        return part * value + (1 - part) * value[partner.to(value.device)]

    return change


def _uniform(generator: torch.Generator) -> Change:
    def change(value: Tensor) -> Tensor:
        drawn = torch.rand(value.shape, generator=generator, device=generator.device).to(value)
        return value.min() + (value.max() - value.min()) * drawn

    return change


def _per_example(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like).reshape(-1, *[1] * (like.dim() - 1))


def _continuous(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()


EXAMPLES = 300  # enough to know an agreement of 0.5 to 0.03, and 0.95 to 0.013
_SINGLE = 8  # networks that are compared with the average of all, one by one


@dataclass(frozen=True, repr=False)
class Fidelity:
    """Closeness of the average prediction of a posterior's draws to that of the networks, on some inputs.

    Attributes:
        examples: how many inputs.
        agreement: share of the inputs with the same most probable class; None for values.
        total_variation: mean over inputs of 1/2 sum_k |p_k - q_k|; None for values.
        rms_difference: root of the mean squared difference of the average values; None for classes.
        single: the agreement (for values the rms difference) of a single network with the average of all, the mean over
            up to 8 of the networks.
        low: the posterior is further from the average of the networks than a single network is, by more than two
            standard errors over the inputs.
    """

    examples: int
    agreement: float | None
    total_variation: float | None
    rms_difference: float | None
    single: float
    low: bool

    def __repr__(self) -> str:
        """One line."""
        if self.agreement is None:
            return f"rms difference {self.rms_difference:.4g}, of a single network {self.single:.4g}"
        return (
            f"agreement {self.agreement:.4f}, total variation {self.total_variation:.4f}; agreement of a single "
            f"network {self.single:.4f}"
        )

    def warning(self, where: str) -> str | None:
        """A sentence if `low`, else None; `where` tells on which inputs."""
        if not self.low:
            return None
        numbers = (
            f"agree with the networks on {100 * self.agreement:.1f} % of {self.examples:,} {where}, less than a single "
            f"one of the networks ({100 * self.single:.1f} %)"
            if self.agreement is not None
            else f"are {self.rms_difference:.4g} (rms) away from the average of the networks on {self.examples:,} "
            f"{where}, further than a single one of the networks ({self.single:.4g})"
        )
        return (
            f"draws of this posterior {numbers}, by more than two standard errors: one stored network would predict "
            "better. Refine it, keep more directions (low-rank) or means (mixture), or keep some of the networks"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return asdict(self)


@dataclass(frozen=True, repr=False)
class Fidelities(Result, Mapping[str, Fidelity]):
    """A mapping from a kind of inputs to the fidelity on them.

    Attributes:
        kinds: "inputs", and what lies around them.
        draws: networks drawn from the posterior; None where that is not known.
        seed: seed of the draws, of the choice of the inputs and of the noise; None where that is not known.
    """

    kinds: Mapping[str, Fidelity]
    draws: int | None = None
    seed: int | None = None

    def __getitem__(self, kind: str) -> Fidelity:
        return self.kinds[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers of each kind."""
        return {kind: own.to_dict() for kind, own in self.kinds.items()}

    def record(self) -> Record:
        """A table, and bars of the posterior beside those of a single network."""
        kind, first = next(iter(self.kinds.items()))
        classes = first.agreement is not None
        own = tuple(each.agreement if classes else each.rms_difference for each in self.kinds.values())
        single_network = tuple(each.single for each in self.kinds.values())
        places = tuple(range(len(self.kinds)))
        series = (Series("draws of the posterior", places, own), Series("a single network", places, single_network))
        answer = f"On {first.examples:,} {kind}: {first}."
        axis = Axis("", names=tuple(self.kinds))
        what = "agreement with the average of all networks" if classes else "rms difference from the average"
        return result_record(
            "fidelity",
            "Fidelity of a posterior to its networks",
            (answer, *warnings_of(self)),
            (
                fidelity_table(self.to_dict(), note=draws_note(self.draws, self.seed)),
                one_panel(
                    "bars", "Does it predict what its networks predict?", answer, "bars", axis, what, series=series
                ),
            ),
            values=self.to_dict(),
        )


def fidelity(
    model: nn.Module,
    posterior: Posterior,
    population: Population,
    inputs: AnyInputs,
    *,
    statistics: AnyInputs = None,
    quantity: Quantity = "probabilities",
    output: OutputPart = None,
    augment: bool = True,
    examples: int = EXAMPLES,
    draws: int = 100,
    seed: int = 0,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Fidelities:
    """Compare the average prediction of draws with that of networks, on inputs and on what lies around them.

    Args:
        model: the function; left exactly as it was.
        posterior: drawn from.
        population: the networks that it was fitted to, aligned or not.
        inputs: as in `predict`.
        statistics: inputs on which running statistics are measured for each draw, as in `predict`.
        quantity: "probabilities" for a model that returns logits of classes on axis 1, else "values".
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        augment: also compare on noisy copies, on mixtures of two inputs and on uniform noise.
        examples: of more inputs so many are chosen at random.
        draws: networks drawn from the posterior.
        seed: seed of the draws, of the choice and of the noise.
        progress: True for a line on stderr with the time left, or a function that is called with (networks done,
            networks in all, on which inputs).
        workers: processes that run the networks.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Returns:
        "inputs", and with `augment` "noisy inputs", "mixed inputs" and "uniform noise", as far as the inputs have
        floating-point tensors.
    """
    model = select_output(model, output)
    inputs, statistics = inputs_of(inputs, model), measured_of(statistics, model)
    kinds: dict[str, Inputs] = {"inputs": some_of(inputs, examples, seed)}
    if augment:
        kinds |= perturbed(kinds["inputs"], torch.Generator().manual_seed(seed))
    progress = progress_of(progress)
    few = population[:: max(1, len(population) // _SINGLE)][:_SINGLE]
    result = {}
    with executor_for(workers, executor) as opened:
        given: dict[str, Any] = {"quantity": quantity, "executor": opened}
        for name, kind in kinds.items():
            given["progress"] = named(progress, f"comparing on {name}")
            goal = predict(model, population, kind, average=True, **given)
            mean = predict(model, posterior, kind, average=True, draws=draws, seed=seed, statistics=statistics, **given)
            single = predict(model, few, kind, **given).double()
            result[name] = _compared(mean, goal, single, classes=quantity == "probabilities")
    return Fidelities(result, draws, seed)


def named(progress: Progress | None, text: str) -> Progress | None:
    """The same progress under another text."""
    return None if progress is None else lambda done, total, _: progress(done, total, text)


def some_of(inputs: Inputs, most: int, seed: int) -> Inputs:
    """The inputs, or so many of them, chosen at random, in their order."""
    count = examples_in(inputs)
    if count <= most:
        return inputs
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values
    arguments, named = rows_of(call_arguments(inputs), chosen)
    return named or arguments


def _compared(mean: Tensor, goal: Tensor, single: Tensor, *, classes: bool) -> Fidelity:
    """The numbers for averages (examples, ...) and for networks (members, examples, ...)."""
    count = len(goal)
    if classes:
        right = (mean.argmax(1) == goal.argmax(1)).double().reshape(count, -1).mean(1)
        alone = (single.argmax(2) == goal.argmax(1)).double().mean(0).reshape(count, -1).mean(1)
        variation = float(((mean - goal).abs().sum(1) / 2).mean())
        return Fidelity(count, float(right.mean()), variation, None, float(alone.mean()), _above(alone - right))
    squared = (mean - goal).square().reshape(count, -1).mean(1)
    each = (single - goal).square().reshape(len(single), count, -1).mean(2)
    rms = float(squared.mean().sqrt())
    return Fidelity(count, None, None, rms, float(each.mean(1).sqrt().mean()), _above(squared - each.mean(0)))


def _above(gap: Tensor) -> bool:
    """Whether the mean of a difference (examples,) is above zero by more than two standard errors."""
    error = float(gap.std() / len(gap) ** 0.5) if len(gap) > 1 else 0.0
    return float(gap.mean()) > 2 * error


def warnings_of(fidelities: Mapping[str, Fidelity]) -> list[str]:
    """One sentence for each kind of inputs on which a single network would predict better than the posterior."""
    return [text for name, numbers in fidelities.items() if (text := numbers.warning(name)) is not None]
