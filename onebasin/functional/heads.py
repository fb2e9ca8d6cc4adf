"""What a model's outputs say about targets, beyond classes and Gaussians: distributions of values, and losses.

A `Likelihood` is called as (outputs (n, ...), targets (n, ...)) -> (n,). Some are log densities: exp of them sums or
integrates to 1 over the targets of any outputs. Others are losses with their sign turned, which only train; exp of
those times a prior is a density of weights, but no posterior of anything (`is_density` tells the two apart).

Layout. Values: parameters of a distribution lie block by block on axis 1 of the outputs, first the first parameter of
all c channels of the targets, then the second of all, and so on: P parameters, targets (n, c, ...), outputs (n, P c,
...). Targets (n,) and (n, h, w) have one channel and no axis for it. Classes: axis 1 of the outputs, (n, K, ...), and
class numbers (n, ...).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from onebasin.errors import InputError

IGNORED = -100  # the class number of a pixel that does not count
_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
_LEAST = 1e-6  # of a parameter that must be positive: a softplus may round to 0
_NODES = 64  # of the quadrature of a cumulative probability
_FAR = 40.0  # nats below its top at which a density is taken as 0


@dataclass(frozen=True)
class Likelihood(ABC):
    """The log density of targets given outputs, or a loss with its sign turned; a function (outputs, targets) -> (n,).

    Attributes:
        name: the word that stands for it with its defaults.
        kind: "classes" or "values", what targets are.
        is_density: whether exp of it sums or integrates to 1 over targets; otherwise it is a loss only.
        layout: the columns of the outputs, in words.
        reference: where it comes from.
    """

    name: ClassVar[str]
    kind: ClassVar[Literal["classes", "values"]]
    is_density: ClassVar[bool] = True
    layout: ClassVar[str]
    reference: ClassVar[str]

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example (n,), summed over its pixels and channels."""
        each = self.each(outputs, targets)
        return each.reshape(len(each), -1).sum(1)

    @abstractmethod
    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per place (n, ...); 0 where a target is missing."""

    @abstractmethod
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs of some examples that do not fit their targets.

        Raises:
            InputError: they do not fit.
        """


