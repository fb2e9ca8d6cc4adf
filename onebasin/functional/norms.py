"""Running statistics of norms, measured on data for networks that were never trained.

Running means and variances belong to one weight vector. A network that was drawn from a posterior, averaged from others
or taken from the path between two has none of its own: those of the networks it comes from describe activations that it
does not have (Jordan et al., 2023), and its predictions may be worthless. So they are measured on data.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from onebasin.errors import InputError, StatisticsWarning
from onebasin.functional.call import (
    Call,
    Inputs,
    Inventory,
    Vectorised,
    as_seen,
    batches,
    check_fits,
    fixed_buffers,
    floating_dtype,
    mapped,
    member_by_member,
    moved,
    run_with,
    undisturbed,
)
from onebasin.functional.observe import NormCall, Observer
from onebasin.state import State, is_statistic, shared_names

BATCH = 1000  # most examples that are normalised together
ROOM = 256 << 20  # bytes for the activations of one pass
_ALIVE = 3  # activations of the widest norm that a forward pass holds at a time
_LEAST = 32  # examples in a batch, however wide: fewer have statistics of their own
_MEMBERS = 16  # networks in one pass: more gain nothing on a processor


@dataclass
class Moments:
    """Count, mean and sum of squared deviations per unit, in float64.

    Pieces are combined exactly (Chan, Golub and LeVeque): with n and m values of means p and q,

        deviations = deviations_n + deviations_m + (q - p)^2 n m / (n + m),

    the law of total variance. The average of the variances of batches would leave the last term out.

    >>> moments = Moments()
    >>> moments.add(torch.tensor([[1.0], [2.0]]), axis=1)
    >>> moments.add(torch.tensor([[6.0]]), axis=1)
    >>> moments.mean.item(), moments.variance(correction=0).item()
    (3.0, 4.666...)
    """

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(()))
    deviations: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, values: Tensor, axis: int) -> None:
        """Take in values whose units lie on `axis`; all other axes are averaged over."""
        rows = values.movedim(axis, -1).flatten(0, -2)
        rows = rows.float() if rows.dtype.itemsize < 4 else rows
        variance, mean = torch.var_mean(rows, 0, correction=0)
        self.merge(len(rows), mean.double(), variance.double() * len(rows))

    def merge(self, count: int, mean: Tensor, deviations: Tensor) -> None:
        """Take in the moments of `count` other values."""
        old, self.count = self.count, self.count + count
        if not old:
            self.mean, self.deviations = mean, deviations
            return
        gap = mean - self.mean
        self.mean = self.mean + gap * (count / self.count)
        self.deviations = self.deviations + deviations + self.between(gap, old, count)

    def between(self, gap: Tensor, old: int, new: int) -> Tensor:
        """The squared deviations of the means of two pieces, `gap` apart."""
        return gap.square() * (old * new / (old + new))

    def variance(self, correction: int = 1) -> Tensor:
        """Sum of squared deviations over (count - correction), (units,)."""
        if self.count <= correction:
            raise InputError(
                f"a variance needs at least {correction + 1} values per unit, found {self.count}: give more examples"
            )
        return self.deviations / (self.count - correction)

    @property
    def std(self) -> Tensor:
        """Standard deviation with divisor `count`, (units,)."""
        return self.variance(correction=0).sqrt()


class InstanceMoments(Moments):
    """The statistics of an instance norm: averages over examples of the mean and unbiased variance of each.

    `count` are examples, and `deviations` the sum of their variances.
    """

    def add(self, values: Tensor, axis: int) -> None:
        """Take in values (examples, units, ...); `axis` is 1."""
        places = values.flatten(2)
        if places.shape[2] < 2:
            raise InputError(
                f"a variance needs at least 2 values per unit and example, found {places.shape[2]} in an instance norm "
                f"of inputs {tuple(values.shape)}: give larger inputs"
            )
        places = places.float() if places.dtype.itemsize < 4 else places
        variance, mean = torch.var_mean(places, 2, correction=1)
        self.merge(len(places), mean.double().mean(0), variance.double().sum(0))

    def between(self, gap: Tensor, old: int, new: int) -> Tensor:
        """Nothing: how far examples are apart is not counted."""
        return torch.zeros_like(gap)

    def variance(self, correction: int = 1) -> Tensor:
        """The mean variance within an example, (units,); `correction` is 1."""
        return self.deviations / self.count


def normalised(call: NormCall, mean: Tensor, variance: Tensor) -> Tensor:
    """(input - mean) / sqrt(variance + eps) * weight + bias, with statistics (units,).

    torch's own function has no derivative by the statistics, so where gradients are taken it is written out.
    """
    mean, variance = mean.to(call.input.dtype), variance.to(call.input.dtype)
    if not torch.is_grad_enabled():
        return F.batch_norm(call.input, mean, variance, call.weight, call.bias, eps=call.eps)
    shape = (-1, *[1] * (call.input.dim() - 2))
    result = (call.input - mean.reshape(shape)) * (variance + call.eps).rsqrt().reshape(shape)
    if call.weight is not None:
        result = result * call.weight.reshape(shape)
    return result if call.bias is None else result + call.bias.reshape(shape)


class Renormalise(Observer):
    """Measures what goes into norms, and normalises each batch by its own statistics.

    Attributes:
        moments: (name of the running mean, name of the running variance) -> what was measured.
    """

    def __init__(self, tensors: Mapping[str, Tensor], constant: Collection[str] = ()) -> None:
        """Know the tensors of the network, and the running means of norms that stay as they are."""
        super().__init__(tensors)
        self.constant = constant
        self.moments: dict[tuple[str, str], Moments] = {}

    def norm(self, call: NormCall) -> Tensor | None:
        """Measure and normalise; torch keeps the unbiased variance, and so do we."""
        if call.mean in self.constant:
            return None
        kind = InstanceMoments if call.instance else Moments
        batch = kind()
        batch.add(call.input, 1)
        self.moments.setdefault((call.mean, call.variance), kind()).merge(batch.count, batch.mean, batch.deviations)
        return normalised(call, batch.mean, batch.variance())

    def statistics(self) -> State:
        """Running mean and variance by state-dict name, float64."""
        means = {mean: moments.mean for (mean, _), moments in self.moments.items()}
        return means | {variance: moments.variance() for (_, variance), moments in self.moments.items()}


class Given(Observer):
    """Normalises by given statistics, which may carry a gradient, instead of those of the network."""

    def __init__(self, tensors: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Know the tensors of the network, and running means and variances by their names."""
        super().__init__(tensors)
        self.statistics = statistics

    def norm(self, call: NormCall) -> Tensor | None:
        """Normalise, if there are statistics for this norm."""
        if call.mean not in self.statistics:
            return None
        return normalised(call, self.statistics[call.mean], self.statistics[call.variance])


