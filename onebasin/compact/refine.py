"""A posterior moved towards what a crowd predicts: it keeps the predictive, and no longer the spread of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from onebasin.calling import Inputs
from onebasin.cluster import Places, places_in
from onebasin.compact.moving import Free, Moving, Widths
from onebasin.compact.surroundings import surroundings
from onebasin.compact.teacher import Teacher
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.posterior import Posterior
from onebasin.predict.batches import rows_of
from onebasin.predict.forward import check_fits
from onebasin.predict.gradient import Differentiable

Show = Callable[[int, int, str], None]


class Options(Places, total=False):
    """How a posterior is moved.

    The networks of the crowd run where `Places` say. The posterior itself is moved in this process: its steps follow
    one after the other.

    Attributes:
        output: "probabilities" (default) for a model that returns logits of classes on axis 1, or "values".
        steps: of Adam with a cosine schedule. Default: 3,000 to refine, 300 to calibrate.
        draws: networks in a step, half of them mirrored. Default: 64; needs memory for so many networks.
        batch: examples in a step. Default: 250.
        rate: learning rate of log widths, and of means in standard deviations of their tensor. Default: 0.03.
        start: widths begin at this share of the fit. Default: 0.2, because independent noise of full width destroys
            networks.
        noise: add a noisy copy of each input, of so many standard deviations at most; see `surroundings`. Default: 2
            to refine; with 0 the predictive on inputs of another kind is lost. 0 to calibrate.
        mixed: add so many mixtures of two inputs for each input. Default: 4 to refine, 0 to calibrate.
        diversity: weight of the disagreement between networks beside their average predictive. Default: 0.3 to refine,
            0 to calibrate.
        leash: weight of the KL divergence of the marginals from the fit, per weight. Default: 0.
        seed: of draws, batches and noise. Default: 0.
        progress: called with (steps done, steps, text).
    """

    output: str
    steps: int
    draws: int
    batch: int
    rate: float
    start: float
    noise: float
    mixed: int
    diversity: float
    leash: float
    seed: int
    progress: Show


_DEFAULTS: Options = {
    "output": "probabilities",
    "draws": 64,
    "batch": 250,
    "rate": 0.03,
    "start": 0.2,
    "leash": 0.0,
    "seed": 0,
}
# A few numbers per tensor cannot do justice to everything, so calibration is about the inputs alone.
_OF_FORM: dict[str, Options] = {
    "refined": {"steps": 3000, "noise": 2.0, "mixed": 4, "diversity": 0.3},
    "calibrated": {"steps": 300, "noise": 0.0, "mixed": 0, "diversity": 0.0},
}


def refine(
    posterior: Posterior, model: nn.Module, crowd: Population, inputs: Inputs, **options: Unpack[Options]
) -> Posterior:
    """Move mean and widths of a posterior until its draws predict what the crowd predicts on unlabelled inputs.

    Minimised over centre, scale and factor of every component, by Adam, is the mean over inputs x of

        KL(p(x) || q(x)) + diversity |h_p(x) - h_q(x)| + leash KL(marginals || those of the fit) / weights,

    p and q being the average predictives of crowd and draws, h the mean entropy of a network: the second term draws
    the mutual information towards the crowd's. The result is made to keep the predictive and nothing else: its widths
    are not those of the crowd's weights (`provenance["refined"]` says by how much they shrank, and which distance
    remained). Begin with a fit of the aligned crowd; with few steps the start decides, with many it hardly does.

    Args:
        posterior: diagonal or low-rank Gaussians, or a mixture of them, fitted to the aligned crowd.
        model: the function; left exactly as it was.
        crowd: the networks whose predictive is the goal; aligned or not, they compute the same functions.
        inputs: unlabelled examples, such as the training inputs; never those that the result is judged on.
        options: see `Options`.

    Raises:
        InputError: an option is unknown or out of range, or a Gaussian has another shape.
        SpecError: crowd, posterior and model are not of one architecture.
    """
    return _moved("refined", options, posterior, model, crowd, inputs)


def calibrate(
    posterior: Posterior, model: nn.Module, crowd: Population, inputs: Inputs, **options: Unpack[Options]
) -> Posterior:
    """Find one width and one gain for each tensor of a posterior, so that its draws predict what the crowd predicts.

    The lighter form of `refine`: within a tensor, means and standard deviations keep their ratios, and all are
    multiplied by two numbers. (The mean of many networks is shorter than they are, so widths alone leave it unsure.)
    Arguments as there; `provenance["calibrated"]` holds the numbers.
    """
    return _moved("calibrated", options, posterior, model, crowd, inputs)


def _moved(
    form: str, options: Options, posterior: Posterior, model: nn.Module, crowd: Population, inputs: Inputs
) -> Posterior:
    refuse_unknown(options, Options.__annotations__, form)
    chosen: Options = {**_DEFAULTS, **_OF_FORM[form], **options}
    _check(chosen)
    check_fits(model, posterior.mean)
    generator = torch.Generator().manual_seed(chosen["seed"])
    wide = surroundings(inputs, noise=chosen["noise"], mixed=chosen["mixed"], generator=generator)
    places = places_in(options)
    teacher = Teacher.ask(model, crowd, wide, classes=chosen["output"] == "probabilities", **places)
    moving = Moving(posterior, Free if form == "refined" else Widths, chosen["start"])
    with torch.enable_grad():
        distance = _descend(moving, Differentiable(model, *moving.place), teacher, generator, chosen)
    told = {name: value for name, value in chosen.items() if name != "progress" and name not in places}
    facts = {**told, "networks": len(crowd), "distance": distance, "narrowing": moving.narrowing()}
    if form == "calibrated":
        facts["tensors"] = moving.numbers()
    return moving.result({**posterior.provenance, form: facts})


def _descend(
    moving: Moving, function: Differentiable, teacher: Teacher, generator: torch.Generator, chosen: Options
) -> float:
    """Adam with a cosine schedule; returns the mean distance over the last tenth of the steps."""
    steps, count = chosen["steps"], len(teacher)
    optimiser = torch.optim.Adam(moving.parameters, lr=chosen["rate"])
    kept: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = chosen["rate"] * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randperm(count, generator=generator)[: chosen["batch"]]
        networks, weights = moving.draw(chosen["draws"], generator)
        outputs = function(networks, rows_of(teacher.inputs, rows))
        distance = teacher.distance(outputs, weights, rows, chosen["diversity"], mirrored=True)
        loss = distance + chosen["leash"] * moving.leash() if chosen["leash"] else distance
        if not bool(torch.isfinite(loss.detach())):
            raise InputError(
                f"expected finite predictions, found {float(loss.detach())} at step {step}: give a smaller rate, found "
                f"{chosen['rate']:g}, or a smaller start, found {chosen['start']:g}"
            )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        kept.append(float(distance.detach()))
        if "progress" in chosen:
            chosen["progress"](step + 1, steps, f"distance {kept[-1]:.4f}")
    last = kept[-max(1, steps // 10) :]
    return sum(last) / len(last)


def _check(chosen: Options) -> None:
    if chosen["output"] not in ("probabilities", "values"):
        raise InputError(f'expected output "probabilities" or "values", found {chosen["output"]!r}: give one of these')
    least = {
        "steps": 1,
        "draws": 2,
        "batch": 1,
        "rate": 0,
        "start": 0,
        "noise": 0,
        "mixed": 0,
        "diversity": 0,
        "leash": 0,
    }
    strict, whole = {"rate", "start"}, {"steps", "draws", "batch", "mixed"}
    given: dict[str, Any] = dict(chosen)
    for name, bound in least.items():
        value = given[name]
        if name in whole and not isinstance(value, int):
            raise InputError(f"expected {name} to be a whole number, found {value!r}: give an int")
        if not (value > bound if name in strict else value >= bound) or not math.isfinite(value):
            sign = ">" if name in strict else ">="
            raise InputError(f"expected {name} {sign} {bound}, found {value}: give another")
