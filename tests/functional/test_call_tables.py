"""Models that keep tables derived from their weights: every network is evaluated with its own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.functional.call import outputs
from onebasin.posterior.refine import refine

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Table(nn.Module):
    """One hidden layer and a bias looked up in a table; subclasses keep the table in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.bias = nn.Linear(3, 5), nn.Linear(5, 2), nn.Parameter(torch.randn(4))
        self.register_buffer("places", torch.tensor([0, 2, 1, 3, 0]))

    def table(self) -> Tensor:
        return self.bias[self.places].exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) * self.table())


class KeptInDict(Table):
    """As LeViT: a dict by device, filled by the first call in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def table(self) -> Tensor:
        if self.training:
            return super().table()
        if "table" not in self.cache:
            self.cache["table"] = super().table()
        return self.cache["table"]


class KeptByTrain(Table):
    """As EfficientFormer: an attribute that `train(False)` sets."""

    def train(self, mode: bool = True) -> "KeptByTrain":
        super().train(mode)
        if mode and hasattr(self, "ab"):
            del self.ab
        elif not mode:
            self.ab = super().table()
        return self

    def table(self) -> Tensor:
        return super().table() if self.training else self.ab


class KeptAttribute(Table):
    """An attribute that the first call in evaluation mode sets; torch cannot vectorise what looks at values."""

    def table(self) -> Tensor:
        if getattr(self, "kept", None) is None:
            self.kept = super().table()
        return self.kept


def networks(make: Callable[[], Table]) -> tuple[nn.Module, ob.Population, Tensor]:
    """A model that has been called in evaluation mode, networks, and what they compute without any table kept."""
    torch.manual_seed(0)
    states = [Table().state_dict() for _ in range(3)]
    expected = []
    for state in states:
        plain = Table()
        plain.load_state_dict(state)
        expected.append(plain(X).detach())
    model = make()
    with torch.no_grad():
        model.eval()(X)
    return model, ob.Population.from_states(states), torch.stack(expected)


@pytest.mark.parametrize("make", [KeptInDict, KeptByTrain, KeptAttribute], ids=lambda make: make.__name__)
def test_networks_are_evaluated_with_their_own_tables(make: Callable[[], Table]) -> None:
    model, population, expected = networks(make)
    before = {name: value for name, value in vars(model).items() if name in ("cache", "ab", "kept")}
    torch.testing.assert_close(ob.predict(model, population, X, quantity="logits"), expected)
    for index in range(3):
        torch.testing.assert_close(outputs(model, population.member(index), X), expected[index])
    assert {name: value for name, value in vars(model).items() if name in ("cache", "ab", "kept")} == before


@pytest.mark.parametrize("make", [KeptInDict, KeptAttribute], ids=lambda make: make.__name__)
def test_a_refined_posterior_is_that_of_the_model_without_tables(make: Callable[[], Table]) -> None:
    model, population, _ = networks(make)
    options = {"steps": 3, "draws": 4, "seed": 1}
    start = ob.fit(population)
    plain = refine(Table(), start, population, X, **options)
    kept = refine(model, start, population, X, **options)
    for name, value in plain.mean.items():
        torch.testing.assert_close(kept.mean[name], value)
