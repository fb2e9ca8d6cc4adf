"""Everything that a crowd is worth on some data, in one call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from onebasin.assess.classes import (
    comparison_numbers,
    detection_numbers,
    outside_numbers,
    predictive_numbers,
    tempered_numbers,
)
from onebasin.assess.evaluation import Evaluation
from onebasin.assess.gathering import KEPT, gather
from onebasin.assess.intervals import Sampling
from onebasin.assess.values import Noise, value_numbers
from onebasin.calling import Inputs
from onebasin.cluster import Cluster, Needs, Places, cluster_for
from onebasin.errors import InputError, StatisticsWarning
from onebasin.norms import Measured
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.posterior import Posterior
from onebasin.predict.batches import check_targets
from onebasin.predict.drawing import Crowd, networks_of
from onebasin.predict.passing import Options as Passing
from onebasin.predict.passing import needs, stale_statistics
from onebasin.predict.predicting import predict
from onebasin.predict.targets import kind_of_targets

_COPIES = 16  # of the outputs of all members, counted by their bytes: values are looked at in float64
_NO_TEMPERATURE = (
    "no temperature: it is fitted on half of the examples, and all of the {} there are right, so the lowest is the best"
)


class Options(Places, total=False):
    """What `evaluate` may also be told; where the networks run is said as in `Places`.

    Attributes:
        likelihood: "categorical" for class numbers, "bernoulli" for targets 0 or 1 and one logit, "gaussian" for
            values. Default: categorical for whole-number types, gaussian for floats; floats that may be class labels
            are refused, see `onebasin.predict.targets.kind_of_targets`.
        noise: for gaussian: the standard deviation of targets, or "learned" where the model gives means and log
            deviations, which is the default where it does.
        draws: networks drawn from a Posterior, 100 by default.
        statistics: inputs, such as those of training, on which running statistics are measured for each draw, as in
            `predict`; where they are missing, a remark and a warning say so, unless this is False.
        seed: of these draws, of the halves for the temperature, and of the bootstrap; 0 by default.
        bins: of calibration errors, 15 by default.
        resamples: bootstrap draws of the examples, 1,000 by default.
        level: of the bootstrap intervals, 0.95 by default.
        coverage: levels of the predictive intervals of values, (0.5, 0.9, 0.95) by default.
        chunk: networks in one pass, as in `predict`.
        batch: examples in one pass, as in `predict`.
        progress: called with (networks done, networks in all) in each of the passes.
    """

    likelihood: str | None
    noise: Noise
    draws: int
    statistics: Measured
    seed: int
    bins: int
    resamples: int
    level: float
    coverage: Sequence[float]
    chunk: int
    batch: int
    progress: Callable[[int, int], None]


def evaluate(
    model: nn.Module,
    crowd: Crowd,
    data: tuple[Inputs, Tensor],
    *,
    outside: Inputs | None = None,
    reference: Crowd | Tensor | None = None,
    **options: Unpack[Options],
) -> Evaluation:
    """Evaluate the average predictive of a crowd, each number with a bootstrap interval over the examples.

    Classifiers run once over the examples, once over `outside` and once for a reference crowd, and only averages are
    kept: a thousand networks need no more memory than one. Values need all predictions together, members x examples
    x outputs: 1,000 networks on 10,000 examples are 80 MB.

    >>> from onebasin.population import Population
    >>> crowd = Population.from_stacked({"weight": torch.tensor([[[3.0], [0.0]], [[2.0], [0.0]]])})
    >>> inputs, targets = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]), torch.tensor([0, 1, 0, 0])
    >>> found = evaluate(nn.Linear(1, 2, bias=False), crowd, (inputs, targets), outside=torch.zeros(3, 1))
    >>> found.inside["accuracy"].value, found.detection["msp"]["auroc"].value
    (0.75, 1.0)

    Args:
        model: the function; left exactly as it was.
        crowd: a Population, or a Posterior, from which networks are drawn.
        data: (inputs, targets). Inputs are a tensor, a tuple of positional or a dict of keyword inputs.
        outside: foreign inputs, to be told from those of `data`; for classifiers.
        reference: another crowd of the same model, or its average predictive (examples, classes) for these inputs;
            for classifiers. A reference posterior is drawn from with `seed` + 1.
        options: see `Options`.

    Raises:
        InputError: an option is unknown or nothing reads it, targets do not fit, or the networks' outputs are not
            finite.

    Warns:
        StatisticsWarning: draws have running statistics that are not their own; the remarks say so too.
    """
    refuse_unknown(options, Options.__annotations__, "evaluate")
    inputs, targets = data
    targets = torch.as_tensor(targets)
    check_targets(inputs, targets)
    kind = kind_of_targets(targets, options.get("likelihood"), options.get("noise"))
    _refuse_idle(crowd, reference, options)
    if kind == "gaussian" and (outside is not None or reference is not None):
        raise InputError(
            "outside and reference compare class probabilities, found a gaussian likelihood: leave them out"
        )
    question = _Question(model, crowd, inputs, targets, kind, outside, reference)
    crowds = [own for own in (crowd, reference) if isinstance(own, Posterior)]
    notes = tuple(dict.fromkeys(filter(None, (stale_statistics(model, own, inputs, options) for own in crowds))))
    for note in notes:
        warnings.warn(note, StatisticsWarning, stacklevel=2)
    if notes:
        options = {**options, "statistics": False}  # it has been said
    with cluster_for(options, **_needs(question, options)) as cluster:
        found = _values(question, options, cluster) if kind == "gaussian" else _classes(question, options, cluster)
    return replace(found, remarks=(*found.remarks, *notes))


class _Question(NamedTuple):
    """What is to be evaluated."""

    model: nn.Module
    crowd: Crowd
    inputs: Inputs
    targets: Tensor
    kind: str
    outside: Inputs | None
    reference: Crowd | Tensor | None


def _needs(question: _Question, options: Options) -> Needs:
    """The memory of the largest of all passes."""
    model, crowd, inputs = question.model, question.crowd, question.inputs
    members = len(networks_of(crowd, options.get("draws", 100), 0))
    kept = _COPIES * members if question.kind == "gaussian" else KEPT
    runs = [(crowd, inputs)]
    if question.outside is not None:
        runs.append((crowd, question.outside))
    if question.reference is not None and not isinstance(question.reference, Tensor):
        runs.append((question.reference, inputs))
    found = [needs(model, own, examples, kept, options) for own, examples in runs]
    return Needs(each=max(one["each"] for one in found), here=sum(one["here"] for one in found))


def _passing(options: Options, cluster: Cluster) -> Passing:
    """The options of `predict`, with a cluster that is open already."""
    kept = Passing.__annotations__.keys() - Places.__annotations__.keys()
    return cast("Passing", {name: value for name, value in options.items() if name in kept} | {"cluster": cluster})


def _sampling(options: Options) -> tuple[Sampling, dict[str, Any]]:
    """How intervals are made, and how the record says it."""
    sampling = Sampling(options.get("resamples", 1000), options.get("level", 0.95), options.get("seed", 0))
    told: dict[str, Any] = {**sampling._asdict(), "method": "bca"}
    told["resamples"] = told.pop("draws")
    return sampling, told


def _values(question: _Question, options: Options, cluster: Cluster) -> Evaluation:
    sampling, settings = _sampling(options)
    levels, noise = options.get("coverage", (0.5, 0.9, 0.95)), options.get("noise")
    passing = _passing(options, cluster)
    outputs = predict(question.model, question.crowd, question.inputs, output="values", **passing)
    numbers = value_numbers(outputs, question.targets.to(outputs.device), noise, levels, sampling)
    return Evaluation(
        question.kind, len(outputs), len(question.targets), 0, numbers, settings={**settings, "noise": noise}
    )


def _classes(question: _Question, options: Options, cluster: Cluster) -> Evaluation:
    sampling, settings = _sampling(options)
    settings["bins"] = bins = options.get("bins", 15)
    settings["calibration_method"] = "absolute"
    model, crowd, inputs, targets, kind, outside, reference = question
    passing = _passing(options, cluster)
    own = gather(model, crowd, inputs, kind, **passing)
    goals = _class_numbers(targets, kind).to(own.logits.device)
    inside = predictive_numbers(own, goals, bins, sampling)
    temperature, cooled = tempered_numbers(own.log_probabilities, goals, bins, sampling)
    remarks = (_NO_TEMPERATURE.format(len(goals) // 2),) if temperature is None and len(goals) > 1 else ()
    facts: dict[str, Any] = {"settings": settings, "remarks": remarks}
    found = Evaluation(kind, own.members, len(goals), 0, inside, temperature, cooled, **facts)
    if outside is not None:
        foreign = gather(model, crowd, outside, kind, **passing)
        away, told = outside_numbers(foreign, sampling), detection_numbers(own, foreign, sampling)
        found = replace(found, outside_examples=len(foreign.logits), outside=away, detection=told)
    if reference is not None:
        if not isinstance(reference, Tensor):
            passing["seed"] = sampling.seed + 1  # two posteriors should not be compared by the same random numbers
            reference = gather(model, reference, inputs, kind, **passing).probabilities
        found = replace(found, reference=comparison_numbers(own.probabilities, reference, sampling))
    return found


def _refuse_idle(crowd: Crowd, reference: Crowd | Tensor | None, options: Options) -> None:
    """Refuse options that nothing would read."""
    drawn = not all(isinstance(own, Population | Tensor | None) for own in (crowd, reference))
    if options.get("statistics") is not None and not drawn:
        raise InputError(
            "running statistics are measured for networks drawn from posteriors, found statistics= with a population, "
            "whose networks have their own: leave it out"
        )
    if "draws" in options and not drawn:
        raise InputError(
            f"networks are drawn from posteriors only, found draws={options['draws']} with a population, all of whose "
            f"networks are evaluated: leave it out, or take some of them, as population[:{options['draws']}]"
        )


def _class_numbers(targets: Tensor, kind: str) -> Tensor:
    """Targets as class numbers (examples,); 0 and 1 may be stored as floats, in a column."""
    if kind == "bernoulli" and targets.numel() == len(targets) and bool(((targets == 0) | (targets == 1)).all()):
        return targets.reshape(-1).long()
    if kind == "bernoulli":
        raise InputError(
            f"expected one target per example, 0 or 1, found {tuple(targets.shape)} from {float(targets.min()):g} to "
            f"{float(targets.max()):g}: evaluate the outputs one by one"
        )
    return targets
