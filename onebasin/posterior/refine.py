"""Posteriors moved by gradient until their draws predict what a population predicts.

They keep the predictive, and no longer the standard deviations of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import (
    AnyInputs,
    Call,
    Differentiable,
    Inputs,
    Measured,
    OutputPart,
    call_arguments,
    check_fits,
    examples_in,
    inputs_of,
    measured_of,
    norms_used,
    rows_of,
    select_output,
)
from onebasin.parallel import Executor, Progress, progress_of
from onebasin.population import Population
from onebasin.posterior.fidelity import augment, fidelity, named
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank, standard_normal
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.predict import Predictive, PredictOptions, Quantity
from onebasin.state import State

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
        progress: Progress | None = None,
        workers: int | None = None,
        executor: str | Executor | None = None,
    ) -> Teacher:
        """Run all networks of the population over the inputs."""
        options = PredictOptions(progress=progress, workers=workers, executor=executor)
        quantity: Quantity = "probabilities" if classes else "values"
        predictive = Predictive.of(model, population, inputs, options, quantity=quantity)
        spread = predictive.expected_entropy if classes else predictive.variance(correction=0).sqrt()
        return cls(call_arguments(inputs), predictive.mean, spread, classes)

    def __len__(self) -> int:
        return examples_in(self.inputs[0] + tuple(self.inputs[1].values()))

    def distance(
        self, outputs: Tensor, weights: Tensor, rows: Tensor, diversity: float, *, mirrored: bool = False
    ) -> Tensor:
        """Distance of the predictions of networks from the goal on some of the inputs.

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
    """The bias of the logarithm of the average of mirrored pairs, with the sign changed, (batch, classes, ...).

    With q = sum_k w_k p_k over pairs, E[log q] = log E[q] - var(q) / (2 q^2) + ..., and var(q) is estimated by
    sum_k w_k^2 (p_k - q)^2 n / (n - 1). At most about 1/2, where one pair of many is all there is.
    """
    pairs, shares = logs.exp().unflatten(0, (-1, 2)).mean(1), weights.unflatten(0, (-1, 2)).sum(1)
    count = len(shares)
    if count < 2:
        return torch.zeros_like(logs[0])
    mean = torch.einsum("m,m...->...", shares, pairs)
    variance = torch.einsum("m,m...->...", shares.square(), (pairs - mean).square()) * count / (count - 1)
    return variance / (2 * mean.square().clamp(min=_LEAST**2))


@dataclass(frozen=True, eq=False)
class DiagLowRank:
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
    def of(cls, gaussian: Gaussian) -> DiagLowRank:
        """Take a Gaussian apart, in float32 or wider."""
        spread = gaussian.covariance
        if not isinstance(spread, Diagonal | LowRank):
            raise InputError(
                f"expected diagonal or low-rank Gaussians, found a {spread.kind} one: fit one of these to draws"
            )
        dtype = torch.promote_types(gaussian.centre.dtype, torch.float32)
        factor = spread.factor if isinstance(spread, LowRank) else spread.scale.new_zeros(spread.size, 0)
        return cls(*(tensor.detach().to(dtype) for tensor in (gaussian.centre, spread.scale, factor)))

    def gaussian(self, like: Gaussian) -> Gaussian:
        """Put it together again, in the dtypes of `like`."""
        scale = self.scale.detach().to(like.covariance.std().dtype)
        if not self.factor.shape[1]:
            return Gaussian(self.centre.detach().to(like.centre.dtype), Diagonal(scale))
        return Gaussian(self.centre.detach().to(like.centre.dtype), LowRank(scale, self.factor.detach().to(scale)))

    def variance(self) -> Tensor:
        """Of each weight, (D,)."""
        return self.scale.square() + self.factor.square().sum(1)

    def draws(self, count: int, generator: torch.Generator) -> Tensor:
        """Vectors (count, D), count even; each second one mirrors the one before: their mean is the centre."""
        half = count // 2
        independent = standard_normal((half, len(self.scale)), self.scale, generator)
        along = standard_normal((half, self.factor.shape[1]), self.factor, generator)
        offset = self.scale * independent + along @ self.factor.T
        return torch.stack([self.centre + offset, self.centre - offset], 1).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class TensorIndex:
    """The tensors that the weights of the flat vector belong to.

    Attributes:
        index: number of the tensor that a weight belongs to, int64 (D,).
        unit: root mean square standard deviation, within and between components, of the weights of each tensor.
    """

    index: Tensor
    unit: Tensor


