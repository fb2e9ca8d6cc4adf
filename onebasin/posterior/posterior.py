"""A density over the weights of one architecture, as a mixture of Gaussians; and its file.

The file is one safetensors file: tensors by role, everything else as JSON in the header; nothing is unpickled. Names
are `weights`, `<m>.centre`, `<m>.shape.<tensor>` for the covariance and `<m>.rest.<tensor>` for the buffers of
component m. Of tensors that are equal bit for bit the first is written; `same` in the header maps further names to its
name. Tensors of zeros are not written: `zeros` in the header is their spec. (Files of version 1 have every tensor.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, OnebasinError, SpecError, StorageError, explained
from onebasin.functional import (
    AnyInputs,
    inputs_of,
    refreshed,
    statistics_in,
    warn_stale,
)
from onebasin.population import Population
from onebasin.posterior.families import covariance_class
from onebasin.posterior.figures import LayerMap, Spread, chosen_tensor, refined_items
from onebasin.posterior.gaussian import Covariance, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.reporting import Column, Number, Record, Result, Table, encode, result_record
from onebasin.state import Spec, State, as_spec, check_state, spec_from_json, spec_to_json
from onebasin.storage import make_folder, need_space, read_header, read_tensors, write_tensors

_PROBES = 16  # numbers of a tensor by which most unequal ones are told apart


class UniqueTensors(NamedTuple):
    """Tensors without repetition.

    Attributes:
        tensors: those that have to be written.
        same: name of another tensor -> name of the one it equals bit for bit.
        zeros: further tensors, of zeros only.
    """

    tensors: dict[str, Tensor]
    same: dict[str, str]
    zeros: dict[str, Tensor]


def unique_tensors(tensors: Mapping[str, Tensor]) -> UniqueTensors:
    """Sort tensors `<component>.<role>` into those that have to be written, repetitions within a role, and zeros.

    >>> unique = unique_tensors({"0.scale": torch.ones(2), "1.scale": torch.ones(2), "0.centre": torch.zeros(2)})
    >>> list(unique.tensors), unique.same, list(unique.zeros)
    (['0.scale'], {'1.scale': '0.scale'}, ['0.centre'])
    """
    unique = UniqueTensors({}, {}, {})
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, value in tensors.items():
        bits = _bits(value)
        if not bool(bits.any()):
            unique.zeros[name] = value
            continue
        probes = bits[:: max(1, len(bits) // _PROBES)].tolist()
        candidates = alike.setdefault((name.partition(".")[2], value.dtype, tuple(value.shape), *probes), [])
        first = next((other for other in candidates if torch.equal(_bits(unique.tensors[other]), bits)), None)
        if first is None:
            unique.tensors[name] = value
            candidates.append(name)
        else:
            unique.same[name] = first
    return unique


def storage_of(components: Sequence[Gaussian]) -> float:
    """Numbers needed to write the Gaussians down, divided by D: a mean and a standard deviation are 2 networks.

    Numbers, not bytes: those of float16 networks are kept in float32, and take twice the bytes of such a network.

    >>> from onebasin.posterior.gaussian import Diagonal
    >>> storage_of([Gaussian(torch.zeros(3) + shift, Diagonal(torch.ones(3))) for shift in (1, 2)])
    3.0
    """
    named = {
        f"{index}.{role}": value
        for index, component in enumerate(components)
        for role, value in {"centre": component.centre, **component.covariance.tensors()}.items()
    }
    return sum(value.numel() for value in unique_tensors(named).tensors.values()) / max(1, components[0].size)


def same_covariance(a: Covariance, b: Covariance) -> bool:
    """Whether two Gaussians spread alike, bit for bit."""
    left, right = a.tensors(), b.tensors()
    return a.kind == b.kind and left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)))


def _bits(value: Tensor) -> Tensor:
    """The bytes of a tensor (n,): 0 and -0 differ, and NaN equals itself."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


FORMAT = "onebasin-posterior"


def is_posterior(path: Path) -> bool:
    """Whether a file holds a posterior, by its header."""
    return path.suffix == ".safetensors" and path.is_file() and read_header(path).metadata.get("onebasin") == FORMAT


