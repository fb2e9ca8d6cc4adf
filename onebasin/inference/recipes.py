"""Trainings of published collections by name: epochs, optimizer, schedule, decay and augmentation, with their sources.

The collection *Checkpoints* does not say how its networks were trained. What is here are the configurations that its
authors' library had for the same networks and data when it was published, and for the residual network without batch
norm the training of the paper whose HMC samples it is compared with. `source` says for each where it was read.

Weight decay is L2 added to the gradient (`weight_decay`), of all weights, so give `prior=None` with a recipe; or give
`weight_decay=0` and prior = 1 / sqrt(N weight_decay), which trains the same and makes log densities those of that
posterior. Mixed precision of the originals (16 bits on a GPU) is left to `precision`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar, overload

from onebasin.errors import InputError
from onebasin.inference.methods.ensemble import Ensemble
from onebasin.inference.training import TrainedMethod

_LIBRARY = "ENSTA-U2IS-AI/torch-uncertainty, experiments/classification"
_SGD = {"optimizer": "sgd", "momentum": 0.9}
_STEPS = {"lr_schedule": "milestones", "milestones": (25, 50)}
_IMAGES = {"augment": ("crop", "flip")}


@dataclass(frozen=True)
class Recipe:
    """How the networks of a collection, or of a paper, were trained.

    Attributes:
        model: the factory of the architecture, as the command line takes it.
        data: the word for its data.
        source: where the numbers were read.
        training: fields of a method that trains.
    """

    model: str
    data: str
    source: str
    training: Mapping[str, Any] = field(default_factory=dict)


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "resnet20-frn-cifar10": Recipe(
            "onebasin.examples:resnet20_frn_silu",
            "cifar10",
            "google-research/bnn_hmc, README and run_sgd.py (Izmailov et al., 2021): 40,960 images, step 3e-7, decay "
            "10 of the summed loss; no augmentation",
            {
                **_SGD,
                "epochs": 500,
                "batch": 80,
                "lr": 3e-7 * 40_960,
                "lr_schedule": "cosine",
                "weight_decay": 10 / 40_960,
            },
        ),
        "resnet18-cifar10": Recipe(
            "onebasin.examples:resnet18",
            "cifar10",
            f"{_LIBRARY}/cifar10/configs/resnet18/standard.yaml (later versions: lr 0.1)",
            {
                **_SGD,
                **_STEPS,
                **_IMAGES,
                "epochs": 75,
                "batch": 128,
                "lr": 0.05,
                "nesterov": True,
                "gamma": 0.1,
                "weight_decay": 5e-4,
            },
        ),
        "resnet18-cifar100": Recipe(
            "onebasin.examples:cifar100_resnet18",
            "cifar100",
            f"{_LIBRARY}/cifar100/configs/resnet18/standard.yaml (the library's function of that name: lr 0.1, decay "
            "5e-4, gamma 0.1)",
            {
                **_SGD,
                **_STEPS,
                **_IMAGES,
                "epochs": 75,
                "batch": 128,
                "lr": 0.05,
                "nesterov": True,
                "gamma": 0.2,
                "weight_decay": 1e-4,
            },
        ),
        "resnet18-tiny-imagenet": Recipe(
            "onebasin.examples:tiny_imagenet_resnet18",
            "tiny-imagenet",
            f"{_LIBRARY}/tiny-imagenet/configs/resnet18/standard.yaml (which says 100 classes; there are 200)",
            {**_SGD, **_IMAGES, "epochs": 200, "batch": 256, "lr": 0.2, "lr_schedule": "cosine", "weight_decay": 1e-4},
        ),
        "optunet-mnist": Recipe(
            "onebasin.examples:optunet",
            "mnist",
            "ENSTA-U2IS-AI/optuMNIST, optumnist-v1.py, of the sibling with 355 weights; runs below 15 % accuracy were "
            "given up, which no option here does",
            {
                "optimizer": "sgd",
                "momentum": 0.0,
                "epochs": 60,
                "batch": 64,
                "lr": 0.04,
                "lr_schedule": "milestones",
                "milestones": (15, 30),
                "gamma": 0.5,
                "weight_decay": 2e-4,
            },
        ),
    }
)

_Trained = TypeVar("_Trained", bound=TrainedMethod)


@overload
def recipe(name: str) -> Ensemble: ...
@overload
def recipe(name: str, method: _Trained) -> _Trained: ...
def recipe(name: str, method: TrainedMethod | None = None) -> TrainedMethod:
    """A method with the training of a published collection.

    >>> recipe("resnet18-cifar10").milestones
    (25, 50)
    >>> from onebasin import SWAG
    >>> recipe("resnet18-cifar100", SWAG(draws=100)).lr
    0.05

    Args:
        name: the network, then its data; `onebasin sample --list` shows all.
        method: what the training belongs to; None for an Ensemble. Its other fields stay.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1) or [next(iter(RECIPES))]
        raise InputError(f"expected a recipe out of {', '.join(RECIPES)}, found {name!r}: give {near[0]!r}")
    if method is not None and not isinstance(method, TrainedMethod):
        raise InputError(
            f"expected a method that trains, found {type(method).__name__}, which has no such fields: give "
            "onebasin.Ensemble() or onebasin.SWAG()"
        )
    return replace(Ensemble() if method is None else method, **RECIPES[name].training)