class FreeParameters:
    """Every number moves: centre + unit u, scale e^v, factor + unit t.

    `unit` is the root mean square standard deviation of the weights of a tensor, so that one learning rate fits
    tensors of different sizes. Weights whose scale is zero keep it.
    """

    def __init__(self, start: DiagLowRank, tensors: TensorIndex, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.unit = start, tensors.unit[tensors.index]
        self.shift = torch.zeros_like(start.centre).requires_grad_()
        self.width = torch.full_like(start.scale, share).log_().requires_grad_()
        self.turn = torch.zeros_like(start.factor).requires_grad_()
        self.share = share

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that an optimizer moves."""
        return [self.shift, self.width, self.turn]

    def pool(self, other: FreeParameters) -> None:
        """Have one spread with another from now on."""
        self.width, self.turn = other.width, other.turn

    def gaussian(self) -> DiagLowRank:
        """The Gaussian at the present values."""
        start = self.start
        factor = self.share * start.factor + self.unit[:, None] * self.turn
        return DiagLowRank(start.centre + self.unit * self.shift, start.scale * self.width.exp(), factor)


class ScaleParameters:
    """Two numbers per tensor move: scale and factor times e^v, centre times e^g."""

    def __init__(self, start: DiagLowRank, tensors: TensorIndex, share: float) -> None:
        """Begin at a share of the widths of `start`."""
        self.start, self.index = start, tensors.index
        self.width = torch.full_like(tensors.unit, share).log_().requires_grad_()
        self.gain = torch.zeros_like(tensors.unit).requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that an optimizer moves."""
        return [self.width, self.gain]

    def pool(self, other: ScaleParameters) -> None:
        """Have one spread with another from now on."""
        self.width = other.width

    def gaussian(self) -> DiagLowRank:
        """The Gaussian at the present values."""
        width, gain = self.width.exp()[self.index], self.gain.exp()[self.index]
        return DiagLowRank(self.start.centre * gain, self.start.scale * width, self.start.factor * width[:, None])


Part = TypeVar("Part", FreeParameters, ScaleParameters)


class RefinedParameters:
    """A mixture of such Gaussians with fixed weights, and networks drawn from it with a gradient.

    Attributes:
        posterior: where it began.
        weights: of the components, (M,).
    """

    def __init__(self, posterior: Posterior, kind: type[FreeParameters] | type[ScaleParameters], share: float) -> None:
        """Take the components apart, and begin at a share of their widths."""
        self.posterior = posterior
        layout, deviations = posterior.layout, posterior.std
        self.first = [DiagLowRank.of(component) for component in posterior.components]
        dtype, device = self.first[0].centre.dtype, self.first[0].centre.device
        index = torch.repeat_interleave(torch.arange(len(layout.sizes)), torch.tensor(layout.sizes)).to(device)
        units = [deviations[name].double().square().mean().sqrt() for name in layout.names]
        tensors = TensorIndex(index, torch.stack(units).to(device=device, dtype=dtype))
        self.parts: Sequence[FreeParameters | ScaleParameters] = (
            _parts(FreeParameters, self.first, tensors, share)
            if kind is FreeParameters
            else _parts(ScaleParameters, self.first, tensors, share)
        )
        self.weights = posterior.weights.to(device=device, dtype=dtype)
        self._buffers = [
            {name: value.to(dtype) if value.is_floating_point() else value for name, value in buffers.items()}
            for buffers in posterior.buffers
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors that an optimizer moves."""
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
        flat = torch.cat([part.gaussian().draws(each, generator) for part in self.parts])
        buffers = {
            name: torch.stack([component[name] for component in self._buffers]).repeat_interleave(each, 0)
            for name in self.posterior.layout.buffer_names
        }
        return self.posterior.layout.laid_out(flat, buffers), self.weights.repeat_interleave(each) / each

    def kl(self) -> Tensor:
        """KL divergence of the marginals from those of the fit, mean over weights and components.

        With r = std / first std: ((centre - first centre)^2 / first variance + r^2 - 1) / 2 - log r; weights without
        spread are left out.
        """
        total = self.weights.new_zeros(())
        for weight, part, first in zip(self.weights, self.parts, self.first, strict=True):
            now, variance = part.gaussian(), first.variance()
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
        components = tuple(part.gaussian().gaussian(like) for part, like in pairs)
        return replace(self.posterior, components=components, provenance=provenance)

    def numbers(self) -> list[dict[str, list[float]]]:
        """For each component, tensor -> [width, gain] where there are only these."""
        names, widths = self.posterior.layout.names, [part for part in self.parts if isinstance(part, ScaleParameters)]
        pairs = [torch.stack(part.parameters, 1).exp().tolist() for part in widths]
        return [dict(zip(names, pair, strict=True)) for pair in pairs]

    def narrowing(self) -> float:
        """Median over weights with spread of std / first std."""
        ratios = []
        for part, first in zip(self.parts, self.first, strict=True):
            variance = first.variance()
            ratios.append((part.gaussian().variance().detach()[variance > 0] / variance[variance > 0]).sqrt())
        every = torch.cat(ratios)
        return float(every.median()) if len(every) else 1.0


def _parts(kind: type[Part], starts: list[DiagLowRank], tensors: TensorIndex, share: float) -> list[Part]:
    """One for each component; a pooled spread stays one."""
    parts = [kind(start, tensors, share) for start in starts]
    for part, start in zip(parts[1:], starts[1:], strict=True):
        if torch.equal(start.scale, starts[0].scale) and torch.equal(start.factor, starts[0].factor):
            part.pool(parts[0])
    return parts


Form = Literal["refined", "scaled"]


@dataclass(frozen=True, kw_only=True)
class DescentOptions:
    """The keywords of `refine` of the same names, checked."""

    quantity: Quantity
    steps: int
    draws: int
    batch: int
    lr: float
    start: float
    noise: float
    mixed: int
    diversity: float
    kl_weight: float
    fidelity_draws: int
    seed: int

    def __post_init__(self) -> None:
        if self.quantity not in ("probabilities", "values"):
            raise InputError(f'expected quantity "probabilities" or "values", found {self.quantity!r}: give "values"')
        for name, least in (("steps", 1), ("draws", 2), ("batch", 1), ("mixed", 0), ("fidelity_draws", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InputError(f"expected {name} to be a whole number >= {least}, found {value!r}: give {least + 2}")
        for name in ("lr", "start", "noise", "diversity", "kl_weight"):
            value, positive = getattr(self, name), name in ("lr", "start")
            if not (value > 0 if positive else value >= 0) or not math.isfinite(value):
                raise InputError(f"expected {name} {'>' if positive else '>='} 0, found {value}: give 0.1")


def refine(
    model: nn.Module,
    posterior: Posterior,
    population: Population,
    inputs: AnyInputs,
    *,
    quantity: Quantity = "probabilities",
    output: OutputPart = None,
    steps: int = 3000,
    draws: int = 64,
    batch: int = 250,
    lr: float = 0.03,
    start: float = 0.2,
    noise: float = 2.0,
    mixed: int = 4,
    diversity: float = 0.3,
    kl_weight: float = 0.0,
    statistics: AnyInputs = None,
    fidelity_draws: int = 100,
    seed: int = 0,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Posterior:
    """Move mean and widths of a posterior until its draws predict what the population predicts on unlabelled inputs.

    Minimised over centre, scale and factor of every component, by Adam, is the mean over inputs x of

        KL(p(x) || q(x)) + diversity |h_p(x) - h_q(x)| + kl_weight KL(marginals || those of the fit) / weights,

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
        model: the function; left exactly as it was.
        posterior: diagonal or low-rank Gaussians, or a mixture of them, fitted to the aligned population.
        population: the networks whose predictive is the goal; aligned or not, they compute the same functions.
        inputs: unlabelled examples, such as the training inputs; never those that the result is judged on.
        quantity: "probabilities" for a model that returns logits of classes on axis 1, or "values".
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        steps: steps of Adam with a cosine schedule.
        draws: networks in a step, half of them mirrored; needs memory for so many networks.
        batch: examples in a step.
        lr: learning rate of log widths, and of means in standard deviations of their tensor.
        start: widths begin at this share of the fit, because independent noise of full width destroys networks.
        noise: add a noisy copy of each input, of so many standard deviations at most; with 0 the predictive on inputs
            of another kind is lost.
        mixed: add so many mixtures of two inputs for each input.
        diversity: weight of the disagreement between networks beside their average predictive.
        kl_weight: weight of the KL divergence of the marginals from the fit, per weight.
        statistics: inputs on which running statistics of norms are measured for each draw; False leaves them at the
            averages that the posterior holds. By default the inputs that the posterior is moved on.
        fidelity_draws: networks drawn from the result, to be compared with the population.
        seed: seed of draws, batches and noise.
        progress: True for a line on stderr with the time left, or a function that is called with (steps done, steps,
            text), before it with networks of the population and after it with those that are compared.
        workers: processes that run the networks of the population; the posterior itself is moved in this process.
        executor: "local" or the address of a Ray cluster, or an open Executor, for the same.

    Raises:
        InputError: an option is out of range, or a Gaussian has another covariance.
        SpecError: population, posterior and model are not of one architecture.
    """
    options = DescentOptions(
        quantity=quantity, steps=steps, draws=draws, batch=batch, lr=lr, start=start, noise=noise, mixed=mixed,
        diversity=diversity, kl_weight=kl_weight, fidelity_draws=fidelity_draws, seed=seed,
    )  # fmt: skip
    execution = {"workers": workers, "executor": executor}
    model = select_output(model, output)
    inputs, statistics = inputs_of(inputs, model), measured_of(statistics, model)
    return _moved(
        "refined", model, posterior, population, inputs, options, statistics, progress_of(progress), execution
    )


def fit_scales(
    model: nn.Module,
    posterior: Posterior,
    population: Population,
    inputs: AnyInputs,
    *,
    quantity: Quantity = "probabilities",
    output: OutputPart = None,
    steps: int = 300,
    draws: int = 64,
    batch: int = 250,
    lr: float = 0.03,
    start: float = 0.2,
    noise: float = 0.0,
    mixed: int = 0,
    diversity: float = 0.0,
    kl_weight: float = 0.0,
    statistics: AnyInputs = None,
    fidelity_draws: int = 100,
    seed: int = 0,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Posterior:
    """Find one width and one gain for each tensor of a posterior, so that its draws predict as the population.

    The lighter form of `refine`: within a tensor, means and standard deviations keep their ratios, and all are
    multiplied by two numbers. (The mean of many networks is shorter than they are, so widths alone leave it unsure. A
    few numbers per tensor cannot do justice to everything, so by default only the inputs themselves count.)
    Arguments as there; `provenance["scaled"]` holds the numbers.
    """
    options = DescentOptions(
        quantity=quantity, steps=steps, draws=draws, batch=batch, lr=lr, start=start, noise=noise, mixed=mixed,
        diversity=diversity, kl_weight=kl_weight, fidelity_draws=fidelity_draws, seed=seed,
    )  # fmt: skip
    execution = {"workers": workers, "executor": executor}
    model = select_output(model, output)
    inputs, statistics = inputs_of(inputs, model), measured_of(statistics, model)
    return _moved("scaled", model, posterior, population, inputs, options, statistics, progress_of(progress), execution)


def _moved(
    form: Form,
    model: nn.Module,
    posterior: Posterior,
    population: Population,
    inputs: Inputs,
    options: DescentOptions,
    statistics: Measured,
    progress: Progress | None,
    execution: dict[str, Any],
) -> Posterior:
    check_fits(model, posterior.mean)
    generator = torch.Generator().manual_seed(options.seed)
    wide = augment(inputs, noise=options.noise, mixed=options.mixed, generator=generator)
    asked = named(progress, "asking the networks")
    teacher = Teacher.ask(
        model, population, wide, classes=options.quantity == "probabilities", progress=asked, **execution
    )
    kind = FreeParameters if form == "refined" else ScaleParameters
    moving = RefinedParameters(posterior, kind, options.start)
    norms = norms_used(model, posterior.mean, inputs, constant=posterior.constant_statistics)
    if statistics is None:
        statistics = inputs
    measured: Measured = False if statistics is False or not norms else statistics
    with torch.enable_grad():
        function = Differentiable(model, *moving.place, constant=posterior.constant_statistics)
        distances = _descend(moving, function, teacher, generator, options, measured, progress)
    last = distances[-max(1, options.steps // 10) :]
    distance = sum(last) / len(last)
    facts: dict[str, Any] = asdict(options)
    facts |= {"networks": len(population), "distance": distance, "narrowing": moving.narrowing()}
    facts["descent"] = _thinned(distances)
    if norms:
        facts["statistics"] = "averages of the networks" if measured is False else "measured for each draw"
    if form == "scaled":
        facts["tensors"] = moving.numbers()
    provenance = {**posterior.provenance, form: facts}
    if norms and measured is False:
        provenance["constant_statistics"] = sorted({*posterior.constant_statistics, *norms})
    result = moving.result(provenance)
    seed = options.seed + 1  # other noise than that of the descent
    close = fidelity(
        model, result, population, inputs, statistics=measured, quantity=options.quantity,
        draws=options.fidelity_draws, seed=seed, progress=progress, **execution,
    )  # fmt: skip
    facts |= {"fidelity": close.to_dict(), "fidelity_seed": seed}
    return result


@contextmanager
def _differentiable_attention() -> Iterator[None]:
    """Switch off torch's fused attention layers of inference, which have no gradient."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@_differentiable_attention()
def _descend(
    moving: RefinedParameters,
    function: Differentiable,
    teacher: Teacher,
    generator: torch.Generator,
    options: DescentOptions,
    statistics: Measured,
    progress: Progress | None,
) -> list[float]:
    """Adam with a cosine schedule; returns the distance at each step.

    With `statistics`, a batch of these inputs gives each network of a step the running statistics of its norms.
    """
    steps, count = options.steps, len(teacher)
    call = None if statistics is None or statistics is False else call_arguments(statistics)
    examples = 0 if call is None else examples_in(call[0] + tuple(call[1].values()))
    optimizer = torch.optim.Adam(moving.parameters, lr=options.lr)
    distances: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (1 + math.cos(math.pi * step / steps)) / 2
        rows = torch.randperm(count, generator=generator)[: options.batch]
        networks, weights = moving.draw(options.draws, generator)
        seen = None
        if call is not None:
            seen = rows_of(call, torch.randperm(examples, generator=generator)[: options.batch])
        outputs = function(networks, rows_of(teacher.inputs, rows), seen)
        distance = teacher.distance(outputs, weights, rows, options.diversity, mirrored=True)
        loss = distance + options.kl_weight * moving.kl() if options.kl_weight else distance
        if not bool(torch.isfinite(loss.detach())):
            raise InputError(
                f"expected finite predictions, found {float(loss.detach())} at step {step}: give a smaller lr, found "
                f"{options.lr:g}, or a smaller start, found {options.start:g}"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        distances.append(float(distance.detach()))
        if progress is not None:
            progress(step + 1, steps, f"distance {distances[-1]:.4f}")
    return distances


_KEPT = 100  # points of the descent that are kept for its figure


def _thinned(distances: list[float]) -> dict[str, Any]:
    """Means of the distance over at most 100 pieces of the descent, and the last step of each.

    >>> _thinned([3.0, 1.0])
    {'steps': [1, 2], 'distances': [3.0, 1.0]}
    """
    size = -(-len(distances) // _KEPT)
    pieces = [distances[start : start + size] for start in range(0, len(distances), size)]
    steps = [min(size * (number + 1), len(distances)) for number in range(len(pieces))]
    return {"steps": steps, "distances": [sum(piece) / len(piece) for piece in pieces]}
