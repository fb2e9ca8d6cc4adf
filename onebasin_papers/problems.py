"""What a study is about: an architecture with its data, the paper's or the user's own, and the user's own methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
        described: the architecture in words; "" for one of the papers', which describe their own.
    """

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    outside: Tensor
    outside_name: str
    described: str = ""


@dataclass(frozen=True, eq=False)
class OwnArchitecture:
    """What a user's problem is solved with.

    Attributes:
        described: in words, for tables.
        build: width -> a model of it; None for one without a width.
        width: the usual one; None where there is none.
        is_flat: whether inputs are flattened for it.
    """

    described: str
    build: Callable[[int | None], nn.Module]
    width: int | None = None
    is_flat: bool = False


@dataclass(frozen=True, eq=False)
class Own:
    """What a user brings; each is the paper's where nothing is given.

    Attributes:
        problem: architecture and data, in place of the paper's.
        widened: width -> the same architecture with it; None where the architecture has no width.
        width: of `problem`, where it has one.
        methods: name in tables -> method, for rows beside those of the paper.
        words: option -> what was given, with a digest of it: part of the plan, so that no folder mixes two of them.
    """

    problem: Problem | None = None
    widened: Callable[[int | None], nn.Module] | None = None
    width: int | None = None
    methods: Mapping[str, ob.Method] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)


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
