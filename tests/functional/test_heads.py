"""Distribution heads against scipy, torch.distributions and quadrature; losses against formulas, and they say so."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import onebasin as ob
from onebasin.errors import InputError, LikelihoodWarning
from onebasin.functional.heads import (
    IGNORED,
    LIKELIHOODS,
    BetaNLL,
    ClassLoss,
    EvidentialClasses,
    EvidentialValues,
    FixedGaussian,
    Focal,
    GaussianHead,
    Head,
    LabelSmoothing,
    LaplaceHead,
    MixtureHead,
    StudentTHead,
    channels_of,
    likelihood_table,
)
from onebasin.inference.job import job_of
from onebasin.inference.likelihood import bernoulli, categorical, gaussian, learned_gaussian
from onebasin.inference.methods import METHODS
from onebasin.inference.target import target_of

HEADS: list[tuple[Head, int]] = [
    (GaussianHead(), 2),
    (FixedGaussian(0.7), 1),
    (LaplaceHead(), 2),
    (StudentTHead(), 3),
    (MixtureHead(), 9),
    (BetaNLL(), 2),
    (EvidentialValues(), 4),
]
LOSSES: list[ClassLoss] = [Focal(), LabelSmoothing(), EvidentialClasses()]
each_head = pytest.mark.parametrize(("head", "columns"), HEADS, ids=lambda value: getattr(value, "name", ""))


def rows(columns: int, count: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, columns, generator=generator, dtype=torch.float64)
    return outputs, 2 * torch.randn(count, generator=generator, dtype=torch.float64)


def reference(head: Head, row: Tensor) -> Any:
    """The same distribution of scipy; of a mixture a list of weights and components."""
    a = row.numpy()
    positive = np.logaddexp(0, a) + 1e-6
    if isinstance(head, FixedGaussian):
        return scipy.stats.norm(a[0], head.noise)
    if isinstance(head, LaplaceHead):
        return scipy.stats.laplace(a[0], np.exp(a[1]))
    if isinstance(head, EvidentialValues):
        v, alpha, beta = positive[1], 1 + positive[2], positive[3]
        return scipy.stats.t(2 * alpha, a[0], np.sqrt(beta * (1 + v) / (v * alpha)))
    if isinstance(head, StudentTHead):
        return scipy.stats.t(2 + positive[2], a[0], np.exp(a[1]))
    return scipy.stats.norm(a[0], np.exp(a[1]))


@each_head
def test_density_and_moments_are_those_of_scipy(head: Head, columns: int) -> None:
    outputs, y = rows(columns)
    parameters, goals = head.fitted(outputs, y)
    found = [head.log_prob(parameters, goals), head.cdf(parameters, goals), head.mean(parameters), head.std(parameters)]
    if isinstance(head, MixtureHead):
        logits, means, log_std = outputs.chunk(3, dim=1)
        mixture: Any = td.MixtureSameFamily(td.Categorical(logits=logits), td.Normal(means, log_std.exp()))
        expected = [mixture.log_prob(y), mixture.cdf(y), mixture.mean, mixture.stddev]
    else:
        own = [reference(head, row) for row in outputs]
        values = [(one.logpdf(at), one.cdf(at), one.mean(), one.std()) for one, at in zip(own, y.tolist(), strict=True)]
        expected = list(torch.tensor(values, dtype=torch.float64).T)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, 0], other, rtol=1e-9, atol=1e-12)


@each_head
def test_a_density_integrates_to_one_and_a_loss_does_not_claim_to(head: Head, columns: int) -> None:
    outputs, _ = rows(columns, 2)
    for row in outputs:

        def density(value: float, row: Tensor = row) -> float:
            return math.exp(float(head(row[None], torch.tensor([value], dtype=torch.float64))))

        centre = float(head.mean(head.parameters(row[None])))
        total = sum(
            scipy.integrate.quad(density, *ends, limit=200)[0] for ends in ((-np.inf, centre), (centre, np.inf))
        )
        assert (total == pytest.approx(1, abs=1e-6)) is head.is_density


def test_a_penalty_of_nothing_is_the_likelihood() -> None:
    outputs, y = rows(4)
    free, marginal = EvidentialValues(weight=0.0), EvidentialValues()
    parameters, goals = marginal.fitted(outputs, y)
    torch.testing.assert_close(free(outputs, y), marginal.log_prob(parameters, goals)[:, 0])
    v, alpha, _ = (F.softplus(outputs[:, k]) + 1e-6 for k in (1, 2, 3))
    penalty = (y - outputs[:, 0]).abs() * (2 * v + 1 + alpha)
    torch.testing.assert_close(marginal(outputs, y), free(outputs, y) - 0.01 * penalty)


def test_evidence_for_values_is_an_integral_over_mean_and_variance() -> None:
    """Student's t is the Gaussian averaged over the normal-inverse-gamma prior, here by draws from it."""
    row = torch.tensor([[0.3, 0.5, 1.0, 0.2]], dtype=torch.float64)
    v, alpha, beta = ((F.softplus(row[0, k]) + 1e-6).item() for k in (1, 2, 3))
    generator = np.random.default_rng(0)
    variance = scipy.stats.invgamma(1 + alpha, scale=beta).rvs(200_000, random_state=generator)
    mean = 0.3 + np.sqrt(variance / v) * generator.standard_normal(200_000)
    densities = scipy.stats.norm.pdf(0.8, mean, np.sqrt(variance))
    head = EvidentialValues()
    found = float(head.log_prob(head.parameters(row), torch.tensor([[0.8]], dtype=torch.float64)).exp())
    assert abs(found - densities.mean()) < 4 * densities.std() / math.sqrt(len(densities))


