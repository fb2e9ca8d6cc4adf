"""Diagnostics of Markov chains against arviz-stats, against theory, and against what must not change them."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats as arviz
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onebasin.errors import InputError
from onebasin.metrics.chains import (
    BLOCK_VALUES,
    configurational_temperature,
    ebfmi,
    ess,
    kinetic_temperature,
    mcse,
    rhat,
)

Z = 3.3  # two-sided p = 1e-3
KINDS = ("bulk", "tail", "mean")
PER_PARAMETER: dict[str, Callable[[Tensor], Tensor]] = {
    "rhat rank": rhat,
    "rhat split": lambda values: rhat(values, method="split"),
    "ess bulk": ess,
    "ess tail": lambda values: ess(values, kind="tail"),
    "ess mean": lambda values: ess(values, kind="mean"),
    "mcse": mcse,
}
every_statistic = pytest.mark.parametrize("statistic", PER_PARAMETER.values(), ids=PER_PARAMETER)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def autoregressive(phi: float, *shape: int, seed: int = 0) -> Tensor:
    """Stationary x_t = phi x_t-1 + noise with variance 1; (chains, draws, *shape)."""
    values = gaussian(*shape, seed=seed)
    for t in range(1, shape[1]):
        values[:, t] = phi * values[:, t - 1] + math.sqrt(1 - phi**2) * values[:, t]
    return values


def standing_still(values: Tensor) -> Tensor:
    return (3 * values[:, :1]).round().expand_as(values).clone()


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda values: values,
    "cauchy": lambda values: values / values.roll(1, 0).roll(1, 1),
    "ties": lambda values: (2 * values).round(),
    "two values": lambda values: values.sign(),
    "drift": lambda values: values.cumsum(1),
    "antithetic": lambda values: values.diff(dim=1, prepend=values[:, :1]),
    "apart": lambda values: values + 3 * torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1)),
    "other scales": lambda values: values * 3.0 ** torch.arange(len(values)).view(-1, *[1] * (values.dim() - 1)),
    "constant": lambda values: torch.full_like(values, 2.0),
    "standing still": standing_still,
    "one chain stuck": lambda values: torch.cat([standing_still(values[:1]), values[1:]]),
}


@st.composite
def draws(draw: st.DrawFn, least_chains: int = 1) -> Tensor:
    shape = draw(st.integers(least_chains, 5)), draw(st.integers(4, 70)), *draw(st.sampled_from([(), (3,), (2, 2)]))
    return FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))](gaussian(*shape, seed=draw(st.integers(0, 2**32))))


def by_arviz(statistic: Callable[..., Any], values: Tensor, **options: Any) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.as_tensor(statistic(values.numpy(), chain_axis=0, draw_axis=1, **options))


def ess_by_arviz(values: Tensor, kind: str) -> Tensor:
    return by_arviz(arviz.ess, values, method=kind, **({"prob": 0.05} if kind == "tail" else {}))


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def beyond_rounding(ratio: Tensor) -> Tensor:
    """Infinite where it is a quotient by rounding errors."""
    return ratio.masked_fill(ratio > 1e6, torch.inf)


def geyer_is_settled(chains: np.ndarray[Any, Any]) -> bool:
    """Whether no pair of autocorrelations is so near to zero that rounding decides where Geyer's sequence ends."""
    chains = chains.astype(float)
    covariance = arviz.autocov(chains, axis=1).mean(0)
    n = len(covariance)
    spread = covariance[0] + chains.mean(1).var(ddof=1)
    if spread == 0:
        return True
    rho = 1 - (covariance[0] * n / (n - 1) - covariance) / spread
    rho[0] = 1
    pairs = rho[: n // 2 * 2].reshape(-1, 2).sum(1)
    return bool((np.abs(pairs) > 1e-10).all())


def settled(values: Tensor, kind: str) -> bool:
    """The same for all parameters and for what an effective sample size of this kind looks at."""
    parameters = np.moveaxis(values.flatten(2).numpy() if values.dim() > 2 else values[..., None].numpy(), 2, 0)
    if kind == "tail":
        return all(
            geyer_is_settled(arviz._split_chains(one <= np.quantile(one, level)))
            for one in parameters
            for level in (0.05, 0.95)
        )
    split = [arviz._split_chains(one) for one in parameters]
    return all(geyer_is_settled(arviz._z_scale(one) if kind == "bulk" else one) for one in split)


# Against arviz-stats.


@settings(max_examples=150, deadline=None)
@given(values=draws(least_chains=2), method=st.sampled_from(["rank", "split"]))
def test_rhat_is_that_of_arviz(values: Tensor, method: Any) -> None:
    found, expected = rhat(values, method), by_arviz(arviz.rhat, values, method=method)
    assert found.dtype == torch.float64
    assert found.shape == values.shape[2:]
    assert_same(beyond_rounding(found), beyond_rounding(expected))


@settings(max_examples=200, deadline=None)
@given(values=draws(), kind=st.sampled_from(KINDS))
def test_ess_is_that_of_arviz(values: Tensor, kind: Any) -> None:
    assume(settled(values, kind))
    found = ess(values, kind)
    assert found.dtype == torch.float64
    assert found.shape == values.shape[2:]
    assert_same(found, ess_by_arviz(values, kind))


@settings(max_examples=50, deadline=None)
@given(values=draws())
def test_mcse_is_that_of_arviz(values: Tensor) -> None:
    assume(settled(values, "mean"))
    assert_same(mcse(values), by_arviz(arviz.mcse, values, method="mean"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_long_chains_of_every_family_agree_with_arviz(family: str) -> None:
    values = FAMILIES[family](gaussian(4, 501, 6, seed=5))
    assert_same(beyond_rounding(rhat(values)), beyond_rounding(by_arviz(arviz.rhat, values)))
    for kind in KINDS:
        assert settled(values, kind)
        assert_same(ess(values, kind), ess_by_arviz(values, kind))


@settings(max_examples=30, deadline=None)
@given(values=draws())
def test_ebfmi_is_that_of_arviz(values: Tensor) -> None:
    energy = values.flatten(2)[..., 0] if values.dim() > 2 else values
    with np.errstate(all="ignore"):
        expected = torch.as_tensor(arviz.bfmi(energy.numpy()))
    assert_same(ebfmi(energy), expected)


def test_one_chain_is_compared_with_itself() -> None:
    values = gaussian(1, 101)  # arviz gives NaN here, though its parts do not
    split = arviz._split_chains(values.numpy())
    bulk, tail = (arviz._rhat(scale(split)) for scale in (arviz._z_scale, arviz._z_fold))
    assert_same(rhat(values), torch.tensor(max(bulk, tail)))
    assert rhat(values.sort(dim=1).values) > 1.5


# Against theory.


@pytest.mark.parametrize("phi", [-0.4, 0.0, 0.5, 0.9])
def test_ess_of_an_autoregression_is_the_one_of_theory(phi: float) -> None:
    ratio = ess(autoregressive(phi, 4, 2000, 200), kind="mean") / (8000 * (1 - phi) / (1 + phi))
    # Cutting the sum leaves a bias; it must stay below the Monte-Carlo error of a single estimate.
    assert abs(ratio.mean() - 1) < ratio.std()
    assert ratio.std() < 0.2


@pytest.mark.parametrize("phi", [-0.4, 0.0, 0.5, 0.9])
def test_means_are_as_far_from_the_truth_as_their_error_says(phi: float) -> None:
    values = autoregressive(phi, 4, 2000, 500, seed=1)
    squares = (values.mean((0, 1)) / mcse(values)).square()
    assert abs(squares.mean() - 1) < Z * math.sqrt(2 / 500)


def test_agreement_and_disagreement() -> None:
    values = gaussian(4, 1000, 50)
    assert rhat(values).max() < 1.02
    assert rhat(FAMILIES["apart"](values)).min() > 1.5
    assert rhat(FAMILIES["drift"](values)).min() > 1.05
    scales = FAMILIES["other scales"](values)
    assert rhat(scales).min() > 1.1
    assert rhat(scales, method="split").max() < 1.1  # blind to scales, which is why ranks are folded


def test_ebfmi_in_closed_form() -> None:
    n = 10
    ramp, alternating = torch.arange(n).float(), torch.arange(n).float() % 2
    found = ebfmi(
        torch.stack([ramp, 3 - 5 * ramp, alternating, torch.full((n,), 0.1), ramp.where(ramp > 0, torch.nan)])
    )
    nan = torch.nan
    expected = torch.tensor([12 / (n * (n + 1)), 12 / (n * (n + 1)), 4 * (n - 1) / n, nan, nan], dtype=torch.float64)
    assert_same(found, expected)


def test_ebfmi_of_independent_energies_is_two() -> None:
    chains, n = 400, 100
    variance = 4 * (n - 2) / ((n + 1) * (n - 1))  # of von Neumann's ratio
    assert abs(ebfmi(gaussian(chains, n)).mean() - 2) < Z * math.sqrt(variance / chains)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 4.0])
def test_temperatures_of_gaussian_draws(temperature: float) -> None:
    d, count = 50, 2000
    error = temperature * math.sqrt(2 / (d * count))
    mass = torch.linspace(0.5, 3, d, dtype=torch.float64)
    noise = math.sqrt(temperature) * gaussian(4, count // 4, d)
    found = kinetic_temperature(noise * mass.sqrt(), mass)
    assert found.shape == (4, count // 4)
    assert abs(found.mean() - temperature) < Z * error
    assert abs(kinetic_temperature(noise * 2, mass=4.0).mean() - temperature) < Z * error
    # U = sum of k theta^2 / 2 has the gradient k theta and draws N(0, T / k)
    theta = noise / mass.sqrt()
    assert abs(configurational_temperature(theta, mass * theta).mean() - temperature) < Z * error


def test_configurational_temperature_of_a_quartic_well() -> None:
    temperature, d, count = 0.7, 20, 5000
    fourth = 4 * temperature * np.random.default_rng(0).gamma(0.25, size=(count, d))  # theta^4 / 4 T is Gamma(1/4)
    theta = torch.as_tensor(fourth**0.25)
    found = configurational_temperature(theta, theta**3)
    assert abs(found.mean() - temperature) < Z * 2 * temperature / math.sqrt(d * count)


# What must not change it.


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), statistic=st.sampled_from([*PER_PARAMETER]))
def test_the_order_of_chains_does_not_matter(seed: int, statistic: str) -> None:
    values = autoregressive(0.5, 4, 51, 3, seed=seed)
    assume(all(settled(values, kind) for kind in KINDS))
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    assert_same(PER_PARAMETER[statistic](values[order]), PER_PARAMETER[statistic](values))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ranks_do_not_feel_monotone_maps(seed: int) -> None:
    values = autoregressive(0.5, 3, 40, 3, seed=seed)
    for kind in ("bulk", "tail"):
        assert torch.equal(ess(values.exp(), kind), ess(values, kind))
    # Distances from the median feel all maps that are not affine; the two middle values tie, so no rounding is allowed.
    assert_same(rhat(-4 * values), rhat(values))


@every_statistic
def test_parameters_are_judged_one_by_one(statistic: Callable[[Tensor], Tensor]) -> None:
    values = autoregressive(0.5, 3, 1000, 2, 61, seed=2)  # more than one block
    assert values.numel() > BLOCK_VALUES
    together = statistic(values)
    assert together.shape == (2, 61)
    assert_same(statistic(values[:, :, 1, 60]), together[1, 60])
    assert_same(statistic(values.transpose(2, 3)), together.T)


@every_statistic
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_floating_type_is_computed_in_float64(statistic: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    values = gaussian(2, 30, 3).to(dtype).requires_grad_()
    found = statistic(values)
    assert not found.requires_grad
    assert torch.equal(found, statistic(values.detach().double()))


# Where there is nothing to tell.


@every_statistic
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_spoils_only_its_parameter(
    statistic: Callable[[Tensor], Tensor], bad: float
) -> None:
    values = gaussian(3, 21, 4)
    expected = statistic(values)
    values[1, 10, 2] = bad  # the middle of an odd chain, which splitting drops
    values[:, :, 3] = bad
    found = statistic(values)
    assert_same(found[:2], expected[:2])
    assert found[2:].isnan().all()


@settings(deadline=None)
@given(value=st.floats(-1e6, 1e6), chains=st.integers(1, 9), count=st.integers(4, 300), parameters=st.integers(1, 3))
def test_constants(value: float, chains: int, count: int, parameters: int) -> None:
    values = torch.full((chains, count, parameters), value, dtype=torch.float64)
    nothing = torch.zeros(parameters, dtype=torch.float64)
    assert rhat(values).isnan().all()
    assert rhat(values, method="split").isnan().all()
    for kind in KINDS:
        assert torch.equal(ess(values, kind), nothing + chains * (count // 2 * 2))
    assert torch.equal(mcse(values), nothing)
    assert ebfmi(values[..., 0]).isnan().all()
    if chains > 1:
        apart = values + torch.arange(chains)[:, None, None]
        assert torch.equal(rhat(apart), nothing + torch.inf)
        assert torch.equal(rhat(apart, method="split"), nothing + torch.inf)


@every_statistic
def test_no_parameters_give_no_results(statistic: Callable[[Tensor], Tensor]) -> None:
    assert statistic(torch.zeros(2, 10, 3, 0)).shape == (3, 0)


@every_statistic
@pytest.mark.parametrize(
    "values", [torch.zeros(2, 3, 5), torch.zeros(0, 10), torch.zeros(10), torch.zeros(2, 10).int()]
)
def test_what_is_no_draws_is_refused(statistic: Callable[[Tensor], Tensor], values: Tensor) -> None:
    with pytest.raises(InputError, match=r"expected .* found"):
        statistic(values)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rhat(torch.zeros(2, 10), method="bulk"),  # type: ignore[arg-type]
        lambda: ess(torch.zeros(2, 10), kind="median"),  # type: ignore[arg-type]
        lambda: ebfmi(torch.zeros(2, 10, 3)),
        lambda: ebfmi(torch.zeros(2, 3)),
        lambda: kinetic_temperature(torch.tensor(1.0)),
        lambda: kinetic_temperature(torch.zeros(3, 0)),
        lambda: kinetic_temperature(torch.zeros(3).int()),
        lambda: kinetic_temperature(torch.zeros(4, 3), torch.ones(4)),
        lambda: kinetic_temperature(torch.zeros(4, 3), torch.ones(4, 3)),
        lambda: kinetic_temperature(torch.zeros(4, 3), torch.tensor([1.0, 0.0, 1.0])),
        lambda: kinetic_temperature(torch.zeros(4, 3), math.nan),
        lambda: configurational_temperature(torch.zeros(4, 3), torch.zeros(3)),
        lambda: configurational_temperature(torch.zeros(3), torch.zeros(3, dtype=torch.complex64)),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], Tensor]) -> None:
    with pytest.raises(InputError, match=r"expected .* found"):
        call()


# Many parameters.


class LargestTensor(TorchDispatchMode):
    """Remembers the most bytes that one operation allocated for a result; views are no allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_memory = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **kwargs or {})
        for result in tree_leaves(out):
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given_memory:
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return out


@every_statistic
def test_memory_does_not_grow_with_parameters(statistic: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(4, 250, 5000, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        statistic(values)
    assert BLOCK_VALUES < largest.bytes <= 20 * BLOCK_VALUES  # a complex spectrum has 16 bytes per value, and some pad


def test_a_hundred_thousand_parameters_in_one_call() -> None:
    values = torch.randn(4, 250, 100_000, generator=torch.Generator().manual_seed(0))
    with LargestTensor() as largest:
        found = ess(values, kind="mean")
    assert largest.bytes <= 20 * BLOCK_VALUES
    few = values[:, :, ::9973]
    assert_same(found[::9973], ess_by_arviz(few.double(), "mean"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak of a process has other units")
def test_temperatures_take_no_second_copy() -> None:
    code = """
import resource, torch
from onebasin.metrics import configurational_temperature, kinetic_temperature
values = torch.randn(1000, 50_000, generator=torch.Generator().manual_seed(0))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kinetic_temperature(values), configurational_temperature(values, values)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 50_000_000  # a quarter of the values
