"""Which numbers of a network are uncertain, and where each lies in a flat vector (D,)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.errors import SpecError
from onebasin.state import Spec, State


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The flat vector of the uncertain tensors of a network, laid end to end.

    >>> from onebasin.state import TensorSpec
    >>> spec = {"w": TensorSpec((2, 1), torch.float32), "steps": TensorSpec((), torch.int64)}
    >>> coordinates = Coordinates(("w",), spec, {})
    >>> coordinates.networks(torch.tensor([[1.0, 2.0]]), {"steps": torch.tensor([7])})
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
    def others(self) -> tuple[str, ...]:
        """Names of the tensors that are not in the vector."""
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

    def networks(self, flat: Tensor, others: Mapping[str, Tensor]) -> State:
        """Whole networks (n, *shape) in the dtypes of the spec, from vectors (n, D) and stacked other tensors."""
        return {name: value.to(self.spec[name].dtype) for name, value in self.laid_out(flat, others).items()}

    def laid_out(self, flat: Tensor, others: Mapping[str, Tensor]) -> State:
        """The same in the dtypes of what is given."""
        pieces = dict(zip(self.names, flat.split(self.sizes, dim=-1), strict=True))
        return {
            name: (pieces[first] if (first := self.tied.get(name, name)) in pieces else others[name]).reshape(
                len(flat), *tensor.shape
            )
            for name, tensor in self.spec.items()
        }