def test_beta_scales_the_gradient_and_not_the_predictive() -> None:
    outputs, y = rows(2)
    slopes = {beta: grad(lambda o, b=beta: BetaNLL(b)(o, y).sum())(outputs) for beta in (0.0, 0.5, 1.0)}
    plain = grad(lambda o: learned_gaussian(o, y).sum())(outputs)
    torch.testing.assert_close(slopes[0.0], plain)
    torch.testing.assert_close(slopes[0.5], plain * outputs[:, 1:].exp())  # variance^(1/2)
    torch.testing.assert_close(slopes[1.0][:, 0], y - outputs[:, 0])  # the squared error's


# ------------------------------------------------------------------ classes


def test_losses_of_classes_are_their_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs, y = torch.randn(9, 4, generator=generator).double(), torch.randint(4, (9,), generator=generator)
    p = outputs.softmax(1)[torch.arange(9), y]
    torch.testing.assert_close(Focal(gamma=2)(outputs, y), (1 - p) ** 2 * p.log())
    torch.testing.assert_close(Focal(gamma=0)(outputs, y), categorical(outputs, y))
    torch.testing.assert_close(
        LabelSmoothing(0.2)(outputs, y), -F.cross_entropy(outputs, y, reduction="none", label_smoothing=0.2)
    )
    alpha = 1 + F.softplus(outputs)
    own: Any = td.Dirichlet(alpha)
    hit = F.one_hot(y, 4).double()
    risk = ((hit - own.mean).square() + own.variance).sum(1)  # E |y - p|^2 under the Dirichlet distribution
    others = torch.where(hit > 0, 1.0, alpha)
    divergence = td.kl_divergence(td.Dirichlet(others), td.Dirichlet(torch.ones_like(others)))
    torch.testing.assert_close(EvidentialClasses(0.3)(outputs, y), -(risk + 0.3 * divergence))
    torch.testing.assert_close(EvidentialClasses().logits(outputs).softmax(1), own.mean)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_losses_do_not_sum_to_one_over_classes(loss: ClassLoss) -> None:
    outputs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).double()
    total = sum(loss(outputs, torch.full((3,), k)).exp() for k in range(5))
    assert not loss.is_density and not torch.allclose(total, torch.ones(3).double(), atol=1e-3)
    own = sum(categorical(outputs, torch.full((3,), k)).exp() for k in range(5))
    torch.testing.assert_close(own, torch.ones(3).double())


def test_the_focal_loss_has_a_gradient_where_the_answer_is_certain() -> None:
    slope = grad(lambda o: Focal(gamma=0.5)(o, torch.tensor([0])).sum())(torch.tensor([[200.0, 0.0]]))
    assert bool(slope.isfinite().all())


# ------------------------------------------------------------------ pixels, and what is missing


@each_head
def test_pixels_and_channels_are_laid_out_as_said(head: Head, columns: int) -> None:
    """(n, P c, h, w) is P blocks of c channels, each pixel a row of its own."""
    channels = 2
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(3, columns * channels, 4, 5, generator=generator).double()
    y = torch.randn(3, channels, 4, 5, generator=generator).double()
    total = torch.zeros(3).double()
    for c in range(channels):
        own = outputs.unflatten(1, (columns, channels))[:, :, c].movedim(1, -1)  # (n, h, w, columns)
        total += head(own.reshape(-1, columns), y[:, c].reshape(-1)).reshape(3, -1).sum(1)
    torch.testing.assert_close(head(outputs, y), total)
    assert channels_of(outputs, y) == 2 and channels_of(outputs[:, :columns], y[:, 0]) == 1
    head.check(outputs, y)
    with pytest.raises(InputError, match="change the model's last layer"):
        head.check(outputs[:, :, :3], y)
    with pytest.raises(InputError, match="floating-point targets"):
        head.check(outputs, y.long())