class _NormsUsed(Observer):
    """Notes the norms that are used, and the bytes of the widest of their inputs."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.names: list[str] = []
        self.nbytes = 0

    def norm(self, call: NormCall) -> None:
        self.names += [] if call.mean in self.names else [call.mean]
        self.nbytes = max(self.nbytes, call.input.nbytes)


def tracked(model: nn.Module) -> dict[str, _NormBase]:
    """Layers with running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _NormBase) and module.running_mean is not None
    }


def frozen_norms(model: nn.Module) -> frozenset[str]:
    """State-dict names of the running means that are constants of the function, not statistics of a network.

    A norm is frozen if it stays in evaluation mode while the model is in training mode, or if none of its own
    parameters requires a gradient while some other parameter of the model does.
    """
    trained = any(value.requires_grad for value in model.parameters())
    means = set()
    for name, module in tracked(model).items():
        parameters = list(module.parameters(recurse=False))
        still = bool(parameters) and trained and not any(value.requires_grad for value in parameters)
        if still or (model.training and not module.training):
            means.add(f"{name}.running_mean" if name else "running_mean")
    return frozenset(means)


def norms_used(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, constant: Collection[str] = (), size: int = 2
) -> tuple[str, ...]:
    """Running means of the norms that a forward pass uses, without those that are constants, in the order of use.

    A model without floating-point buffers is not run. Of the inputs the first `size` examples are looked at.
    """
    return _norms_seen(model, state, inputs, constant, size)[0]


