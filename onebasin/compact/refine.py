"""A posterior moved towards what a crowd predicts: it keeps the predictive, and no longer the spread of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
from torch import nn

from onebasin.calling import Inputs, call_arguments, examples_in, rows_of
from onebasin.cluster import Places, places_in
from onebasin.compact.fidelity import fidelity
from onebasin.compact.moving import Free, Moving, Widths
from onebasin.compact.surroundings import surroundings
from onebasin.compact.teacher import Teacher
from onebasin.errors import InputError
from onebasin.norms import Measured, norms_used
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.posterior import Posterior
from onebasin.predict.forward import check_fits
from onebasin.predict.gradient import Differentiable
from onebasin.predict.predicting import Output

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
        statistics: inputs on which running statistics of norms are measured for each draw; False leaves them at the
            averages that the posterior holds. Default: the inputs that the posterior is moved on.
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
    statistics: Measured
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
    remained; under "fidelity" how well draws agree with the crowd on the inputs, on noisy and mixed ones and on uniform
    noise: few inputs say little about what lies around them). Begin with a fit of the aligned crowd; with few steps the
    start decides, with many it hardly does.

    Networks with running statistics get those of each draw in every step, and need them when they are drawn. With
    `statistics=False` the posterior is moved with the averages that it holds, which are its constants from then on:
    draws need no data.

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
    norms = norms_used(model, posterior.mean, inputs, constant=posterior.constant_statistics)
    asked = options.get("statistics")
    statistics: Measured = False if asked is False or not norms else inputs if asked is None else asked
    with torch.enable_grad():
        function = Differentiable(model, *moving.place, constant=posterior.constant_statistics)
        distance = _descend(moving, function, teacher, generator, chosen, statistics)
    silent = {"progress", "statistics", *places}
    facts: dict[str, Any] = {name: value for name, value in chosen.items() if name not in silent}
    facts |= {"networks": len(crowd), "distance": distance, "narrowing": moving.narrowing()}
    if norms:
        facts["statistics"] = "averages of the networks" if statistics is False else "measured for each draw"
    if form == "calibrated":
        facts["tensors"] = moving.numbers()
    told = {**posterior.provenance, form: facts}
    if norms and statistics is False:
        told["constant_statistics"] = sorted({*posterior.constant_statistics, *norms})
    found = moving.result(told)
    close = fidelity(
        model,
        found,
        crowd,
        inputs,
        statistics=statistics,
        output=cast("Output", chosen["output"]),
        seed=chosen["seed"] + 1,  # other noise than that of the descent
        **places,
    )
    facts["fidelity"] = {name: own.to_json() for name, own in close.items()}
    return found


def _descend(
    moving: Moving,
    function: Differentiable,
    teacher: Teacher,
    generator: torch.Generator,
    chosen: Options,
    statistics: Measured,
) -> float:
    """Adam with a cosine schedule; returns the mean distance over the last tenth of the steps.

    With `statistics`, a batch of these inputs gives each network of a step the running statistics of its norms.
    """
    steps, count = chosen["steps"], len(teacher)
    own = None if statistics is None or statistics is False else call_arguments(statistics)
    examples = 0 if own is None else examples_in(own[0] + tuple(own[1].values()))
    optimiser = torch.optim.Adam(moving.parameters, lr=chosen["rate"])
    kept: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = chosen["rate"] * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randperm(count, generator=generator)[: chosen["batch"]]
        networks, weights = moving.draw(chosen["draws"], generator)
        seen = None
        if own is not None:
            seen = rows_of(own, torch.randperm(examples, generator=generator)[: chosen["batch"]])
        outputs = function(networks, rows_of(teacher.inputs, rows), seen)
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