@pytest.mark.parametrize(
    "word", ["gaussian", "learned", "bernoulli", *(n for n, o in LIKELIHOODS.items() if o.kind == "values")]
)
def test_missing_values_count_nothing_and_have_no_gradient(word: str) -> None:
    own = {"gaussian": gaussian(0.5), "learned": learned_gaussian, "bernoulli": bernoulli}
    density: Any = own.get(word) or LIKELIHOODS[word]
    columns = {"gaussian": 1, "bernoulli": 1, "learned": 2, "student_t": 3, "mixture": 6, "evidential_values": 4}
    outputs = torch.randn(2, columns.get(word, 2), 3, 3, generator=torch.Generator().manual_seed(2)).double()
    y = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(3)).round().double()
    y[0, 1, 1] = torch.nan
    found = density(outputs, y)
    zero, one = (density(outputs, y.nan_to_num(nan=value)) for value in (0.0, 1.0))
    alone = density(outputs[:1, :, 1:2, 1:2], torch.zeros(1, 1, 1).double())
    torch.testing.assert_close(found[0], zero[0] - alone[0])
    torch.testing.assert_close(found[1], one[1])
    slope = grad(lambda o: density(o, y).sum())(outputs)
    assert bool(slope.isfinite().all()) and not slope[0, :, 1, 1].any() and slope[0, :, 0, 0].any()


@pytest.mark.parametrize("density", [categorical, *LOSSES], ids=lambda one: one.__name__)
def test_ignored_classes_count_nothing_and_have_no_gradient(density: Any) -> None:
    outputs = torch.randn(2, 3, 2, 2, generator=torch.Generator().manual_seed(2)).double()
    y = torch.tensor([[[0, 1], [2, 0]], [[IGNORED, 1], [1, IGNORED]]])
    slope = grad(lambda o: density(o, y).sum())(outputs)
    assert not slope[1, :, 0, 0].any() and slope[1, :, 0, 1].any()
    parts = sum(density(outputs[1:, :, i, j], y[1:, i, j]) for i, j in ((0, 1), (1, 0)))
    torch.testing.assert_close(density(outputs[1:], y[1:]), parts)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_likelihoods_run_side_by_side_with_gradients(name: str) -> None:
    one = LIKELIHOODS[name]
    columns = 3 if one.kind == "classes" else {"student_t": 3, "mixture": 6, "evidential_values": 4}.get(name, 2)
    y = torch.randint(3, (5,)) if one.kind == "classes" else torch.randn(5)
    outputs = torch.randn(4, 5, columns)
    several = vmap(grad(lambda o: one(o, y).sum()))(outputs)
    for chain, slope in zip(outputs, several, strict=True):
        torch.testing.assert_close(grad(lambda o: one(o, y).sum())(chain), slope)


# ------------------------------------------------------------------ sampling


def data_for(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    if LIKELIHOODS[name].kind == "classes":
        return nn.Linear(2, 3), (x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long())
    columns = {"student_t": 3, "mixture": 6, "evidential_values": 4}.get(name, 2)
    return nn.Linear(2, columns), (x, x[:, 0] + 0.1 * torch.randn(40, generator=generator))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_words_train_and_samplers_warn_of_losses(name: str) -> None:
    model, data = data_for(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained = ob.sample(model, data, ob.Ensemble(epochs=60, lr=0.05), likelihood=name, prior=None)
    assert trained.provenance["likelihood"] == name
    target = target_of(model, data, likelihood=name)
    fresh = ob.fresh(model, 0, 0)
    flat = torch.stack([target.layout.flat(state) for state in (fresh, trained.member(0))]).float()
    start, end = target(flat, target.buffers_for(2)).log_likelihood.tolist()
    assert end > start + 5
    hmc = ob.HMC(draws=2, warmup=2, leapfrog=2, epochs=1)
    if LIKELIHOODS[name].is_density:
        with warnings.catch_warnings():
            warnings.simplefilter("error", LikelihoodWarning)
            ob.sample(model, data, hmc, likelihood=name)
    else:
        with pytest.warns(LikelihoodWarning, match="generalised posterior"):
            ob.sample(model, data, hmc, likelihood=name)


@pytest.mark.parametrize("method", ["swa", "ema", "batchensemble", "masksembles", "mimo"])
def test_trained_networks_of_a_loss_are_no_draws(method: str) -> None:
    head, data = data_for("focal")
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), head)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LikelihoodWarning)
        job_of(model, data, METHODS[method](epochs=1), density={"likelihood": "focal"}, chains=1, seed=0)


