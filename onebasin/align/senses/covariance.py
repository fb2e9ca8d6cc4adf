"""How the activations of two networks go together on the same data: what activation matching maximises.

With a(x) and b(x) the units' activations, C[i, j] = sum over samples x of a_i(x) b_j(x). The order p that maximises
the sum of C[i, p(i)] minimises the distance between the activations, sum over x and i of (a_i(x) - b_p(i)(x))^2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onebasin.align.senses.sensing import Senses
from onebasin.calling import Call, Inputs, call_arguments
from onebasin.errors import InputError
from onebasin.predict.activations import Activations
from onebasin.predict.batches import batches
from onebasin.predict.taps import Exponents
from onebasin.symmetry import Symmetry

KINDS = ("uncentred", "centred", "correlation")
BATCH = 1000
ROUNDING = 32  # a spread of so many units in the last place of the mean is none
Data = Inputs | Iterable[Inputs]


@dataclass(frozen=True, eq=False)
class Covariance:
    """How the units of two networks go together.

    Attributes:
        matrices: space name -> C (columns, columns) in float64 over all samples; rows are units of the first network,
            columns of the second, each numbered copy * size + unit.
        parts: the same by the exponents with which the samples transform: readers behind different norms see different
            signs, and whoever searches for signs must not add up their matrices.
        samples: space name -> number of samples.
        missing: space name -> why there is no matrix.
    """

    matrices: Mapping[str, Tensor]
    parts: Mapping[str, Mapping[Exponents, Tensor]]
    samples: Mapping[str, int]
    missing: Mapping[str, str]


def activations(
    model: nn.Module,
    state: Mapping[str, Tensor],
    symmetry: Symmetry,
    inputs: Data,
    *,
    batch: int = BATCH,
    settled: Collection[str] = (),
) -> Activations:
    """Read the activations of every space, (samples, copies * size) each.

    Args:
        model: the function; left exactly as it was, and run in evaluation mode.
        state: one network.
        symmetry: of this model.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, cut into batches; or any other iterable
            (a list, a loader), each item of which is one batch of such inputs.
        batch: largest number of examples in one pass.
        settled: spaces that are aligned already, so that their units count as positions.
    """
    return gathered(Senses(model, symmetry, settled).of(state), inputs, batch=batch)


def gathered(read: Callable[[Call], Activations], inputs: Data, *, batch: int = BATCH) -> Activations:
    """Run a network, by the function that reads it, on all batches, and join what was read."""
    found: dict[str, dict[Exponents, list[Tensor]]] = {}
    missing: dict[str, str] = {}
    for one in map(read, _calls(inputs, batch)):
        missing |= one.missing
        for name, exponents, samples in ((n, e, s) for n, parts in one.parts.items() for e, s in parts.items()):
            found.setdefault(name, {}).setdefault(exponents, []).append(samples)
    kept = {name: parts for name, parts in found.items() if name not in missing}
    return Activations({name: {e: torch.cat(s) for e, s in parts.items()} for name, parts in kept.items()}, missing)


def cross_covariance(
    model: nn.Module,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    inputs: Data,
    *,
    kind: str = "uncentred",
    batch: int = BATCH,
    settled: Collection[str] = (),
) -> Covariance:
    """Stream C[i, j] = sum over samples x of a_i(x) b_j(x), in one pass over the inputs.

    Args:
        model: as in `activations`; so are symmetry, inputs, batch and settled.
        a: the first network.
        b: the second network.
        symmetry: of this model.
        inputs: both networks see the same batches.
        kind: "uncentred" as above; "centred" with the means over all samples taken off; "correlation", from -1 to 1,
            and 0 for units that do not change.
        batch: largest number of examples in one pass.
        settled: spaces that are aligned already.

    Raises:
        SpecError: a state is not one of this model.
        InputError: there are no inputs, the model cannot be called with them, or activations are not finite.
    """
    senses = Senses(model, symmetry, settled)
    first, second = senses.of(a), senses.of(b)
    return _streamed(((first(call), second(call)) for call in _calls(inputs, batch)), kind)


class Reference:
    """A fixed network whose activations are kept: comparing it with N networks takes N passes and not 2N."""

    def __init__(
        self,
        model: nn.Module,
        state: Mapping[str, Tensor],
        symmetry: Symmetry,
        inputs: Data,
        *,
        batch: int = BATCH,
        settled: Collection[str] = (),
    ) -> None:
        """Run the network once, and keep inputs and activations in memory; arguments as in `activations`."""
        self._senses = Senses(model, symmetry, settled)
        self._calls = list(_calls(inputs, batch))
        self._read = [*map(self._senses.of(state), self._calls)]

    def covariance(self, other: Mapping[str, Tensor], *, kind: str = "uncentred") -> Covariance:
        """`cross_covariance` with the reference as the first network and `other` as the second."""
        return _streamed(zip(self._read, map(self._senses.of(other), self._calls), strict=True), kind)


def _calls(inputs: Data, batch: int) -> Iterator[Call]:
    """Arguments of one pass after another."""
    if isinstance(inputs, Tensor | tuple | Mapping):
        yield from (call for _, call in batches(inputs, batch))
        return
    if not isinstance(inputs, Iterable):
        raise InputError(
            f"inputs must be a tensor, a tuple, a dict or an iterable of batches, found {type(inputs).__name__}: "
            "wrap what the model is called with"
        )
    empty = True
    for item in inputs:
        empty = False
        yield call_arguments(item)
    if empty:
        raise InputError("expected at least one batch of inputs, found none: an iterator can be used only once")


def _streamed(pairs: Iterable[tuple[Activations, Activations]], kind: str) -> Covariance:
    if kind not in KINDS:
        raise InputError(f"kind must be one of {', '.join(KINDS)}, found {kind!r}")
    sums: dict[str, dict[Exponents, _Sums]] = {}
    missing: dict[str, str] = {}
    for one, other in pairs:
        missing |= {**one.missing, **other.missing}
        for name, parts in one.parts.items():
            theirs = other.parts.get(name, {})
            if {e: len(s) for e, s in parts.items()} != {e: len(s) for e, s in theirs.items()}:
                missing[name] = "the two networks show different samples of it for the same inputs"
            for exponents, samples in parts.items() if name not in missing else ():
                _check_finite(name, samples, theirs[exponents])
                held = sums.setdefault(name, {}).setdefault(exponents, _Sums())
                held.add(samples, theirs[exponents], centred=kind != "uncentred")
    kept = {name: parts for name, parts in sums.items() if name not in missing}
    return Covariance(
        {name: _matrix(list(parts.values()), kind) for name, parts in kept.items()},
        {name: {e: _matrix([held], kind) for e, held in parts.items()} for name, parts in kept.items()},
        {name: sum(held.count for held in parts.values()) for name, parts in kept.items()},
        missing,
    )


def _matrix(held: list[_Sums], kind: str) -> Tensor:
    """The matrix over some kinds of samples; each kind has means of its own."""
    products = torch.stack([sums.products for sums in held]).sum(0)
    if kind != "correlation":
        return products
    squares = torch.stack([sums.spread() for sums in held]).sum(0)
    spread = torch.where(squares > 0, squares, torch.inf).sqrt()  # a unit that does not change goes with none
    return products / torch.outer(spread[0], spread[1])


def _check_finite(name: str, *both: Tensor) -> None:
    for which, values in zip(("first", "second"), both, strict=True):
        if not bool(torch.isfinite(values).all()):
            raise InputError(
                f"activations of {name} in the {which} network are not finite: look for NaN or infinity in its weights "
                "and in the inputs, and leave such networks out"
            )


class _Sums:
    """Sums over samples of two networks, formed in the activations' own dtype and gathered in float64.

    Pieces are combined exactly. With n and m samples of means p and q,

        centred products = those of both pieces + (q_a - p_a) (q_b - p_b)^T n m / (n + m),

    and so for the squares (2, units) of both networks.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        zero = torch.zeros((), dtype=torch.float64)
        self.count, self.precision = 0, 0.0
        self.products, self.squares, self.means = zero, zero, zero.expand(2, 1)

    def add(self, a: Tensor, b: Tensor, *, centred: bool) -> None:
        """Take in samples (m, units) of both networks."""
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(a.device, dtype)
        old, new = self.count, len(a)
        self.count, self.precision = old + new, torch.finfo(dtype).eps
        if not centred:
            self.products = self.products + _wide(a.mT @ b)
            return
        means = torch.stack([a.mean(0), b.mean(0)])
        a, b = a - means[0], b - means[1]
        gap, weight = _wide(means) - self.means, old * new / self.count
        self.products = self.products + _wide(a.mT @ b) + weight * torch.outer(gap[0], gap[1])
        squares = torch.stack([a.square().sum(0), b.square().sum(0)])
        self.squares = self.squares + _wide(squares) + weight * gap.square()
        self.means = self.means + gap * (new / self.count)

    def spread(self) -> Tensor:
        """The squares, 0 where they are but rounding: the mean of equal numbers is off in their last places."""
        rounding = (ROUNDING * self.precision) ** 2 * self.count * self.means.square()
        return torch.where(self.squares > rounding, self.squares, 0.0)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()  # some devices have no float64
