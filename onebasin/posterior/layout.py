"""The flat vector of trained weights: which numbers of a network are in it, and where each lies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onebasin.errors import SpecError
from onebasin.population import Population
from onebasin.state import Spec, State, as_spec, check_spec, dtype_name, shared_names, trained_parameters


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """The flat vector of the uncertain tensors of a network, laid end to end.

    >>> from onebasin.state import TensorSpec
    >>> spec = {"w": TensorSpec((2, 1), torch.float32), "steps": TensorSpec((), torch.int64)}
    >>> layout = FlatLayout(("w",), spec, {})
    >>> layout.networks(torch.tensor([[1.0, 2.0]]), {"steps": torch.tensor([7])})
    {'w': tensor([[[1.], [2.]]]), 'steps': tensor([7])}

    Attributes:
        names: the uncertain tensors, in the order of the flat vector.
        spec: all tensors of a whole network, in state-dict order.
        tied: further state-dict names of a tensor -> its first name; usually empty.
    """

    names: tuple[str, ...]
    spec: Spec
    tied: Mapping[str, str]

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.names, *self.tied, *self.tied.values()) if name not in self.spec]
        if unknown:
            raise SpecError(f"expected names of the spec, found {unknown[0]!r}: give the spec of a whole network")

    @property
    def sizes(self) -> list[int]:
        """Number of weights of each uncertain tensor."""
        return [self.spec[name].size for name in self.names]

    @property
    def size(self) -> int:
        """D."""
        return sum(self.sizes)

    @property
    def buffer_names(self) -> tuple[str, ...]:
        """Names of the tensors that are not in the vector: buffers, and parameters that are not trained."""
        return tuple(name for name in self.spec if self.tied.get(name, name) not in self.names)

    def flat(self, state: Mapping[str, Tensor]) -> Tensor:
        """The vector (D,) of one network, float64."""
        return torch.cat([state[name].detach().double().reshape(-1) for name in self.names])

    def shaped(self, flat: Tensor) -> State:
        """The uncertain tensors in their shapes, from a vector (D,) and in its dtype; tied ones by all their names."""
        pieces = dict(zip(self.names, flat.split(self.sizes), strict=True))
        return {
            name: pieces[first].reshape(tensor.shape)
            for name, tensor in self.spec.items()
            if (first := self.tied.get(name, name)) in pieces
        }

    def networks(self, flat: Tensor, buffers: Mapping[str, Tensor]) -> State:
        """Whole networks (n, *shape) in the dtypes of the spec, from vectors (n, D) and stacked buffers."""
        return {name: value.to(self.spec[name].dtype) for name, value in self.laid_out(flat, buffers).items()}

    def laid_out(self, flat: Tensor, buffers: Mapping[str, Tensor]) -> State:
        """The same in the dtypes of what is given."""
        pieces = dict(zip(self.names, flat.split(self.sizes, dim=-1), strict=True))
        return {
            name: (pieces[first] if (first := self.tied.get(name, name)) in pieces else buffers[name]).reshape(
                len(flat), *tensor.shape
            )
            for name, tensor in self.spec.items()
        }


def flat_layout(population: Population, model: nn.Module | None = None) -> FlatLayout:
    """The layout of the uncertain weights of a population.

    With a model: its trained parameters, see `trained_parameters`, tied ones once. Without one: all floating-point
    tensors but the running statistics of norms, known by torch's names for them, and but tensors that are the same in
    all members while others are not, because a constant has no spread; two tensors that are equal bit for bit in every
    member, and not the same in all members, count as one tied tensor.

    >>> population = Population.from_models([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    >>> flat_layout(population).names
    ('weight', 'bias')

    Raises:
        SpecError: the model is of another architecture, or there is no real weight.
    """
    if model is None:
        names = _real(population, trained_parameters(population.spec))
        constant = population.constant_tensors(names) if len(population) > 1 else set()
        if len(constant) < len(names):
            names = [name for name in names if name not in constant]
        tied = _equal_everywhere(population, names)
    else:
        given = population.spec  # whose dtypes count: draws of numpy are float64
        wanted = {name: replace(one, dtype=given[name].dtype) if name in given else one
                  for name, one in as_spec(model).items()}  # fmt: skip
        check_spec(given, wanted, where="the population, compared with the model,")
        names = _real(population, trained_parameters(model))
        tied = {name: first for name, first in shared_names(model).items() if first in names and name != first}
    return FlatLayout(tuple(name for name in names if name not in tied), population.spec, tied)


def _real(population: Population, names: Sequence[str]) -> list[str]:
    """The floating-point tensors among these; complex ones are refused, and so is a population without any."""
    for name in names:
        if population.spec[name].dtype.is_complex:
            raise SpecError(
                f"expected real weights, found {dtype_name(population.spec[name].dtype)} under {name}: store real and "
                "imaginary parts as two tensors (torch.view_as_real)"
            )
    real = [name for name in names if population.spec[name].dtype.is_floating_point and population.spec[name].size]
    if not real:
        raise SpecError(
            "expected floating-point weights, found none in the population: give networks with parameters to infer"
        )
    return real


def _equal_everywhere(population: Population, names: list[str]) -> dict[str, str]:
    """Names whose tensor equals an earlier one in all members: name -> the first such name."""
    if not len(population):
        return {}
    begin = population.member(0)
    groups = _equal_groups(begin, names)
    moving: set[str] = set()
    for _, block in population.blocks() if groups else ():
        groups = [part for group in groups for part in _equal_groups(block, group)]
        moving |= {name for group in groups for name in group if not bool((block[name] == begin[name]).all())}
        if not groups:
            break
    return {name: first for first, *equal in groups if first in moving for name in equal}


def _equal_groups(state: State, names: list[str]) -> list[list[str]]:
    """Names whose tensors are equal, of those that equal any other."""
    groups: dict[tuple[tuple[int, ...], torch.dtype], list[list[str]]] = {}
    for name in names:
        value: Tensor = state[name]
        alike = groups.setdefault((tuple(value.shape), value.dtype), [])
        group_of = next((group for group in alike if torch.equal(state[group[0]], value)), None)
        if group_of is None:
            alike.append([name])
        else:
            group_of.append(name)
    return [group for alike in groups.values() for group in alike if len(group) > 1]


def vector_dtype(layout: FlatLayout) -> torch.dtype:
    """The widest dtype of the uncertain tensors, at least float32, in which flat vectors are computed."""
    dtype = torch.float32
    for name in layout.names:
        dtype = torch.promote_types(dtype, layout.spec[name].dtype)
    return dtype
