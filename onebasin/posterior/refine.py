"""A posterior moved towards what a population predicts, at the expense of the spread of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, Unpack, cast

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, check_options
from onebasin.functional import (
    Call,
    Differentiable,
    Inputs,
    Measured,
    call_arguments,
    check_fits,
    examples_in,
    norms_used,
    rows_of,
)
from onebasin.parallel import ExecutionOptions, execution_options_of
from onebasin.population import Population
from onebasin.posterior.fidelity import fidelity, surroundings
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank, standard_normal
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predictive import Output, summarise
from onebasin.state import State

# ----------------------------------------------------------------------
# What a population predicts on some inputs, as a goal for a posterior that shall predict the same.


_LEAST = 1e-12  # of a probability or a variance under a logarithm


@dataclass(frozen=True, eq=False)
class Teacher:
    """The average predictive of a population and how much its members disagree.

    Attributes:
        inputs: positional and keyword arguments, one example per row of every tensor.
        mean: the average prediction (examples, ...): probabilities, or values.
        spread: the mean entropy of the members (examples, ...), or the standard deviation of their values.
        classes: whether predictions are probabilities.
    """

    inputs: Call
    mean: Tensor
    spread: Tensor
    classes: bool

    @classmethod
    def ask(
        cls,
        model: nn.Module,
        population: Population,
        inputs: Inputs,
        *,
        classes: bool,
        **places: Unpack[ExecutionOptions],
    ) -> Teacher:
        """Run all networks of the population over the inputs; `places` say where."""
        found = summarise(model, population, inputs, output="probabilities" if classes else "values", **places)
        spread = found.expected_entropy if classes else found.variance(correction=0).sqrt()
        assert spread is not None
        return cls(call_arguments(inputs), found.mean, spread, classes)

    def __len__(self) -> int:
        return examples_in(self.inputs[0] + tuple(self.inputs[1].values()))

    def distance(
        self, outputs: Tensor, weights: Tensor, rows: Tensor, diversity: float, *, mirrored: bool = False
    ) -> Tensor:
        """How far networks are from the goal on some of the inputs.

        Classes: mean over examples of KL(average predictive of the population || that of the networks)
        + diversity |mean entropy of the population - that of the networks|, in nats.
        Values: mean squared differences of mean and of standard deviation, over the mean variance of the population.

        Args:
            outputs: of the networks on these inputs, (members, batch, ...).
            weights: of the networks in averages (members,), sum 1.
            rows: the numbers of the inputs, (batch,).
            diversity: how much the second term counts.
            mirrored: the networks are a sample in mirrored pairs. The logarithm of an average of few is too small on
                average, by var / (2 q^2) to second order, which would punish networks for disagreeing: add it.
        """
        mean, spread = (goal[rows].to(outputs) for goal in (self.mean, self.spread))
        if not self.classes:
            return self._values(outputs, weights, mean, spread, diversity)
        logs = outputs.log_softmax(2)
        shape = (-1, *[1] * (outputs.dim() - 1))
        average = torch.logsumexp(logs + weights.log().reshape(shape), 0)
        if mirrored:
            average = average + _missing(logs, weights)
        gap = (torch.xlogy(mean, mean.clamp(min=_LEAST)) - mean * average).sum(1).mean()
        entropy = torch.einsum("m,m...->...", weights, -(logs.exp() * logs).sum(2))
        return gap + diversity * (entropy - spread).abs().mean()

    def _values(self, outputs: Tensor, weights: Tensor, mean: Tensor, spread: Tensor, diversity: float) -> Tensor:
        average = torch.einsum("m,m...->...", weights, outputs)
        variance = torch.einsum("m,m...->...", weights, (outputs - average).square())
        unit = spread.square().mean().clamp(min=_LEAST)
        gap = (average - mean).square().mean() / unit
        return gap + diversity * ((variance + _LEAST * unit).sqrt() - spread).square().mean() / unit


def _missing(logs: Tensor, weights: Tensor) -> Tensor:
    """What the logarithm of the average of mirrored pairs lacks on average, (batch, classes, ...).

    With q = sum_k w_k p_k over pairs, E[log q] = log E[q] - var(q) / (2 q^2) + ..., and var(q) is estimated by
    sum_k w_k^2 (p_k - q)^2 n / (n - 1). At most about 1/2, where one pair of many is all there is.
    """
    pairs, own = logs.exp().unflatten(0, (-1, 2)).mean(1), weights.unflatten(0, (-1, 2)).sum(1)
    count = len(own)
    if count < 2:
        return torch.zeros_like(logs[0])
    mean = torch.einsum("m,m...->...", own, pairs)
    variance = torch.einsum("m,m...->...", own.square(), (pairs - mean).square()) * count / (count - 1)
    return variance / (2 * mean.square().clamp(min=_LEAST**2))


# ----------------------------------------------------------------------
# A posterior whose numbers can be moved by gradient: draws are a differentiable function of a few free tensors.


@dataclass(frozen=True, eq=False)
class Bell:
    """N(centre, diag(scale^2) + factor factor^T): what diagonal and low-rank Gaussians have in common.

    Attributes:
        centre: (D,).
        scale: (D,), from zero up.
        factor: (D, K), K may be 0.
    """

    centre: Tensor
    scale: Tensor
    factor: Tensor

    @classmethod
    def of(cls, gaussian: Gaussian) -> Bell:
        """Take a Gaussian apart, in float32 or wider."""
        shape = gaussian.shape
        if not isinstance(shape, Diagonal | LowRank):
            raise InputError(
                f"expected diagonal or low-rank Gaussians, found a {shape.kind} one: fit one of these to draws"
            )
        dtype = torch.promote_types(gaussian.centre.dtype, torch.float32)
        factor = shape.factor if isinstance(shape, LowRank) else shape.scale.new_zeros(shape.size, 0)
        return cls(*(tensor.detach().to(dtype) for tensor in (gaussian.centre, shape.scale, factor)))

    def gaussian(self, like: Gaussian) -> Gaussian:
        """Put it together again, in the dtypes of `like`."""
        scale = self.scale.detach().to(like.shape.std().dtype)
        if not self.factor.shape[1]:
            return Gaussian(self.centre.detach().to(like.centre.dtype), Diagonal(scale))
        return Gaussian(self.centre.detach().to(like.centre.dtype), LowRank(scale, self.factor.detach().to(scale)))

    def variance(self) -> Tensor:
        """Of each weight, (D,)."""
        return self.scale.square() + self.factor.square().sum(1)

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Vectors (count, D), count even; each second one mirrors the one before: their mean is the centre."""
        half = count // 2
        own = standard_normal((half, len(self.scale)), self.scale, generator)
        along = standard_normal((half, self.factor.shape[1]), self.factor, generator)
        offset = self.scale * own + along @ self.factor.T
        return torch.stack([self.centre + offset, self.centre - offset], 1).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Tensors:
    """The tensors whose weights the flat vector holds.

    Attributes:
        index: number of the tensor that a weight belongs to, int64 (D,).
        unit: root mean square standard deviation, within and between components, of the weights of each tensor.
    """

    index: Tensor
    unit: Tensor