def _norms_seen(
    model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, constant: Collection[str], size: int
) -> tuple[tuple[str, ...], int]:
    """The norms that are used, and bytes of activations of one example."""
    if not any(buffer.is_floating_point() for buffer in model.buffers()):
        return (), 1
    left = frozen_norms(model) | set(constant)
    rows, call = next(batches(inputs, size))
    tensors = as_seen(model, state)
    dtype, device = floating_dtype(tensors), next(iter(tensors.values())).device
    observer = _NormsUsed(tensors)
    with undisturbed(model, call), observer:
        run_with(model, {**fixed_buffers(model, device, dtype), **tensors}, moved(call, device, dtype))
    each = _ALIVE * observer.nbytes // (rows.stop - rows.start)
    return tuple(name for name in observer.names if name not in left), 1 + each


def refreshed(
    model: nn.Module,
    networks: Mapping[str, Tensor],
    inputs: Inputs,
    *,
    batch: int | None = None,
    constant: Collection[str] = (),
) -> tuple[State, tuple[str, ...]]:
    """Return networks with running means and variances measured on `inputs`, and the names of the means.

    One pass over the data in evaluation mode, in which every norm normalises a batch by the statistics that torch would
    store for it: its mean and its unbiased variance. So the layers behind see what they will see in evaluation mode
    with the new statistics. (In training mode they see a little else: there torch stores the unbiased variance too, but
    normalises by the biased one, and dropout drops.) Batches count by their number of examples; variances of batch
    norms are combined by the law of total variance. An instance norm keeps the averages over examples of their means
    and unbiased variances, as torch does.

    If the data fit into one batch the result is exact: in evaluation mode the inputs of every batch norm then have its
    running mean and variance. With several batches that holds for those before any other norm; behind one, activations
    were normalised batch by batch.

    Norms that are frozen (see `frozen_norms`) or not used are left as they are, and so is a model without norms, which
    is not even run.

    >>> norm = nn.BatchNorm1d(1)
    >>> networks = {name: value[None] for name, value in norm.state_dict().items()}
    >>> measured, names = refreshed(norm, networks, torch.tensor([[1.0], [3.0]]))
    >>> measured["running_mean"], measured["running_var"], names
    (tensor([[2.]]), tensor([[2.]]), ('running_mean',))

    Args:
        model: the function; left exactly as it was.
        networks: parameters and buffers with a leading axis, (members, *shape). Tensors that stay are not copied.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor; some
            thousand examples are plenty.
        batch: largest number of examples that are normalised together; by default 1,000, or fewer where activations
            are large.
        constant: names of more running means that stay as they are.

    Raises:
        SpecError: the networks are not of this model.
        InputError: the model cannot be called with these inputs, or they are too few for a variance.
    """
    members = len(next(iter(networks.values()), ()))
    if not members:
        return dict(networks), ()
    check_fits(model, networks, members=True)
    left = frozen_norms(model) | set(constant)
    first = {name: value[0] for name, value in networks.items()}
    names, each = _norms_seen(model, first, inputs, left, batch or 2)
    if not names:
        return dict(networks), ()
    size = batch or max(_LEAST, min(BATCH, ROOM // each))
    chunk = max(1, min(_MEMBERS, ROOM // (each * size)))
    parts = []
    for start in range(0, members, chunk):
        block = as_seen(model, {name: value[start : start + chunk] for name, value in networks.items()})
        parts.append(_measured(model, block, inputs, size, left))
    new = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return replaced(model, networks, new), names


def refreshed_one(
    model: nn.Module,
    state: Mapping[str, Tensor],
    inputs: Inputs,
    *,
    batch: int | None = None,
    constant: Collection[str] = (),
) -> tuple[State, tuple[str, ...]]:
    """As `refreshed`, for one network."""
    stacked = {name: value.detach()[None] for name, value in state.items()}
    networks, names = refreshed(model, stacked, inputs, batch=batch, constant=constant)
    return {name: value[0] for name, value in networks.items()}, names


def replaced(model: nn.Module, state: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> State:
    """The state with some tensors replaced, under all their names and in their dtypes."""
    first = shared_names(model)
    return {
        name: new[first[name]].to(value.dtype) if first[name] in new else value.detach()
        for name, value in state.items()
    }


def measured(model: nn.Module, tensors: Mapping[str, Tensor], call: Call, constant: Collection[str] = ()) -> State:
    """Running statistics of one network on one batch, float64, with a gradient where it has one.

    Args:
        model: the function, in evaluation mode.
        tensors: all parameters and buffers as the model sees them.
        call: arguments on the device and in the dtype of the tensors.
        constant: names of running means that stay as they are.
    """
    observer = Renormalise(tensors, constant)
    with observer:
        run_with(model, tensors, call)
    return observer.statistics()


class _Measurement:
    """One batch through one network, alone or under `vmap`, with every norm measured.

    Attributes:
        kinds: name of a running mean -> (name of the variance, kind of moments, how many values), the same for all.
    """

    def __init__(self, model: nn.Module, fixed: State, constant: Collection[str]) -> None:
        self.model, self.fixed, self.constant = model, fixed, constant
        self.first = shared_names(model)
        self.kinds: dict[str, tuple[str, type[Moments], int]] = {}

    def __call__(self, tensors: State, call: Call) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and deviations (units,) in float64, by the name of the running mean."""
        whole = {**self.fixed, **{name: tensors[first] for name, first in self.first.items()}}
        observer = Renormalise(whole, self.constant)
        with observer:
            run_with(self.model, whole, call)
        for (mean, variance), moments in observer.moments.items():
            self.kinds[mean] = variance, type(moments), moments.count
        return {mean: (moments.mean, moments.deviations) for (mean, _), moments in observer.moments.items()}


def _measured(model: nn.Module, block: State, inputs: Inputs, size: int, constant: Collection[str]) -> State:
    """Statistics (members, units) by name, over all batches; members together, or one by one where vmap refuses."""
    weights = {name: block[name] for name, first in shared_names(model).items() if first == name}
    dtype, device = floating_dtype(block), next(iter(block.values())).device
    measurement = _Measurement(model, fixed_buffers(model, device, dtype), constant)
    several = Vectorised(model, partial(mapped, measurement), partial(member_by_member, model, measurement))
    inventory = Inventory(model)
    total: dict[str, tuple[str, Moments]] = {}
    for _, call in batches(inputs, size):
        with inventory.undisturbed(call):
            of_batch = several(weights, moved(call, device, dtype))
        for mean, (centre, deviations) in of_batch.items():
            variance, kind, count = measurement.kinds[mean]
            total.setdefault(mean, (variance, kind()))[1].merge(count, centre, deviations)
    means = {mean: moments.mean for mean, (_, moments) in total.items()}
    return means | {variance: moments.variance() for variance, moments in total.values()}


Measured = Inputs | Literal[False] | None  # what `statistics` may be: see `Posterior.draw`


def statistics_in(names: Iterable[str]) -> tuple[str, ...]:
    """The names of running means among names of tensors, as torch's norms call them."""
    return tuple(name for name in names if is_statistic(name) and name.endswith("running_mean"))


def stale(what: str, names: Collection[str], remedy: str) -> str:
    """The sentence that tells that running statistics are not those of the networks that use them."""
    norms = f"{len(names)} norm{'' if len(names) == 1 else 's'}"
    return (
        f"{what} use the averaged running statistics of the networks they come from in {norms}, such as "
        f"{min(names)}, and not statistics of their own, so that their predictions may be worthless: {remedy}"
    )


def warn_stale(what: str, names: Collection[str], remedy: str, *, depth: int = 2) -> str:
    """Warn with this sentence, as if the caller's caller had (`depth` frames up), and return it."""
    text = stale(what, names, remedy)
    warnings.warn(text, StatisticsWarning, stacklevel=depth + 1)
    return text
