"""The layout of sampled parameters: which tensors they are, where each lies in a flat vector (D,), and their prior.

Sampled are the parameters that require a gradient, tied ones once. Everything else in the state dict, the buffers
(frozen parameters, running statistics), is carried along, one copy per chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError
from onebasin.posterior import FlatLayout
from onebasin.state import State, as_spec, dtype_name, shared_names, state_of


@dataclass(frozen=True, eq=False)
class ParameterLayout(FlatLayout):
    """Where the sampled weights lie, and what they are computed in.

    Attributes:
        dtype: what is computed in: the parameters' widest dtype, at least float32.
        device: where the parameters are.
    """

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model.

        >>> layout = ParameterLayout.of(nn.Linear(2, 3))
        >>> layout.names, layout.size
        (('weight', 'bias'), 9)
        """
        sampled = {name: value for name, value in model.named_parameters() if value.requires_grad and value.numel()}
        if not sampled:
            raise InputError(
                f"expected parameters to sample, found none in {type(model).__name__} that require a gradient: "
                "call requires_grad_(True) on those that should be inferred"
            )
        odd = [name for name, value in sampled.items() if not value.is_floating_point()]
        if odd:
            found = dtype_name(sampled[odd[0]].dtype)
            raise SpecError(
                f"expected real parameters, found {found} under {odd[0]}: freeze it with requires_grad_(False), or "
                "store real and imaginary parts as two parameters"
            )
        devices = {value.device for value in sampled.values()}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise InputError(f"expected all parameters on one device, found {found}: move the model with .to(device)")
        dtype = torch.float32
        for value in sampled.values():
            dtype = torch.promote_types(dtype, value.dtype)
        tied = {name: first for name, first in shared_names(model).items() if name != first}
        return cls(tuple(sampled), as_spec(model), tied, dtype, devices.pop())

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the sampled tensors."""
        return [self.spec[name].shape for name in self.names]

    def split(self, position: Tensor) -> State:
        """Views of a flat position (..., D) as tensors (..., *shape)."""
        pieces = position.split(self.sizes, dim=-1)
        return {
            name: piece.reshape((*position.shape[:-1], *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Invert `split` for one network, or for tensors (chains, *shape): a vector (..., D) in the working dtype."""
        lead = tensors[self.names[0]].shape[: tensors[self.names[0]].dim() - len(self.shapes[0])]
        return torch.cat([tensors[name].to(self.dtype).reshape((*lead, -1)) for name in self.names], dim=-1)

    def buffers_of(self, model: nn.Module) -> State:
        """Every tensor of the state dict that is not sampled, wide enough to compute with."""
        state = state_of(model)
        return {name: widened(state[name]).clone() for name in self.buffer_names}

    def whole_state(self, sampled: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> State:
        """All names a functional call needs, tied ones included; works for one network and for stacked ones."""
        return {
            name: sampled[first] if (first := self.tied.get(name, name)) in sampled else buffers[name]
            for name in self.spec
        }

    def spread(self, values: Mapping[str, float], default: float, what: str) -> Tensor:
        """A vector (D,) with one value per tensor, chosen by state-dict name or pattern (`*.bias`); later keys win."""
        unused = [key for key in values if not any(fnmatchcase(name, key) for name in self.names)]
        if unused:
            raise InputError(
                f"expected names or patterns of sampled tensors in {what}, found {unused[0]!r}, which fits none of "
                f"{', '.join(self.names[:6])}{', ...' if len(self.names) > 6 else ''}: correct it"
            )
        chosen = [[value for key, value in values.items() if fnmatchcase(name, key)] for name in self.names]
        each = torch.tensor([own[-1] if own else default for own in chosen], dtype=self.dtype, device=self.device)
        return each.repeat_interleave(torch.tensor(self.sizes, device=self.device))


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, and none of them requires a gradient."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(value.requires_grad for value in own)


def widened(value: Tensor) -> Tensor:
    """A tensor in a dtype that is wide enough to compute with; integers stay."""
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value


Scale = float | Mapping[str, float] | None


@dataclass(frozen=True, eq=False)
class Prior:
    """Independent Gaussians around zero.

    log p(theta) = -1/2 sum_i precision_i theta_i^2 + constant

    Attributes:
        precision: 1 / scale^2 of each weight (D,); 0 where the prior is flat.
        constant: what normalises the density of the weights that are not flat.
    """

    precision: Tensor
    constant: float

    @classmethod
    def of(cls, layout: ParameterLayout, scale: Scale) -> Prior:
        """Read `prior=`: one standard deviation, a dict of them by name or pattern (others get 1), or None for flat."""
        if scale is None:
            return cls(torch.zeros(layout.size, dtype=layout.dtype, device=layout.device), 0.0)
        named = scale if isinstance(scale, Mapping) else {"*": scale}
        for key, value in named.items():
            if not (isinstance(value, int | float) and value > 0):
                raise InputError(
                    f"expected a positive standard deviation of the prior for {key!r}, found {value!r}: "
                    "give a number above 0, or prior=None for a flat prior"
                )
        scales = layout.spread({key: float(value) for key, value in named.items()}, 1.0, "prior")
        proper = scales[torch.isfinite(scales)].double()
        constant = -float(proper.log().sum()) - 0.5 * math.log(2 * math.pi) * len(proper)
        return cls(scales.square().reciprocal(), constant)

    @property
    def flat(self) -> bool:
        """Whether some weight has no proper prior."""
        return bool((self.precision == 0).any())

    def log_density(self, position: Tensor) -> Tensor:
        """Log density of positions (..., D), summed in float64 (...)."""
        return -0.5 * (position.double().square() * self.precision.double()).sum(-1) + self.constant