class Logistic(Head):
    """A distribution of a user: logistic around a location, with a log scale."""

    name = "logistic"
    layout = "location, log scale"
    reference = "Verhulst, 1838"
    parts = 2

    def log_prob(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        z = (values - parameters[0]) * torch.exp(-parameters[1])
        return F.logsigmoid(z) + F.logsigmoid(-z) - parameters[1]

    def cdf(self, parameters: tuple[Tensor, ...], values: Tensor) -> Tensor:
        return torch.sigmoid((values - parameters[0]) * torch.exp(-parameters[1]))

    def mean(self, parameters: tuple[Tensor, ...]) -> Tensor:
        return parameters[0]

    def std(self, parameters: tuple[Tensor, ...]) -> Tensor:
        return parameters[1].exp() * math.pi / math.sqrt(3)


def test_a_distribution_of_ones_own_is_five_functions() -> None:
    model, data = data_for("laplace")
    head = Logistic()
    networks = ob.sample(model, data, ob.Ensemble(epochs=20, lr=0.05), likelihood=head, chains=2)
    assert networks.provenance["likelihood"] == "logistic"
    found = ob.evaluate(model, networks[:1], data, likelihood=head, coverage=(0.8,), n_resamples=20)
    location, log_scale = ob.predict(model, networks[:1], data[0], quantity="values")[0].double().unbind(1)
    own = scipy.stats.logistic(location.numpy(), log_scale.exp().numpy())
    assert found.in_distribution["nll"].value == pytest.approx(-own.logpdf(data[1].double().numpy()).mean(), rel=1e-6)
    assert found.in_distribution["width_80"].value == pytest.approx(
        np.subtract(*own.interval(0.8)[::-1]).mean(), rel=1e-6
    )


def test_options_of_a_likelihood_are_part_of_the_run(tmp_path: Any) -> None:
    model, data = data_for("focal")
    method = ob.Ensemble(epochs=2)
    mild = replace(Focal(), gamma=1.0)
    ob.sample(model, data, method, likelihood=mild, path=tmp_path / "run")
    ob.sample(model, data, method, likelihood=Focal(gamma=1.0), path=tmp_path / "run")
    with pytest.raises(InputError, match="another likelihood"):
        ob.sample(model, data, method, likelihood=Focal(), path=tmp_path / "run")


def test_ignored_pixels_do_not_reach_the_posterior() -> None:
    model = nn.Conv2d(1, 3, 1)
    x, y = torch.randn(4, 1, 3, 3), torch.randint(3, (4, 3, 3))
    y[:, 0] = 255
    with pytest.raises(InputError, match="class numbers from 0 to 2"):
        target_of(model, (x, y))
    whole = target_of(model, (x, y), ignore_index=255)
    cut = target_of(model, (x[:, :, 1:], y[:, 1:]))
    position = torch.randn(2, 6)
    for first, second in zip(whole(position, whole.buffers_for(2)), cut(position, cut.buffers_for(2)), strict=True):
        if isinstance(first, Tensor):
            torch.testing.assert_close(first, second)
    with pytest.raises(InputError, match="mark values"):
        target_of(model, (x, y.float()), ignore_index=255, noise=1.0)


def test_the_curvature_of_what_is_ignored_is_none() -> None:
    x, y = torch.randn(30, 2), torch.randint(3, (30,))
    y[10:20] = 9
    kept = y != 9
    options: dict[str, Any] = {"start": "model", "likelihood": "categorical"}
    method = ob.Laplace(epochs=0, structure="full")
    model = nn.Linear(2, 3)
    found = ob.approximate(model, (x, y), method, ignore_index=9, **options)
    plain = ob.approximate(model, (x[kept], y[kept]), method, **options)
    for name, value in found.std.items():
        torch.testing.assert_close(value, plain.std[name])


def test_the_table_says_which_is_which() -> None:
    table = likelihood_table()
    for name, one in LIKELIHOODS.items():
        line = next(line for line in table.splitlines() if line.startswith(name + " "))
        assert ("loss only" in line) is not one.is_density and one.reference in line
    assert isinstance(LIKELIHOODS["focal"], ob.Likelihood)
