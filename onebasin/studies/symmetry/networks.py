"""Architectures of the study, and the data that each is trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from onebasin.calling import global_seed
from onebasin.data import load
from onebasin.examples import optunet, resnet20_frn_silu
from onebasin.studies.problem import Problem, digits_problem


class Architecture(NamedTuple):
    """A network and its data.

    Attributes:
        title: in words.
        build: makes one.
        data: name of the training and test images, as `load` takes it.
        outside: name of the foreign images.
    """

    title: str
    build: Callable[[], nn.Module]
    data: str
    outside: str


ARCHITECTURES = {
    "optunet": Architecture("OptuNet, a ConvNet of 392 weights", optunet, "mnist", "fashion-mnist"),
    "resnet20": Architecture("ResNet-20 with filter response norm and SiLU", resnet20_frn_silu, "cifar10", "cifar100"),
}
HIDDEN = (16, 16)  # widths of the network on embedded digits


def words(architecture: str) -> str:
    """What an architecture is, for people.

    >>> words("mlp")
    'a perceptron with hidden layers of 16 and 16 relu units'
    """
    if architecture == "mlp":
        return f"a perceptron with hidden layers of {' and '.join(map(str, HIDDEN))} relu units"
    return ARCHITECTURES[architecture].title


def problem_of(architecture: str, directory: str | None, seed: int) -> Problem:
    """The network and its data.

    Args:
        architecture: "mlp" on embedded digits, or a key of `ARCHITECTURES`.
        directory: where data sets are that do not come with the package.
        seed: of the division of the digits.
    """
    if architecture == "mlp":
        return digits_problem(*HIDDEN, seed=seed)
    chosen = ARCHITECTURES[architecture]
    data, outside = (load(name, directory=directory) for name in (chosen.data, chosen.outside))
    with global_seed(0):
        model = chosen.build().eval()
    return Problem(chosen.data, model, data.train, data.test, outside.test[0], f"images of {chosen.outside}")