class Free:
    """Every number moves: centre + unit u, scale e^v, factor + unit t.

    `unit` is the root mean square standard deviation of the weights of a tensor, so that one learning rate fits
    tensors of different sizes. Weights whose scale is zero keep it.
    """

    def __init__(self, start: Bell, tensors: Tensors, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.unit = start, tensors.unit[tensors.index]
        self.shift = torch.zeros_like(start.centre).requires_grad_()
        self.width = torch.full_like(start.scale, share).log_().requires_grad_()
        self.turn = torch.zeros_like(start.factor).requires_grad_()
        self.share = share

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        return [self.shift, self.width, self.turn]

    def pool(self, other: Free) -> None:
        """Have one spread with another from now on."""
        self.width, self.turn = other.width, other.turn

    def bell(self) -> Bell:
        """The Gaussian at the present values."""
        start = self.start
        factor = self.share * start.factor + self.unit[:, None] * self.turn
        return Bell(start.centre + self.unit * self.shift, start.scale * self.width.exp(), factor)


class Widths:
    """Two numbers per tensor move: scale and factor times e^v, centre times e^g."""

    def __init__(self, start: Bell, tensors: Tensors, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.index = start, tensors.index
        self.width = torch.full_like(tensors.unit, share).log_().requires_grad_()
        self.gain = torch.zeros_like(tensors.unit).requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        return [self.width, self.gain]

    def pool(self, other: Widths) -> None:
        """Have one spread with another from now on."""
        self.width = other.width

    def bell(self) -> Bell:
        """The Gaussian at the present values."""
        width, gain = self.width.exp()[self.index], self.gain.exp()[self.index]
        return Bell(self.start.centre * gain, self.start.scale * width, self.start.factor * width[:, None])


Part = TypeVar("Part", Free, Widths)


class RefinedParameters:
    """A mixture of such Gaussians with fixed weights, and networks drawn from it with a gradient.

    Attributes:
        posterior: where it began.
        weights: of the components, (M,).
    """

    def __init__(self, posterior: Posterior, kind: type[Free] | type[Widths], share: float) -> None:
        """Take the components apart, and begin at a share of their widths."""
        self.posterior = posterior
        layout, deviations = posterior.layout, posterior.std
        self.first = [Bell.of(component) for component in posterior.components]
        dtype, device = self.first[0].centre.dtype, self.first[0].centre.device
        index = torch.repeat_interleave(torch.arange(len(layout.sizes)), torch.tensor(layout.sizes)).to(device)
        units = [deviations[name].double().square().mean().sqrt() for name in layout.names]
        tensors = Tensors(index, torch.stack(units).to(device=device, dtype=dtype))
        self.parts: Sequence[Free | Widths] = (
            _parts(Free, self.first, tensors, share) if kind is Free else _parts(Widths, self.first, tensors, share)
        )
        self.weights = posterior.weights.to(device=device, dtype=dtype)
        self._rest = [{name: _wide(value, dtype) for name, value in rest.items()} for rest in posterior.rest]

    @property
    def parameters(self) -> list[Tensor]:
        """What an optimiser moves."""
        every = [tensor for part in self.parts for tensor in part.parameters if tensor.numel()]
        return list({id(tensor): tensor for tensor in every}.values())

    @property
    def place(self) -> tuple[torch.device, torch.dtype]:
        """Where networks are drawn, and how wide."""
        return self.weights.device, self.weights.dtype

    def draw(self, count: int, generator: torch.Generator) -> tuple[State, Tensor]:
        """Networks (n, *shape) and the weight (n,) of each in an average.

        All components are drawn equally often; networks 2 k and 2 k + 1 are mirror images.
        """
        each = 2 * max(1, count // (2 * len(self.parts)))
        flat = torch.cat([part.bell().draws(each, generator) for part in self.parts])
        rest = {
            name: torch.stack([own[name] for own in self._rest]).repeat_interleave(each, 0)
            for name in self.posterior.layout.others
        }
        return self.posterior.layout.laid_out(flat, rest), self.weights.repeat_interleave(each) / each

    def leash(self) -> Tensor:
        """KL divergence of the marginals from where they began, mean over weights and components.

        With r = std / first std: ((centre - first centre)^2 / first variance + r^2 - 1) / 2 - log r; weights without
        spread are left out.
        """
        total = self.weights.new_zeros(())
        for weight, part, first in zip(self.weights, self.parts, self.first, strict=True):
            now, variance = part.bell(), first.variance()
            free = (variance > 0) & (now.variance() > 0)
            if not bool(free.any()):
                continue
            ratio = now.variance()[free] / variance[free]
            gap = (now.centre - first.centre)[free].square() / variance[free]
            total = total + weight * (gap + ratio - 1 - ratio.log()).mean() / 2
        return total

    def result(self, provenance: dict[str, object]) -> Posterior:
        """The posterior at the present values."""
        pairs = zip(self.parts, self.posterior.components, strict=True)
        components = tuple(part.bell().gaussian(like) for part, like in pairs)
        return replace(self.posterior, components=components, provenance=provenance)

    def numbers(self) -> list[dict[str, list[float]]]:
        """For each component, tensor -> [width, gain] where there are only these."""
        names, widths = self.posterior.layout.names, [part for part in self.parts if isinstance(part, Widths)]
        pairs = [torch.stack(part.parameters, 1).exp().tolist() for part in widths]
        return [dict(zip(names, own, strict=True)) for own in pairs]

    def narrowing(self) -> float:
        """Median over weights with spread of std / first std."""
        ratios = []
        for part, first in zip(self.parts, self.first, strict=True):
            variance = first.variance()
            ratios.append((part.bell().variance().detach()[variance > 0] / variance[variance > 0]).sqrt())
        every = torch.cat(ratios)
        return float(every.median()) if len(every) else 1.0


def _parts(kind: type[Part], bells: list[Bell], tensors: Tensors, share: float) -> list[Part]:
    """One for each component; a pooled spread stays one."""
    parts = [kind(bell, tensors, share) for bell in bells]
    for part, bell in zip(parts[1:], bells[1:], strict=True):
        if torch.equal(bell.scale, bells[0].scale) and torch.equal(bell.factor, bells[0].factor):
            part.pool(parts[0])
    return parts


def _wide(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


# ----------------------------------------------------------------------
# A posterior moved towards what a population predicts: it keeps the predictive, and no longer the spread of the weig


Show = Callable[[int, int, str], None]


class RefineOptions(ExecutionOptions, total=False):
    """How a posterior is moved.

    Networks run where `ExecutionOptions` say. The posterior itself is moved in this process, as its steps follow one
    after the other.

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


_DEFAULTS: RefineOptions = {
    "output": "probabilities",
    "draws": 64,
    "batch": 250,
    "rate": 0.03,
    "start": 0.2,
    "leash": 0.0,
    "seed": 0,
}
# A few numbers per tensor cannot do justice to everything, so calibration is about the inputs alone.
_OF_FORM: dict[str, RefineOptions] = {
    "refined": {"steps": 3000, "noise": 2.0, "mixed": 4, "diversity": 0.3},
    "calibrated": {"steps": 300, "noise": 0.0, "mixed": 0, "diversity": 0.0},
}


def refine(
    posterior: Posterior, model: nn.Module, population: Population, inputs: Inputs, **options: Unpack[RefineOptions]
) -> Posterior:
    """Move mean and widths of a posterior until its draws predict what the population predicts on unlabelled inputs.

    Minimised over centre, scale and factor of every component, by Adam, is the mean over inputs x of

        KL(p(x) || q(x)) + diversity |h_p(x) - h_q(x)| + leash KL(marginals || those of the fit) / weights,

    p and q being the average predictives of population and draws, h the mean entropy of a network: the second term
    draws the mutual information towards the population's. The result is made to keep the predictive and nothing else:
    its widths are not those of the population's weights (`provenance["refined"]` says by how much they shrank, and
    which distance remained; under "fidelity" how well draws agree with the population on the inputs, on noisy and
    mixed ones and on uniform noise: few inputs say little about what lies around them). Begin with a fit of the
    aligned population; with few steps the start decides, with many it hardly does.

    Networks with running statistics get those of each draw in every step, and need them when they are drawn. With
    `statistics=False` the posterior is moved with the averages that it holds, which are its constants from then on:
    draws need no data.

    Args:
        posterior: diagonal or low-rank Gaussians, or a mixture of them, fitted to the aligned population.
        model: the function; left exactly as it was.
        population: the networks whose predictive is the goal; aligned or not, they compute the same functions.
        inputs: unlabelled examples, such as the training inputs; never those that the result is judged on.
        options: see `Options`.

    Raises:
        InputError: an option is unknown or out of range, or a Gaussian has another shape.
        SpecError: population, posterior and model are not of one architecture.
    """
    return _moved("refined", options, posterior, model, population, inputs)


def calibrate(
    posterior: Posterior, model: nn.Module, population: Population, inputs: Inputs, **options: Unpack[RefineOptions]
) -> Posterior:
    """Find one width and one gain for each tensor of a posterior, so that its draws predict as the population.

    The lighter form of `refine`: within a tensor, means and standard deviations keep their ratios, and all are
    multiplied by two numbers. (The mean of many networks is shorter than they are, so widths alone leave it unsure.)
    Arguments as there; `provenance["calibrated"]` holds the numbers.
    """
    return _moved("calibrated", options, posterior, model, population, inputs)


def _moved(
    form: str, options: RefineOptions, posterior: Posterior, model: nn.Module, population: Population, inputs: Inputs
) -> Posterior:
    check_options(options, RefineOptions.__annotations__, form)
    chosen: RefineOptions = {**_DEFAULTS, **_OF_FORM[form], **options}
    _check(chosen)
    check_fits(model, posterior.mean)
    generator = torch.Generator().manual_seed(chosen["seed"])
    wide = surroundings(inputs, noise=chosen["noise"], mixed=chosen["mixed"], generator=generator)
    places = execution_options_of(options)
    teacher = Teacher.ask(model, population, wide, classes=chosen["output"] == "probabilities", **places)
    moving = RefinedParameters(posterior, Free if form == "refined" else Widths, chosen["start"])
    norms = norms_used(model, posterior.mean, inputs, constant=posterior.constant_statistics)
    asked = options.get("statistics")
    statistics: Measured = False if asked is False or not norms else inputs if asked is None else asked
    with torch.enable_grad():
        function = Differentiable(model, *moving.place, constant=posterior.constant_statistics)
        distance = _descend(moving, function, teacher, generator, chosen, statistics)
    silent = {"progress", "statistics", *places}
    facts: dict[str, Any] = {name: value for name, value in chosen.items() if name not in silent}
    facts |= {"networks": len(population), "distance": distance, "narrowing": moving.narrowing()}
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
        population,
        inputs,
        statistics=statistics,
        output=cast("Output", chosen["output"]),
        seed=chosen["seed"] + 1,  # other noise than that of the descent
        **places,
    )
    facts["fidelity"] = {name: own.to_json() for name, own in close.items()}
    return found


def _descend(
    moving: RefinedParameters,
    function: Differentiable,
    teacher: Teacher,
    generator: torch.Generator,
    chosen: RefineOptions,
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


def _check(chosen: RefineOptions) -> None:
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