class Head(Likelihood):
    """A distribution of values whose parameters are outputs.

    `parameters` cuts outputs into tensors of the shape of targets (..., c, *rest), some with an axis of components at
    the end; `log_prob`, `cdf`, `mean` and `std` take them, and values of the same shape.

    Attributes:
        parts: parameters per value.
    """

    kind = "values"
    parts: ClassVar[int]

    def parameters(self, outputs: Tensor, channels: int = 1, axis: int = 1) -> tuple[Tensor, ...]:
        """The parameters, each with `channels` entries on the axis where outputs had all of theirs."""
        blocks: tuple[Tensor, ...] = outputs.unflatten(axis, (self.parts, channels)).unbind(axis)
        return blocks

    @abstractmethod
    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Log density of each value."""

    @abstractmethod
    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Probability of at most each value."""

    @abstractmethod
    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The mean."""

    @abstractmethod
    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The standard deviation."""

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of each value (n, c, ...); 0 where the target is NaN."""
        parameters, goals = self.fitted(outputs, targets)
        known = goals == goals
        return torch.where(known, self.scored(parameters, torch.where(known, goals, 0.0)), 0.0)

    def scored(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """What training maximises for each value: the log density, unless this is a loss."""
        return self.log_prob(parameters, values)

    def fitted(self, outputs: Tensor, targets: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Parameters and targets (n, c, ...)."""
        channels = channels_of(outputs, targets)
        shape = (len(targets), channels, *outputs.shape[2:])
        return self.parameters(outputs, channels), targets.reshape(shape)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse outputs whose columns are not the parameters of these targets."""
        if not targets.is_floating_point():
            raise InputError(
                f"expected floating-point targets for the likelihood {self.name!r}, found {targets.dtype}: give "
                "targets.float()"
            )
        channels = channels_of(outputs, targets) if outputs.dim() >= 2 else 0
        rest = tuple(targets.shape[2:] if outputs.dim() == targets.dim() else targets.shape[1:])
        columns = outputs.shape[1] if outputs.dim() >= 2 else 0
        if not channels or tuple(outputs.shape[2:]) != rest or not self._fits(columns, channels):
            example = (len(targets), f"{self.parts * max(1, channels)}", *rest)
            raise InputError(
                f"expected outputs ({', '.join(map(str, example))}) for the likelihood {self.name!r} ({self.layout}) "
                f"and targets {tuple(targets.shape)}, found {tuple(outputs.shape)}: change the model's last layer"
            )

    def _fits(self, columns: int, channels: int) -> bool:
        return columns == self.parts * channels


def channels_of(outputs: Tensor, targets: Tensor) -> int:
    """Channels of targets: 1 where they have one axis less than outputs, else the size of axis 1.

    >>> channels_of(torch.zeros(5, 2, 8, 8), torch.zeros(5, 8, 8)), channels_of(torch.zeros(5, 6), torch.zeros(5, 3))
    (1, 3)
    """
    if outputs.dim() == targets.dim() + 1 or targets.dim() < 2:
        return 1
    return targets.shape[1] if outputs.dim() == targets.dim() else 0


class GaussianHead(Head):
    """N(mean, exp(s)^2)."""

    name = "learned_gaussian"
    layout = "mean, log standard deviation"
    reference = "Nix and Weigend, 1994"
    parts = 2

    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """-(y - mean)^2 / (2 exp(2 s)) - s - log(2 pi) / 2."""
        return _normal(parameters[0], parameters[1], values)

    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Phi((y - mean) / exp(s))."""
        chance: Tensor = torch.special.ndtr((values - parameters[0]) * torch.exp(-parameters[1]))
        return chance

    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The first parameter."""
        return parameters[0]

    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """exp(s)."""
        return parameters[1].exp()


@dataclass(frozen=True)
class FixedGaussian(GaussianHead):
    """N(output, noise^2) with one standard deviation for all values.

    Attributes:
        noise: the standard deviation.
    """

    noise: float = 1.0

    name = "gaussian"
    layout = "mean"
    reference = "Gauss, 1809"
    parts = 1

    def parameters(self, outputs: Tensor, channels: int = 1, axis: int = 1) -> tuple[Tensor, ...]:
        """The output, and the logarithm of the noise."""
        return outputs, torch.full_like(outputs, math.log(self.noise))


class LaplaceHead(Head):
    """Laplace's distribution: exp(-|y - location| / b) / (2 b), b = exp(s); its standard deviation is sqrt(2) b."""

    name = "laplace"
    layout = "location, log scale"
    reference = "Laplace, 1774"
    parts = 2

    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """-|y - location| / b - log(2 b)."""
        location, log_scale = parameters
        return -(values - location).abs() * torch.exp(-log_scale) - log_scale - math.log(2)

    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """1/2 + sign(z) (1 - exp(-|z|)) / 2, z = (y - location) / b."""
        z = (values - parameters[0]) * torch.exp(-parameters[1])
        return 0.5 - 0.5 * z.sign() * torch.expm1(-z.abs())

    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The location."""
        return parameters[0]

    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """sqrt(2) b."""
        return math.sqrt(2) * parameters[1].exp()


class StudentTHead(Head):
    """Student's t: location + scale * t with df degrees of freedom, scale = exp(s), df = 2 + softplus(a).

    Above 2 degrees of freedom there is a standard deviation, scale * sqrt(df / (df - 2)).
    """

    name = "student_t"
    layout = "location, log scale, a with df = 2 + softplus(a)"
    reference = "Student, 1908"
    parts = 3

    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Log density."""
        location, log_scale, df = self.standard(parameters)
        z = (values - location) * torch.exp(-log_scale)
        constant = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df * math.pi).log() - log_scale
        return constant - (df + 1) / 2 * torch.log1p(z.square() / df)

    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """By quadrature, to about 1e-11.

        With t = sqrt(df) tan(x) the density of x is proportional to cos(x)^(df - 1) on (-pi/2, pi/2); where df is
        large it is as good as 0 beyond `_FAR` nats below its top. The same rule over the whole half gives the constant.
        """
        location, log_scale, df = self.standard(parameters)
        z = (values - location) * torch.exp(-log_scale)
        end = torch.acos(torch.exp(-_FAR / (df - 1)))
        part = _power_of_cosine(torch.minimum(torch.atan(z.abs() / df.sqrt()), end), df - 1)
        return 0.5 + 0.5 * z.sign() * (part / _power_of_cosine(end, df - 1)).clamp(max=1)

    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """The location."""
        return parameters[0]

    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """Scale * sqrt(df / (df - 2))."""
        _, log_scale, df = self.standard(parameters)
        return log_scale.exp() * (df / (df - 2)).sqrt()

    def standard(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Location, log scale, degrees of freedom."""
        location, log_scale, raw = parameters
        return location, log_scale, 2 + _positive(raw)


class MixtureHead(Head):
    """A mixture of K Gaussians for each value: sum_k softmax(l)_k N(mean_k, exp(s_k)^2).

    K is what the outputs have room for: 3 K c columns, K logits for each of c channels (component by component: first
    those of component 1 for all channels), K means, K logarithms of standard deviations.
    """

    name = "mixture"
    layout = "K logits, K means, K log standard deviations, with K from the number of columns"
    reference = "Bishop, 1994"
    parts = 3

    def parameters(self, outputs: Tensor, channels: int = 1, axis: int = 1) -> tuple[Tensor, ...]:
        """Logits, means and log standard deviations, the K components on the last axis."""
        blocks = outputs.unflatten(axis, (self.parts, -1, channels)).unbind(axis)
        return tuple(block.movedim(axis, -1) for block in blocks)

    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Log of the sum over components."""
        logits, means, log_std = parameters
        return (logits.log_softmax(-1) + _normal(means, log_std, values[..., None])).logsumexp(-1)

    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """Mean over components of theirs."""
        logits, means, log_std = parameters
        each = torch.special.ndtr((values[..., None] - means) * torch.exp(-log_std))
        chance: Tensor = (logits.softmax(-1) * each).sum(-1)
        return chance

    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """Mean over components of theirs."""
        return (parameters[0].softmax(-1) * parameters[1]).sum(-1)

    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        """Root of the mean variance plus the variance of the means."""
        logits, means, log_std = parameters
        apart = means - self.mean(parameters)[..., None]
        return (logits.softmax(-1) * ((2 * log_std).exp() + apart.square())).sum(-1).sqrt()

    def _fits(self, columns: int, channels: int) -> bool:
        return columns > 0 and columns % (self.parts * channels) == 0


@dataclass(frozen=True)
class BetaNLL(GaussianHead):
    """The Gaussian log density of each value times its variance^beta, through which no gradient flows.

    It keeps places that are noisy already from being given up. A loss only; what it predicts is the Gaussian.

    Attributes:
        beta: 0 is the Gaussian likelihood, 1 has the gradient of the squared error in the mean.
    """

    beta: float = 0.5

    name = "beta_nll"
    is_density = False
    reference = "Seitzer et al., 2022"

    def scored(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """exp(2 beta s) times the log density."""
        return torch.exp(2 * self.beta * parameters[1].detach()) * self.log_prob(parameters, values)


@dataclass(frozen=True)
class EvidentialValues(StudentTHead):
    """Student's t out of a normal-inverse-gamma prior (g, v, alpha, beta) of mean and variance, with a penalty.

    With v and beta the softplus of their columns and alpha 1 + softplus, the predictive is Student's t with 2 alpha
    degrees of freedom around g and the squared scale beta (1 + v) / (v alpha). Training maximises its log density less
    weight |y - g| (2 v + alpha); so it is a loss only.

    Attributes:
        weight: of the penalty.
    """

    weight: float = 0.01

    name = "evidential_values"
    is_density = False
    layout = "g, then v, alpha - 1 and beta before softplus"
    reference = "Amini et al., 2020"
    parts = 4

    def standard(self, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Location, log scale, degrees of freedom of the predictive."""
        location, v, alpha, beta = parameters[0], *self._prior(parameters)
        return location, 0.5 * (beta * (1 + v) / (v * alpha)).log(), 2 * alpha

    def scored(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        """The log density less the penalty."""
        v, alpha, _ = self._prior(parameters)
        penalty = (values - parameters[0]).abs() * (2 * v + alpha)
        return self.log_prob(parameters, values) - self.weight * penalty

    @staticmethod
    def _prior(parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        v, above, beta = map(_positive, parameters[1:])
        return v, 1 + above, beta


class ClassLoss(Likelihood):
    """A loss for class numbers; `logits` are those whose softmax it predicts with."""

    kind = "classes"
    is_density = False
    layout = "K logits"

    def logits(self, outputs: Tensor, axis: int = 1) -> Tensor:
        """Logits of the predictive, from outputs with the classes on `axis`."""
        return outputs

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the loss of each place (n, ...); 0 where the class number is `IGNORED`."""
        counted = targets != IGNORED
        numbers = torch.where(counted, targets, 0)
        return torch.where(counted, self.scored(outputs, numbers), 0.0)

    @abstractmethod
    def scored(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the loss of each place."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse what is no class numbers, or outputs without classes on axis 1."""
        check_classes_fit(outputs, targets)


@dataclass(frozen=True)
class Focal(ClassLoss):
    """(1 - p)^gamma log p of the target's probability p: little is asked where the answer is good already.

    Attributes:
        gamma: 0 is the categorical likelihood.
    """

    gamma: float = 2.0

    name = "focal"
    reference = "Lin et al., 2017"

    def scored(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the focal loss."""
        log_p = _of_target(outputs.log_softmax(1), targets)
        return (-torch.expm1(log_p)).clamp(min=torch.finfo(log_p.dtype).tiny) ** self.gamma * log_p


@dataclass(frozen=True)
class LabelSmoothing(ClassLoss):
    """Cross-entropy against targets of which a share is spread over all classes.

    Attributes:
        share: 0 is the categorical likelihood.
    """

    share: float = 0.1

    name = "label_smoothing"
    reference = "Szegedy et al., 2016"

    def scored(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(1 - share) log p_target + share mean_k log p_k."""
        logs = outputs.log_softmax(1)
        return (1 - self.share) * _of_target(logs, targets) + self.share * logs.mean(1)


@dataclass(frozen=True)
class EvidentialClasses(ClassLoss):
    """Outputs as evidence for a Dirichlet distribution of the class probabilities: alpha = 1 + softplus(outputs).

    The loss is the expected squared error, sum_k (y_k - p_k)^2 + p_k (1 - p_k) / (S + 1) with S = sum alpha and p =
    alpha / S, plus weight times KL(Dirichlet(alpha') || Dirichlet(1)), alpha' being alpha with 1 in the place of the
    target. It predicts with p. The paper raises weight from 0 to 1 over ten epochs; here it is one number.

    Attributes:
        weight: of the divergence.
    """

    weight: float = 0.1

    name = "evidential_classes"
    layout = "K numbers, whose softplus is the evidence"
    reference = "Sensoy et al., 2018"

    def logits(self, outputs: Tensor, axis: int = 1) -> Tensor:
        """Log alpha, whose softmax is alpha / S."""
        return torch.log1p(F.softplus(outputs))

    def scored(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Minus the loss."""
        alpha = 1 + F.softplus(outputs)
        classes = torch.arange(alpha.shape[1], device=alpha.device).reshape(-1, *[1] * (alpha.dim() - 2))
        hit = (targets[:, None] == classes).to(alpha.dtype)
        strength = alpha.sum(1, keepdim=True)
        p = alpha / strength
        risk = ((hit - p).square() + p * (1 - p) / (strength + 1)).sum(1)
        return -(risk + self.weight * _dirichlet_from_uniform(torch.where(hit > 0, 1.0, alpha)))


LIKELIHOODS: dict[str, Likelihood] = {
    one.name: one
    for one in (
        LaplaceHead(),
        StudentTHead(),
        MixtureHead(),
        BetaNLL(),
        EvidentialValues(),
        EvidentialClasses(),
        Focal(),
        LabelSmoothing(),
    )
}
"""What a word stands for as `likelihood=`, beside categorical, bernoulli and gaussian."""


def likelihood_table() -> str:
    """The words of `likelihood=` as text: what targets are, whether it is a density, and the columns of the outputs.

    >>> print(likelihood_table().splitlines()[4])
    laplace             values   density    location, log scale (Laplace, 1774)
    """
    own = [
        ("categorical", "classes", True, "K logits"),
        ("bernoulli", "0 or 1", True, "one logit"),
        ("gaussian", "values", True, "mean, and with noise='learned' log standard deviation"),
    ]
    own += [(o.name, o.kind, o.is_density, f"{o.layout} ({o.reference})") for o in LIKELIHOODS.values()]
    rows = [("word", "targets", "is a", "axis 1 of the outputs")]
    rows += [(name, kind, "density" if density else "loss only", text) for name, kind, density, text in own]
    return "\n".join(f"{name:18s}  {kind:7s}  {what:9s}  {text}" for name, kind, what, text in rows)


def check_classes_fit(outputs: Tensor, targets: Tensor) -> None:
    """Refuse targets that are no class numbers for outputs (examples, classes, ...).

    Raises:
        InputError: they are values, or of another shape, or there is one class only.
    """
    expected = (outputs.shape[0], *outputs.shape[2:])
    if outputs.dim() < 2 or targets.is_floating_point() or tuple(targets.shape) != expected:
        raise InputError(
            f"expected outputs (examples, classes, ...) and class numbers {expected}, found outputs "
            f"{tuple(outputs.shape)} and {targets.dtype} targets {tuple(targets.shape)}: give whole-number targets "
            '(targets.long()) in this shape, or choose likelihood="gaussian" or "bernoulli"'
        )
    if outputs.shape[1] < 2:
        raise InputError(
            f"expected at least 2 classes on axis 1 of the outputs, found outputs {tuple(outputs.shape)} for "
            f'{targets.dtype} targets, which are class numbers unless the likelihood is named: choose "bernoulli" for '
            '0 and 1 with one logit, "gaussian" with noise= for values'
        )


def without(targets: Tensor, ignore_index: int | None) -> Tensor:
    """Class numbers with `IGNORED` in place of `ignore_index`.

    >>> without(torch.tensor([0, 255, 1]), 255)
    tensor([   0, -100,    1])

    Raises:
        InputError: it is no whole number, targets are values, or nothing else is left.
    """
    if ignore_index is None:
        return targets
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise InputError(
            f"expected ignore_index as a whole class number, found {ignore_index!r}: give ignore_index=255 where 255 "
            "marks targets that do not count"
        )
    if targets.is_floating_point():
        raise InputError(
            f"ignore_index={ignore_index} is a class number, found {targets.dtype} targets: leave it out, and mark "
            "values that are not known with NaN"
        )
    found = torch.where(targets == ignore_index, IGNORED, targets.long())
    if bool((found == IGNORED).all()):
        raise InputError(f"expected some targets other than ignore_index={ignore_index}, found none: check the targets")
    return found


def _normal(mean: Tensor, log_std: Tensor, values: Tensor) -> Tensor:
    return -0.5 * ((values - mean) * torch.exp(-log_std)).square() - log_std - _HALF_LOG_TWO_PI


def _positive(raw: Tensor) -> Tensor:
    return F.softplus(raw) + _LEAST


def _of_target(logs: Tensor, targets: Tensor) -> Tensor:
    return logs.gather(1, targets[:, None]).squeeze(1)


def _dirichlet_from_uniform(alpha: Tensor) -> Tensor:
    """KL divergence of Dirichlet(alpha) from the uniform one, classes on axis 1."""
    total = alpha.sum(1)
    constant = torch.lgamma(total) - math.lgamma(alpha.shape[1]) - torch.lgamma(alpha).sum(1)
    return constant + ((alpha - 1) * (torch.digamma(alpha) - torch.digamma(total)[:, None])).sum(1)


def _power_of_cosine(end: Tensor, power: Tensor) -> Tensor:
    """The integral of cos(x)^power from 0 to `end`, by Gauss and Legendre.

    At pi/2 a broken power is not smooth. The integral is taken over s with x = pi/2 (1 - (1 - s)^4), which moves that
    end so far away that 64 nodes do.
    """
    nodes, weights = _legendre()
    last = 1 - (1 - 2 / math.pi * end).clamp(min=0) ** 0.25
    total = torch.zeros_like(end)
    for node, weight in zip(nodes, weights, strict=True):
        left = 1 - last * node
        total = total + weight * left**3 * torch.sin(math.pi / 2 * left**4) ** power
    return total * last


def _legendre() -> tuple[list[float], list[float]]:
    """Nodes and weights on [0, 1], from the eigenvalues of Legendre's three-term recurrence (Golub and Welsch)."""
    k = torch.arange(1, _NODES, dtype=torch.float64)
    beside = k / (4 * k.square() - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return ((values + 1) / 2).tolist(), vectors[0].square().tolist()