VERSION = 2
_COUNTS = (".shape.places", ".shape.size")  # whole numbers among the tensors of a covariance
_ZEROS, _TIMES = 1 << 30, 64  # bytes of zeros that a file may stand for: so many, or so many times its tensors


class Parts(NamedTuple):
    """The parts of a posterior, as its file holds them."""

    components: tuple[Gaussian, ...]
    weights: Tensor
    layout: FlatLayout
    buffers: tuple[State, ...]
    provenance: Mapping[str, Any]


def unique_parts(parts: Parts) -> UniqueTensors:
    """All tensors of a posterior by the names of the file, without repetition."""
    tensors: State = {"weights": parts.weights}
    for index, (component, buffers) in enumerate(zip(parts.components, parts.buffers, strict=True)):
        tensors[f"{index}.centre"] = component.centre
        tensors |= {f"{index}.shape.{name}": value for name, value in component.covariance.tensors().items()}
        tensors |= {f"{index}.rest.{name}": value for name, value in buffers.items()}
    return unique_tensors(tensors)


def write_parts(path: Path, parts: Parts) -> None:
    """Write a posterior; readers see the whole file or the one before."""
    once = unique_parts(parts)
    facts = _facts(parts) | {"same": json.dumps(once.same), "zeros": spec_to_json(as_spec(once.zeros))}
    make_folder(path.parent)
    need_space(path.parent, sum(value.nbytes for value in once.tensors.values()))
    write_tensors(path, once.tensors, facts)


def read_parts(path: Path) -> Parts:
    """Read back what `write_parts` wrote."""
    kind = "a folder" if path.is_dir() else "another kind of file"
    facts = {} if path.is_dir() else read_header(path).metadata
    if facts.get("onebasin") != FORMAT:
        raise StorageError(
            f"expected a posterior in {path}, found {kind}: open networks with Population.open, and fit a posterior to "
            "them with ob.fit"
        )
    if facts.get("version") not in ("1", str(VERSION)):
        raise StorageError(f"{path} has version {facts.get('version')}, expected 1 to {VERSION}: upgrade onebasin")
    tensors, _ = read_tensors(path)
    try:
        return _parts(_all(tensors, facts), facts)
    except (KeyError, ValueError, TypeError, RuntimeError, OnebasinError) as error:  # torch has no better class
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> StorageError:
    """The error of a file whose parts contradict each other."""
    return StorageError(
        f"expected a whole posterior in {path}, found one whose parts do not fit ({error}): save it again"
    )


def _facts(parts: Parts) -> dict[str, str]:
    layout = parts.layout
    try:
        provenance = json.dumps(dict(parts.provenance))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"expected a provenance of plain JSON values, found one that is not ({error}): leave such values out"
        ) from error
    return {
        "onebasin": FORMAT,
        "version": str(VERSION),
        "spec": spec_to_json(layout.spec),
        "names": json.dumps(layout.names),
        "tied": json.dumps(dict(layout.tied)),
        "kinds": json.dumps([component.covariance.kind for component in parts.components]),
        "provenance": provenance,
    }


def _all(tensors: State, facts: Mapping[str, str]) -> State:
    """The tensors of a file, and those that it does not repeat."""
    if facts["version"] == "1":
        return tensors
    spec = spec_from_json(facts["zeros"])
    if sum(tensor.nbytes for tensor in spec.values()) > max(
        _ZEROS, _TIMES * sum(tensor.nbytes for tensor in tensors.values())
    ):
        raise ValueError("zeros beyond all measure")  # a header of a few bytes could ask for any amount of memory
    zeros = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in spec.items()}
    same = {name: tensors[first] for name, first in _read(facts["same"], dict).items()}
    return {**tensors, **zeros, **same}


