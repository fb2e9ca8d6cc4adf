"""The group: a `Symmetry` is plain data, its members are `Element`s.

A space is a set of n units tied across tensors. It may be *fibred* over parents: then each combination of their
indices (a *copy*) has an order and factors of its own. With σ the parents' orders, an element acts on a tensor that
holds parent p and unit i as

    new[p, i] = factor[p, i]^power * old[σ(p), order[p, i]],

so orders and factors are written in the coordinates of the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import Tensor, nn

from onebasin.errors import SymmetryError
from onebasin.state import State
from onebasin.symmetry import act, algebra, table
from onebasin.symmetry.checking import check_symmetry, check_unmoved
from onebasin.symmetry.companions import Companions
from onebasin.symmetry.element import Element
from onebasin.symmetry.independent import independent
from onebasin.symmetry.space import FREEDOMS, Leg, Space

FORMAT = "onebasin symmetry 1"


class Mapped(Protocol):
    """What a whole population must offer: its size, and `map` over blocks of stacked members, as in `Population`."""

    def __len__(self) -> int: ...

    def map(self, function: Callable[[State, int], Mapping[str, Tensor]]) -> Any:
        """Apply a function of (tensors (n, *shape), index of the first member) to every block."""


Crowd = TypeVar("Crowd", bound=Mapped)


@dataclass(frozen=True)
class Symmetry:
    """Everything that leaves a function unchanged: plain data, found by `discover` or written by hand.

    Attributes:
        spaces: the spaces, parents before children.
        shapes: shape of every tensor of the state.
        rigid: (tensor, axis, reason) for axes, or parts of them, that no permutation moves.
        unexplained: sentences about what stayed rigid without a full explanation; () when everything is explained.
        frozen: constant tensor -> the axes along which all its entries are equal. Constants (frozen parameters, and
            buffers that training does not update) are never moved; units with equal entries in them may be.
        companions: tensor -> (tensor that it goes along with, how), see `discover`.
    """

    spaces: tuple[Space, ...]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rigid: tuple[tuple[str, int, str], ...] = ()
    unexplained: tuple[str, ...] = ()
    frozen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    companions: Companions = field(default_factory=dict)

    def __str__(self) -> str:
        """A table for people."""
        return table.render(self)

    def __getitem__(self, name: str) -> Space:
        """A space by its name."""
        for space in self.spaces:
            if space.name == name:
                return space
        raise SymmetryError(
            f"no space is called {name!r}; there are: {', '.join(space.name for space in self.spaces) or 'none'}."
        )

    @cached_property
    def log10_order(self) -> float:
        """Decimal logarithm of the number of equivalent networks by permutations and signs."""
        orders = sum(replace(space, generators=()).log10_order for space in self.spaces)
        return orders + independent(self, "sign") * math.log10(2)

    @cached_property
    def dimensions(self) -> int:
        """Number of independent positive scales: the dimension of the continuum of equivalent networks.

        It is the rank of the generators, which is less than their number where some act equally on all weights.
        """
        return independent(self, "scale")

    # ------------------------------------------------------------------ elements

    def identity(self, members: int | None = None) -> Element:
        """The element that moves nothing."""
        if members is not None and members < 1:
            raise SymmetryError(
                f"a batch needs at least one member, found {members}; leave members out for a single element."
            )
        batch = () if members is None else (members,)
        orders, factors = {}, {}
        for space in self.spaces:
            shape = (*batch, *[size for _, size in space.parents], space.size)
            if space.permutable:
                orders[space.name] = torch.arange(space.size).expand(shape).clone()
            if space.generators:
                factors[space.name] = torch.ones(len(space.generators), *shape, dtype=torch.float64)
        return Element(orders, factors, members)

    def random(
        self,
        generator: torch.Generator | int,
        *,
        members: int | None = None,
        freedoms: Iterable[str] = FREEDOMS,
        spaces: Iterable[str] | None = None,
    ) -> Element:
        """Draw an element: uniform orders and signs, log-uniform scales between 1/2 and 2.

        Scales before a batch norm are drawn between 1 and 2: shrinking could push a variance below zero.

        Args:
            generator: a `torch.Generator` or an integer seed.
            members: draw a batch of this many.
            freedoms: only these kinds move; the rest stays at the identity.
            spaces: only these spaces move.
        """
        generator, wanted, kinds = self._choices(generator, spaces, freedoms)
        element = self.identity(members)
        orders, factors = dict(element.orders), dict(element.factors)
        for space in self.spaces:
            if space.name not in wanted:
                continue
            if space.permutable and "permutation" in kinds:
                noise = torch.rand(orders[space.name].shape, generator=generator, device=generator.device)
                orders[space.name] = noise.argsort(-1).cpu()
            for number, kind in enumerate(space.generators):
                if kind in kinds:
                    noise = (
                        torch.rand(factors[space.name][number].shape, generator=generator, device=generator.device)
                        .double()
                        .cpu()
                    )
                    factors[space.name][number] = _draw(kind, noise)
        return Element(orders, factors, members)

    def _choices(
        self, generator: object, spaces: Iterable[str] | None, freedoms: Iterable[str]
    ) -> tuple[torch.Generator, set[str], set[str]]:
        """Check what `random` was asked for."""
        if isinstance(generator, int):
            generator = torch.Generator().manual_seed(generator)
        if not isinstance(generator, torch.Generator):
            raise SymmetryError(f"random needs a torch.Generator or an integer seed, found {type(generator).__name__}.")
        wanted = {space.name for space in self.spaces} if spaces is None else {self[name].name for name in spaces}
        kinds = set(freedoms)
        if unknown := kinds - set(FREEDOMS):
            raise SymmetryError(f"unknown freedoms {sorted(unknown)}; choose among {', '.join(FREEDOMS)}.")
        return generator, wanted, kinds

    def compose(self, first: Element, second: Element) -> Element:
        """The element that acts as `second`, then `first`: apply(compose(g, h), w) = apply(g, apply(h, w))."""
        return algebra.compose(algebra.Wide(self, first), algebra.Wide(self, second))

    def invert(self, element: Element) -> Element:
        """The element that undoes `element`."""
        return algebra.invert(algebra.Wide(self, element))

    @overload
    def apply(self, element: Element, state: Mapping[str, Tensor], *, kind: str = "value") -> State: ...

    @overload
    def apply(self, element: Element, state: Crowd, *, kind: str = "value") -> Crowd: ...

    def apply(self, element: Element, state: Mapping[str, Tensor] | Crowd, *, kind: str = "value") -> State | Crowd:
        """Move a network, or a whole population, along its orbit: the result computes the same function.

        Args:
            element: one element, or for a population a batch of as many elements as it has members.
            state: a State, or anything with a `map` like `Population`'s. It is not changed; tensors that no space
                touches are shared.
            kind: what the tensors are, since companions of weights move differently under factors m: "value" (times
                m), "std" (|m|),
                "variance" (m^2), "mask" (not at all), "gradient" (1/m), "squared-gradient" (1/m^2).

        Raises:
            SymmetryError: the element belongs to another symmetry, or shrinks a batch-norm variance below zero.
            SpecError: tensors are missing or have other shapes.
        """
        plan = algebra.Wide(self, element)
        if isinstance(state, nn.Module):
            raise SymmetryError("apply moves a State or a Population; give model.state_dict() and load the result.")
        if isinstance(state, Mapping):
            return act.apply(plan, state, kind)
        if plan.members not in (None, len(state)):
            raise SymmetryError(f"{plan.members} elements cannot act on {len(state)} members; draw one per member.")
        moved: Crowd = state.map(lambda stacked, start: act.apply_block(plan, stacked, start, kind))
        return moved

    # ------------------------------------------------------------------ text

    def to_json(self) -> str:
        """Text from which `from_json` makes an equal Symmetry."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Symmetry:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
            if data.get("format") != FORMAT:
                raise ValueError(f"format is {data.get('format')!r}")
            spaces = tuple(Space.from_data(item) for item in data["spaces"])
            shapes = {name: tuple(shape) for name, shape in data["shapes"].items()}
            check_symmetry(spaces, shapes)
            rigid = tuple((str(name), int(axis), str(reason)) for name, axis, reason in data["rigid"])
            frozen = {str(name): tuple(map(int, axes)) for name, axes in data.get("frozen", {}).items()}
            companions = {str(name): (leader, how) for name, (leader, how) in data.get("companions", {}).items()}
            check_unmoved(frozen, companions, spaces, shapes)
            return Symmetry(spaces, shapes, rigid, tuple(map(str, data["unexplained"])), frozen, companions)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise SymmetryError(
                f"this is no Symmetry in the format {FORMAT!r}: {error}. Write it with to_json()."
            ) from error

    def without(self, removed: Mapping[str, Iterable[str]], reason: str) -> Symmetry:
        """The same symmetry with some freedoms of some spaces taken away, and a sentence that says why."""
        spaces, said = [], list(self.unexplained)
        for space in self.spaces:
            gone = set(removed.get(space.name, ()))
            if gone:
                said.append(f"{space.name}: {', '.join(sorted(gone))} of its {space.size} units stays rigid: {reason}.")
                space = space.without(gone)
            spaces.append(space)
        kept = [space for space in spaces if space.permutable or space.generators]
        return replace(self, spaces=tuple(kept), unexplained=tuple(said))

    @cached_property
    def legs_of(self) -> dict[str, list[tuple[int, Leg]]]:
        """Tensor name -> (number of the space, leg), parents first."""
        found: dict[str, list[tuple[int, Leg]]] = {}
        for number, space in enumerate(self.spaces):
            for leg in space.legs:
                found.setdefault(leg.tensor, []).append((number, leg))
        return found


def _draw(kind: str, noise: Tensor) -> Tensor:
    if kind.endswith("sign"):
        return torch.where(noise < 0.5, -1.0, 1.0).double()
    return torch.exp(math.log(2) * (noise if kind == "norm-scale" else 2 * noise - 1))
