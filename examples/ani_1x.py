"""The networks of the ANI-1x ensemble: eight trainings of one architecture, ready to be compared.

onebasin compare member_0.safetensors member_1.safetensors --model examples/ani_1x.py:network

Each chemical element has an MLP of its own, from the 384 numbers that describe the surroundings of an atom to its
energy; energies are added. CELU is neither odd nor homogeneous, so hidden units may change places and nothing else.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = {"H": (160, 128, 96), "C": (144, 112, 96), "N": (128, 112, 96), "O": (128, 112, 96)}


class Atom(nn.ModuleList):
    """The network of one element: 384-a-b-c-1."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__(nn.Linear(a, b) for a, b in pairwise((384, *widths, 1)))

    def forward(self, x: Tensor) -> Tensor:
        """Map surroundings (atoms, 384) to energies (atoms, 1)."""
        *hidden, last = self
        for layer in hidden:
            x = F.celu(layer(x), alpha=0.1)
        return last(x)


class Ani1x(nn.Module):
    """One member of the ensemble; tensors are called H.0.weight, H.0.bias, ... as in its files."""

    def __init__(self) -> None:
        super().__init__()
        for element, widths in WIDTHS.items():
            self.add_module(element, Atom(widths))

    def forward(self, hydrogen: Tensor, carbon: Tensor, nitrogen: Tensor, oxygen: Tensor) -> Tensor:
        """Add the energies of one atom of each element, (examples, 384) each, to (examples, 1)."""
        surroundings = zip(WIDTHS, (hydrogen, carbon, nitrogen, oxygen), strict=True)
        return torch.stack([self.get_submodule(element)(x) for element, x in surroundings]).sum(0)


def network() -> nn.Module:
    """Build one member."""
    return Ani1x()


def example_input() -> tuple[Tensor, ...]:
    """Make two examples; the values do not matter, the shapes do."""
    return tuple(torch.rand(2, 384) for _ in WIDTHS)