def _parts(tensors: State, facts: Mapping[str, str]) -> Parts:
    spec = spec_from_json(facts["spec"])
    layout = FlatLayout(tuple(_read(facts["names"], list)), spec, _read(facts["tied"], dict))
    kinds: list[str] = _read(facts["kinds"], list)
    _check_numbers(tensors, layout)
    components = tuple(
        Gaussian(tensors[f"{index}.centre"], covariance_class(kind).from_tensors(_under(tensors, f"{index}.shape.")))
        for index, kind in enumerate(kinds)
    )
    buffers = tuple(_under(tensors, f"{index}.rest.") for index in range(len(kinds)))
    provenance: dict[str, Any] = _read(facts["provenance"], dict)
    return Parts(components, tensors["weights"], layout, buffers, provenance)


def _check_numbers(tensors: State, layout: FlatLayout) -> None:
    """Refuse files whose centres, spreads or weights are no real numbers that can be computed with."""
    counted = {name: tensor for name, tensor in tensors.items() if ".rest." not in name and not name.endswith(_COUNTS)}
    kinds = {name: tensor.dtype for name, tensor in counted.items()}
    kinds |= {name: layout.spec[name].dtype for name in layout.names}
    if wrong := [name for name, kind in kinds.items() if not kind.is_floating_point or kind.itemsize < 2]:
        raise TypeError(f"expected real numbers in {wrong[0]}, found {kinds[wrong[0]]}")
    if wrong := [name for name, tensor in tensors.items() if name.endswith(_COUNTS) and tensor.dtype != torch.int64]:
        raise TypeError(f"expected whole numbers in {wrong[0]}, found {tensors[wrong[0]].dtype}")


def _read(text: str, kind: type) -> Any:
    """A JSON value of a kind."""
    value = json.loads(text)
    if not isinstance(value, kind):
        raise TypeError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value


