"""Recipes of published networks: the numbers of their sources, for networks and data that exist."""

from typing import Any

import pytest
from torch import nn

import onebasin as ob
from onebasin.cli.load import load
from onebasin.errors import InputError
from onebasin.inference import RECIPES

SGD = {"optimizer": "sgd", "momentum": 0.9}
CROP_FLIP = (ob.RandomCrop(padding=4), ob.RandomFlip(probability=0.5))
STEPS = {"lr_schedule": "milestones", "milestones": (25, 50), "epochs": 75, "batch": 128, "nesterov": True}
# As read in the files that `source` names.
PUBLISHED: dict[str, dict[str, Any]] = {
    "resnet20-frn-cifar10": {
        **SGD, "epochs": 500, "batch": 80, "lr": pytest.approx(0.0123, abs=5e-5), "lr_schedule": "cosine",
        "weight_decay": pytest.approx(2.44e-4, abs=1e-6),
    },
    "resnet18-cifar10": {**SGD, **STEPS, "lr": 0.05, "gamma": 0.1, "weight_decay": 5e-4, "augment": CROP_FLIP},
    "resnet18-cifar100": {**SGD, **STEPS, "lr": 0.05, "gamma": 0.2, "weight_decay": 1e-4, "augment": CROP_FLIP},
    "resnet18-tiny-imagenet": {
        **SGD, "epochs": 200, "batch": 256, "lr": 0.2, "lr_schedule": "cosine", "weight_decay": 1e-4,
        "augment": CROP_FLIP,
    },
    "optunet-mnist": {
        "optimizer": "sgd", "momentum": 0.0, "epochs": 60, "batch": 64, "lr": 0.04, "lr_schedule": "milestones",
        "milestones": (15, 30), "gamma": 0.5, "weight_decay": 2e-4,
    },
}  # fmt: skip


def test_every_recipe_has_the_numbers_of_its_source_and_defaults_elsewhere() -> None:
    assert list(RECIPES) == list(PUBLISHED)
    plain = vars(ob.Ensemble())
    for name, numbers in PUBLISHED.items():
        assert vars(ob.recipe(name)) == {**plain, **numbers}, name


def test_every_recipe_names_a_network_and_a_source() -> None:
    published = {factory.build for factory in ob.examples.PUBLISHED.values()}
    factories = {getattr(ob.examples, one.model.partition(":")[2]) for one in RECIPES.values()}
    assert factories == published, "one for each collection"
    for one in RECIPES.values():
        assert isinstance(load(one.model).model, nn.Module)
        assert len(one.source) > 20


def test_the_prior_of_a_weight_decay_trains_the_same() -> None:
    """SGD: L2 of a decay is the gradient of a Gaussian prior with deviation 1 / sqrt(N decay)."""
    (x, y), model = ob.data.digits(), nn.Linear(64, 10)
    options: dict[str, Any] = {"epochs": 2, "batch": 64, "lr_schedule": "constant", "milestones": (), "augment": ()}
    method = ob.recipe("resnet18-cifar10", ob.Ensemble())
    decayed = ob.Ensemble(**{**vars(method), **options})
    flat = ob.sample(model, (x, y), decayed, prior=None, compile=False)
    prior = (len(y) * 5e-4) ** -0.5
    bayes = ob.sample(model, (x, y), ob.Ensemble(**{**vars(decayed), "weight_decay": 0.0}), prior=prior, compile=False)
    difference = (flat.tensor("weight") - bayes.tensor("weight")).abs().max()
    assert float(difference) < 1e-5 * float(flat.tensor("weight").abs().max())


def test_other_methods_take_their_training_and_keep_the_rest() -> None:
    swag = ob.recipe("resnet18-cifar100", ob.SWAG(draws=7, collect=5, rank=3))
    assert (swag.draws, swag.collect, swag.rank, swag.lr, swag.milestones) == (7, 5, 3, 0.05, (25, 50))
    assert isinstance(swag, ob.SWAG)


def test_unknown_recipes_and_methods_without_training_get_a_sentence() -> None:
    with pytest.raises(InputError, match="found 'resnet18-cifar': give 'resnet18-cifar10'"):
        ob.recipe("resnet18-cifar")
    with pytest.raises(InputError, match="expected a method that trains, found VI"):
        ob.recipe("resnet18-cifar10", ob.VI())  # type: ignore[type-var]
