"""Problems of studies: a model, and the data that networks are trained on and judged by."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

import onebasin as ob


@dataclass(frozen=True, eq=False)
class Problem:
    """Data for one architecture.

    Attributes:
        name: for tables.
        model: the architecture; its own weights mean nothing.
        train, test: (inputs, class numbers).
        outside: inputs of another kind, for the detection of what was never seen.
        outside_name: what they are, in words.
    """

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor
    outside_name: str


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with relu between them."""
    with ob.global_seed(0):
        layers: list[nn.Module] = [nn.Linear(widths[0], widths[1])]
        for before, after in pairwise(widths[1:]):
            layers += [nn.ReLU(), nn.Linear(before, after)]
    return nn.Sequential(*layers).eval()


def digits_problem(*hidden: int, seed: int = 0) -> Problem:
    """The embedded digits, three quarters for training; outside are patches of two photographs.

    Args:
        *hidden: widths of the hidden layers.
        seed: of the division into training and test.
    """
    train, test = ob.data.split(*ob.data.digits(), test=0.25, seed=seed)
    return Problem("digits", mlp(64, *hidden, 10), train, test, ob.data.photographs(), "patches of photographs")