def _under(tensors: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True, eq=False, repr=False)
class Posterior(Result):
    """The density sum_m weights_m N(centre_m, covariance_m); a mixture of one is an ordinary Gaussian.

    Attributes:
        components: the Gaussians, all of size D.
        weights: how much each counts, float64 (M,), sum 1.
        layout: what the flat vector means.
        buffers: per component, the tensors of a network that are not in the vector, such as running statistics.
        provenance: where the posterior comes from, JSON-able.
    """

    components: tuple[Gaussian, ...]
    weights: Tensor
    layout: FlatLayout
    buffers: tuple[State, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.components)
        if not count or len(self.buffers) != count or tuple(self.weights.shape) != (count,):
            raise InputError(
                f"expected at least one component, each with a weight and buffers, found {count} components, weights "
                f"{tuple(self.weights.shape)} and {len(self.buffers)} sets of buffers: give one of each per component"
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
        expected = {name: self.spec[name] for name in self.layout.buffer_names}
        for index, buffers in enumerate(self.buffers):
            check_state(buffers, expected, where=f"the buffers of component {index}")

    @classmethod
    def equal(
        cls,
        components: list[Gaussian],
        layout: FlatLayout,
        buffers: list[State],
        *,
        provenance: Mapping[str, Any] | None = None,
    ) -> Posterior:
        """A mixture in which all components count the same; `buffers` may be wider than the spec."""
        weights = torch.full((len(components),), 1 / max(1, len(components)), dtype=torch.float64)
        narrow = [
            {name: component[name].to(layout.spec[name].dtype) for name in layout.buffer_names} for component in buffers
        ]
        return cls(tuple(components), weights, layout, tuple(narrow), provenance or {})

    @property
    def spec(self) -> Spec:
        """Shapes and dtypes of a whole network."""
        return self.layout.spec

    @property
    def storage(self) -> float:
        """Storage in networks: the numbers of all centres and covariances, divided by D.

        What components share counts once. Numbers, not bytes: see `nbytes`.
        """
        return storage_of(self.components)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file that `save` writes, without its header."""
        return sum(value.nbytes for value in unique_parts(self._parts).tensors.values())

    @property
    def pooled(self) -> bool:
        """Whether several components share one spread, as they are now and not as they were fitted."""
        first, *further = (component.covariance for component in self.components)
        return bool(further) and all(same_covariance(first, other) for other in further)

    @property
    def description(self) -> str:
        """Kind, number of weights and storage in one line."""
        kinds = "/".join(dict.fromkeys(component.covariance.kind.replace("_", "-") for component in self.components))
        what = f"{len(self.components)} {kinds} Gaussians" if len(self.components) > 1 else f"one {kinds} Gaussian"
        return f"{what} over {self.layout.size:,} weights, {self.storage:g} networks of storage"

    def record(self) -> Record:
        """Tables of tensors, of storage and of what `refine` did; standard deviations of all weights and of tensors."""
        return _record_of(self, None)

    def plot(self, ax: Any = None, *, figure: str | None = None, before: Posterior | None = None) -> Any:
        """Draw a figure of this posterior in the style of the reports.

        Args:
            ax: matplotlib axes to draw on; None makes new ones.
            figure: "sigma", the standard deviations of all weights, which is the first; "layers", those of each tensor.
            before: a posterior to compare with, such as the fit of the same networks before they were aligned.

        Returns:
            The matplotlib axes.
        """
        if before is None:
            return super().plot(ax, figure=figure)
        return Beside(self, before).plot(ax, figure=figure)

    @property
    def mean(self) -> State:
        """The mean network; of integer tensors the first component's."""
        return self._one(self.flat_mean, self._average())

    @property
    def std(self) -> State:
        """The standard deviation of every weight, within and between components; zero for what is not uncertain.

        In the dtypes of a network, where a small one may round to zero: `flat_std` is not rounded.
        """
        zero = {name: torch.zeros_like(value) for name, value in self.buffers[0].items()}
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
            variance += weight * (component.covariance.std().double().square() + gap.square())
        return variance.sqrt()

    @property
    def constant_statistics(self) -> frozenset[str]:
        """Names of running means that are constants of the function and stay as they are in every draw.

        They were the same in all networks of the fit, as after HMC, which samples in evaluation mode, or where norms
        were frozen; or the posterior was refined with them (`refine(..., statistics=False)`).
        """
        names = self.provenance.get("constant_statistics", ())
        return frozenset(map(str, names)) if isinstance(names, list | tuple) else frozenset()

    @property
    def own_statistics(self) -> tuple[str, ...]:
        """Names of running means that should be measured anew for each draw, as torch's norms call them."""
        return tuple(name for name in statistics_in(self.layout.buffer_names) if name not in self.constant_statistics)

    @explained
    def draw(
        self,
        n: int,
        generator: torch.Generator,
        *,
        model: nn.Module | None = None,
        statistics: AnyInputs = None,
    ) -> Population:
        """Networks drawn from the mixture, ordered by component, which is their `chain`.

        Components get their share of the draws as exactly as whole numbers allow, so the M k draws of a mixture of M
        equal ones are k each; what is left over is drawn by systematic sampling, with the right expectation.

        Args:
            n: number of networks.
            generator: random numbers of the draws.
            model: the function, for `statistics`.
            statistics: inputs, such as those of training, on which the running statistics of norms are measured for
                each draw. False: leave them at the averages of the networks that the posterior was fitted to. None: the
                same, with a warning where there are such statistics.

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
        buffers = {name: torch.stack([own[name] for own in self.buffers])[chain] for name in self.layout.buffer_names}
        stacked = self.layout.networks(torch.cat(drawn), buffers)
        if statistics is None and self.own_statistics:
            remedy = "give draw model= and statistics=, inputs such as those of training, or statistics=False to say so"
            warn_stale("draws of this posterior", self.own_statistics, remedy)
        elif statistics is not None and statistics is not False and model is not None:
            stacked, _ = refreshed(model, stacked, inputs_of(statistics, model), constant=self.constant_statistics)
        return Population.from_stacked(stacked, chain=chain, provenance=dict(self.provenance))

    def log_density(self, state: Mapping[str, Tensor]) -> float:
        """The log density at a network, over its uncertain weights."""
        check_state(state, self.spec, where="the network")
        flat = self.layout.flat(state)
        each = torch.stack([component.log_density(flat) for component in self.components])
        return float(torch.logsumexp(each + self.weights.to(each).log(), 0))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one safetensors file; a file of this name is replaced when the new one is whole.

        With a path that ends in .json only the record for reports is written, as of any result.
        """
        if Path(path).suffix == ".json":
            return super().save(path)
        write_parts(Path(path), self._parts)
        return Path(path)

    @property
    def _parts(self) -> Parts:
        return Parts(self.components, self.weights, self.layout, self.buffers, self.provenance)

    def _average(self) -> State:
        """The average of floating-point tensors beside the vector; of others the first."""
        weights = self.weights.tolist()
        return {
            name: value
            if not value.is_floating_point()
            else sum(
                (weight * component[name].double() for weight, component in zip(weights, self.buffers, strict=True)),
                torch.zeros_like(value, dtype=torch.float64),
            )
            for name, value in self.buffers[0].items()
        }

    def _one(self, flat: Tensor, buffers: State) -> State:
        stacked = self.layout.networks(flat[None], {name: value[None] for name, value in buffers.items()})
        return {name: value[0] for name, value in stacked.items()}


@dataclass(frozen=True, eq=False, repr=False)
class Beside(Result):
    """A posterior, and another one that its standard deviations are drawn beside."""

    posterior: Posterior
    before: Posterior

    def record(self) -> Record:
        """That of the posterior, with both in its figures."""
        if not isinstance(self.before, Posterior):
            raise InputError(
                f"expected a Posterior as before=, found a {type(self.before).__name__}: give fit(population)"
            )
        return _record_of(self.posterior, self.before)


def _record_of(posterior: Posterior, before: Posterior | None) -> Record:
    spread = _spread_of(posterior)
    other = None if before is None else _spread_of(before)
    known = spread.table()
    median = known.rows[0][4]
    assert isinstance(median, Number)
    texts, items = refined_items(posterior.provenance)
    storage = Table(
        "storage",
        "What is stored",
        (
            Column(""),
            Column("components", digits=0),
            Column("weights", digits=0),
            Column("storage in networks", digits=2),
            Column("megabytes"),
        ),
        (
            (
                "posterior",
                *map(
                    Number,
                    (len(posterior.components), posterior.layout.size, posterior.storage, posterior.nbytes / 1e6),
                ),
            ),
        ),
    )
    answer = (
        f"{posterior.description[:1].upper()}{posterior.description[1:]}; the median standard deviation of a weight is "
        f"{median.value or 0.0:.4g}; the file takes {posterior.nbytes / 1e6:,.3g} MB."
    )
    rows = {
        str(row[0]): {column.name: cell.value for column, cell in zip(known.columns, row, strict=True)
                      if isinstance(cell, Number)}
        for row in known.rows
    }  # fmt: skip
    return result_record(
        "posterior",
        "Refined posterior" if "refined" in posterior.provenance else "Posterior",
        (answer, *texts),
        (known, storage, spread.histogram(other), spread.layers(other), *items),
        values={"storage": posterior.storage, "nbytes": posterior.nbytes, "weights": posterior.layout.size,
                "components": len(posterior.components), "tensors": rows,
                "provenance": encode(dict(posterior.provenance))},
    )  # fmt: skip


def _spread_of(posterior: Posterior) -> Spread:
    return Spread(posterior.layout, posterior.flat_mean, posterior.flat_std)


def layer_map(posterior: Posterior, name: str) -> LayerMap:
    """Mean and standard deviation of one tensor of a posterior as heat maps: `layer_map(posterior, "0.weight").plot()`.

    A matrix is drawn as it is, a convolution as a grid of units by inputs times places of the kernel, a vector as one
    row. More than 200 rows or columns are averaged down to 200, and the caption says so.

    Args:
        posterior: best of an aligned population: before alignment the means of many networks are about zero.
        name: of the tensor, as in the state dict.

    Raises:
        InputError: the posterior has no such tensor.
    """
    if not isinstance(posterior, Posterior):
        raise InputError(f"expected a Posterior, found a {type(posterior).__name__}: give fit(population)")
    layout, own = posterior.layout, chosen_tensor(posterior.layout, name)
    return LayerMap(name, layout.shaped(posterior.flat_mean)[own], layout.shaped(posterior.flat_std)[own])


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
    """Number of draws for each component out of n, int64 (M,): floor(n w), what is left by systematic sampling."""
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
