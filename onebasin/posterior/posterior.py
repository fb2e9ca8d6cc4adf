"""What inference found, as a density: a mixture of Gaussians over the weights of one architecture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, OnebasinError, SpecError
from onebasin.norms import Measured, refreshed, statistics_in, warn_stale
from onebasin.population import Population
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.gaussian import Gaussian
from onebasin.posterior.storage import same_shape, stored_networks
from onebasin.posterior.store import Parts, damaged, kept_parts, read_parts, write_parts
from onebasin.state import Spec, State, check_state


@dataclass(frozen=True, eq=False, repr=False)
class Posterior:
    """The density sum_m weights_m N(centre_m, covariance_m); a mixture of one is an ordinary Gaussian.

    Attributes:
        components: the Gaussians, all of size D.
        weights: how much each counts, float64 (M,), sum 1.
        layout: what the flat vector means.
        rest: per component, the tensors of a network that are not in the vector, such as running statistics.
        provenance: where the posterior comes from, JSON-able.
    """

    components: tuple[Gaussian, ...]
    weights: Tensor
    layout: Coordinates
    rest: tuple[State, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.components)
        if not count or len(self.rest) != count or tuple(self.weights.shape) != (count,):
            raise InputError(
                f"expected at least one component, each with a weight and a rest, found {count} components, weights "
                f"{tuple(self.weights.shape)} and {len(self.rest)} rests: give one of each per component"
            )
        sizes = {component.size for component in self.components}
        if sizes != {self.layout.size}:
            raise SpecError(
                f"expected Gaussians over the {self.layout.size} weights of the layout, found sizes {sorted(sizes)}: "
                "fit them to this architecture"
            )
        weights = self.weights.double()
        if not bool((weights >= 0).all()) or abs(float(weights.sum()) - 1) > 1e-6:
            raise InputError(
                f"expected weights >= 0 with sum 1, found sum {float(weights.sum()):g}: divide them by their sum"
            )
        expected = {name: self.spec[name] for name in self.layout.others}
        for index, rest in enumerate(self.rest):
            check_state(rest, expected, where=f"the rest of component {index}")

    @classmethod
    def equal(cls, components: list[Gaussian], layout: Coordinates, rest: list[State], **facts: Any) -> Posterior:
        """A mixture in which all components count the same; `rest` may be wider than the spec; facts: provenance."""
        weights = torch.full((len(components),), 1 / max(1, len(components)), dtype=torch.float64)
        narrow = [{name: own[name].to(layout.spec[name].dtype) for name in layout.others} for own in rest]
        return cls(tuple(components), weights, layout, tuple(narrow), **facts)

    @property
    def spec(self) -> Spec:
        """Shapes and dtypes of a whole network."""
        return self.layout.spec

    @property
    def networks(self) -> float:
        """What it costs to store, in networks: how many numbers centres and spreads are, divided by D.

        What components share counts once. Numbers, not bytes: see `nbytes`.
        """
        return stored_networks(self.components)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file that `save` writes, without its header."""
        return sum(value.nbytes for value in kept_parts(self._parts).tensors.values())

    @property
    def pooled(self) -> bool:
        """Whether several components share one spread, as they are now and not as they were fitted."""
        first, *others = (component.shape for component in self.components)
        return bool(others) and all(same_shape(first, other) for other in others)

    def __repr__(self) -> str:
        kinds = "/".join(dict.fromkeys(component.shape.kind.replace("_", "-") for component in self.components))
        what = f"{len(self.components)} {kinds} Gaussians" if len(self.components) > 1 else f"one {kinds} Gaussian"
        return f"Posterior: {what} over {self.layout.size:,} weights, {self.networks:g} networks of storage"

    @property
    def mean(self) -> State:
        """The mean network; of integer tensors the first component's."""
        return self._one(self.flat_mean, self._average())

    @property
    def std(self) -> State:
        """The standard deviation of every weight, within and between components; zero for what is not uncertain.

        In the dtypes of a network, where a small one may round to zero: `flat_std` is not rounded.
        """
        zero = {name: torch.zeros_like(value) for name, value in self.rest[0].items()}
        return self._one(self.flat_std, zero)

    @property
    def flat_mean(self) -> Tensor:
        """The mean of the uncertain weights as a vector, float64 (D,)."""
        total = torch.zeros_like(self.components[0].centre, dtype=torch.float64)
        for weight, component in zip(self.weights.tolist(), self.components, strict=True):
            total += weight * component.centre.double()
        return total

    @property
    def flat_std(self) -> Tensor:
        """The standard deviations of the uncertain weights as a vector, float64 (D,).

        variance = sum_m w_m (variance_m + (centre_m - mean)^2)
        """
        mean = self.flat_mean
        variance = torch.zeros_like(mean)
        for weight, component in zip(self.weights.tolist(), self.components, strict=True):
            gap = component.centre.double() - mean
            variance += weight * (component.shape.std().double().square() + gap.square())
        return variance.sqrt()

    @property
    def constant_statistics(self) -> frozenset[str]:
        """Names of running means that are constants of the function and stay as they are in every draw.

        They were the same in all networks of the fit, as after HMC, which samples in evaluation mode, or where norms
        were frozen; or the posterior was refined with them (`refine(..., statistics=False)`).
        """
        told = self.provenance.get("constant_statistics", ())
        return frozenset(map(str, told)) if isinstance(told, list | tuple) else frozenset()

    @property
    def own_statistics(self) -> tuple[str, ...]:
        """Names of running means that should be measured anew for each draw, as torch's norms call them."""
        return tuple(name for name in statistics_in(self.layout.others) if name not in self.constant_statistics)

    def draw(
        self,
        n: int,
        generator: torch.Generator,
        *,
        model: nn.Module | None = None,
        statistics: Measured = None,
    ) -> Population:
        """Networks drawn from the mixture, ordered by component, which is their `chain`.

        Components get their share of the draws as exactly as whole numbers allow, so the M k draws of a mixture of M
        equal ones are k each; what is left over is drawn by systematic sampling, with the right expectation.

        Args:
            n: number of networks.
            generator: of the draws.
            model: the function, for `statistics`.
            statistics: inputs, such as those of training, on which the running statistics of norms are measured for
                each draw, see `onebasin.norms.refreshed`. False: leave them at the averages of the networks that the
                posterior was fitted to. None: the same, with a warning where there are such statistics.

        Warns:
            StatisticsWarning: draws have running statistics that are not their own.
        """
        if statistics is not None and statistics is not False and model is None:
            raise InputError("statistics= are measured by running the networks: give draw model= too")
        if n < 1:
            raise InputError(f"expected to draw at least 1 network, found n={n}: give a positive number")
        counts = shares(self.weights, n, generator)
        drawn = [
            component.draw_flat(count, generator)
            for component, count in zip(self.components, counts.tolist(), strict=True)
            if count
        ]
        chain = torch.repeat_interleave(torch.arange(len(counts)), counts)
        rest = {name: torch.stack([own[name] for own in self.rest])[chain] for name in self.layout.others}
        stacked = self.layout.networks(torch.cat(drawn), rest)
        if statistics is None and self.own_statistics:
            remedy = "give draw model= and statistics=, inputs such as those of training, or statistics=False to say so"
            warn_stale("draws of this posterior", self.own_statistics, remedy)
        elif statistics is not None and statistics is not False and model is not None:
            stacked, _ = refreshed(model, stacked, statistics, constant=self.constant_statistics)
        return Population.from_stacked(stacked, chain=chain, provenance=dict(self.provenance))

    def log_density(self, state: Mapping[str, Tensor]) -> float:
        """The log density at a network, over its uncertain weights."""
        check_state(state, self.spec, where="the network")
        flat = self.layout.flat(state)
        each = torch.stack([component.log_density(flat) for component in self.components])
        return float(torch.logsumexp(each + self.weights.to(each).log(), 0))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; a file of this name is replaced when the new one is whole."""
        write_parts(Path(path), self._parts)
        return Path(path)

    @property
    def _parts(self) -> Parts:
        return Parts(self.components, self.weights, self.layout, self.rest, self.provenance)

    def _average(self) -> State:
        """The average of floating-point tensors beside the vector; of others the first."""
        weights = self.weights.tolist()
        return {
            name: value
            if not value.is_floating_point()
            else sum(
                (weight * own[name].double() for weight, own in zip(weights, self.rest, strict=True)),
                torch.zeros_like(value, dtype=torch.float64),
            )
            for name, value in self.rest[0].items()
        }

    def _one(self, flat: Tensor, others: State) -> State:
        stacked = self.layout.networks(flat[None], {name: value[None] for name, value in others.items()})
        return {name: value[0] for name, value in stacked.items()}


def load_posterior(path: str | os.PathLike[str]) -> Posterior:
    """Read back what `Posterior.save` wrote, bit for bit.

    Raises:
        StorageError: when the file is absent, cut off, or holds no posterior.
    """
    parts = read_parts(Path(path))
    try:
        return Posterior(*parts)
    except (OnebasinError, TypeError) as error:
        raise damaged(Path(path), error) from error


def shares(weights: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """How many of n draws each component gets, int64 (M,): floor(n w), and the rest by systematic sampling."""
    wanted = n * weights.double().cpu() / weights.double().cpu().sum()
    counts = torch.floor(wanted)
    left = n - int(counts.sum())
    if left:
        ends = (wanted - counts).clamp(min=0).cumsum(0)
        start = torch.rand((), generator=generator, dtype=torch.float64, device=generator.device).cpu()
        points = (start + torch.arange(left)) * (ends[-1] / left)
        places = torch.searchsorted(ends, points, right=True).clamp(max=len(counts) - 1)
        counts += torch.bincount(places, minlength=len(counts))
    return counts.long()
