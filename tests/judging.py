"""What the tests of samplers judge by: exact answers, and z-tests whose error is that of Monte Carlo itself."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.methods import METHODS
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Target, target_of

# |z| of a normal number exceeds this with probability 7e-6. Seeds are fixed, and a few hundred such comparisons are
# made in all, so a failure is a bug and no accident.
Z = 4.5


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(*size, generator=seeded(seed), dtype=torch.float64)


def assert_mean(values: Tensor, expected: Tensor | float) -> None:
    """Independent draws (n, ...) average to `expected` within Z standard errors."""
    values = values.double()
    error = values.std(0) / len(values) ** 0.5
    z = (values.mean(0) - expected) / error
    assert bool((z.abs() < Z).all()), f"z = {z}"


def assert_standard(values: Tensor) -> None:
    """Independent draws (n, d) have the first two moments of N(0, I); errors are those of the normal itself.

    var(mean) = 1 / n;  var(x_i^2) = 2, var(x_i x_j) = 1 for i != j. All entries together are n d independent draws,
    which sees a spread that is slightly wrong everywhere.
    """
    count, size = values.shape
    values = values.double()
    z_mean = values.mean(0) * count**0.5
    second = values.T @ values / count
    spread = 1 + torch.eye(size, dtype=torch.float64)
    z_second = (second - torch.eye(size, dtype=torch.float64)) * (count / spread).sqrt()
    z_spread = float(values.square().mean() - 1) * (values.numel() / 2) ** 0.5
    assert abs(z_spread) < Z, f"z of the spread = {z_spread}"
    assert bool((z_mean.abs() < Z).all()), f"z of means = {z_mean}"
    assert bool((z_second.abs() < Z).all()), f"z of second moments = {z_second}, second moments {second}"


class Together(Streams):
    """One stream for all chains, for tests with thousands of them; a chain's numbers depend on the others here."""

    def __init__(self, seed: int, chains: int) -> None:
        super().__init__(seed, range(chains), 0)
        self.generator = seeded(seed)

    def gaussian(self, purpose: str, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self.generator, dtype=like.dtype)

    def uniform(self, purpose: str) -> Tensor:
        return torch.rand(len(self.chains), generator=self.generator, dtype=torch.float64)


def started(target: Target, position: Tensor) -> Draws:
    chains = len(position)
    return Draws(position, target.buffers_for(chains), torch.full((chains,), float("nan"), dtype=torch.float64))


def run(kernel: Any, position: Tensor, steps: int, warmup: int = 0, seed: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """The State after some steps of a kernel, and its Info (steps, chains)."""
    streams = Together(seed, len(position))
    state, infos = kernel.init(started(kernel.target, position), streams), []
    for step in range(steps):
        state, info = kernel.step(state, StepIndex(step, warmup), streams)
        infos.append(info)
    return state, {name: torch.stack([info[name] for info in infos]) for name in infos[0]}


def weights_of(population: Any) -> Tensor:
    """All weights of each member side by side, (members, D)."""
    return torch.cat(
        [population.tensor(name).reshape(len(population), -1).double() for name in population.names], dim=1
    )


def split_options(method: str, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The method with those of the options that are its own, and the others."""
    own = {field.name for field in fields(METHODS[method])} & options.keys()
    method_object = METHODS[method](**{name: options[name] for name in own})
    return method_object, {name: value for name, value in options.items() if name not in own}


def sample(model: nn.Module, data: Any = None, method: str = "hmc", **options: Any) -> ob.Population:
    """`onebasin.sample` for tests that have the options of the method and of the run in one dict."""
    own, keywords = split_options(method, options)
    return ob.sample(model, data, own, **keywords)


def approximate(model: nn.Module, data: Any = None, method: str = "vi", **options: Any) -> ob.Posterior:
    """`onebasin.approximate`, likewise."""
    own, keywords = split_options(method, options)
    return ob.approximate(model, data, own, **keywords)


def drawn(model: nn.Module, data: Any, method: str, **options: Any) -> Tensor:
    """Weights (chains * draws, D) of `sample`, whose chains are all computed together."""
    chains = options.setdefault("chains", 1)
    return weights_of(sample(model, data, method, chains_per_batch=chains, compile=False, **options))


@dataclass(frozen=True)
class Conjugate:
    """Bayesian linear regression, whose posterior N(mean, precision^-1) is known; weights, then the bias."""

    x: Tensor
    y: Tensor
    noise: float
    scale: float

    @classmethod
    def of(cls, examples: int, inputs: int = 3, noise: float = 0.7, scale: float = 1.5, seed: int = 3) -> "Conjugate":
        mixing = torch.eye(inputs, dtype=torch.float64) + 0.5 * torch.diag(torch.ones(inputs - 1).double(), 1)
        x = numbers(examples, inputs, seed=seed) @ mixing
        return cls(x, x.sum(1) - 0.5 + noise * numbers(examples, seed=seed + 1), noise, scale)

    @property
    def model(self) -> nn.Module:
        return nn.Linear(self.x.shape[1], 1).double()

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    @property
    def density(self) -> dict[str, Any]:
        return {"noise": self.noise, "prior": self.scale}

    @property
    def target(self) -> Target:
        return target_of(self.model, self.data, noise=self.noise, prior=self.scale)

    @cached_property
    def design(self) -> Tensor:
        return torch.cat([self.x, torch.ones(len(self.x), 1, dtype=torch.float64)], 1)

    @cached_property
    def precision(self) -> Tensor:
        size = self.design.shape[1]
        return self.design.T @ self.design / self.noise**2 + torch.eye(size, dtype=torch.float64) / self.scale**2

    @cached_property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.design.T @ self.y / self.noise**2)

    def whitened(self, draws: Tensor, temperature: float = 1.0) -> Tensor:
        """What is N(0, I) if the draws are those of the posterior at this temperature."""
        return (draws - self.mean) @ torch.linalg.cholesky(self.precision) / temperature**0.5
