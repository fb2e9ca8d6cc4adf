"""Posteriors in a common basin: a minimum over a group is never above the value at its identity."""

import functools
import math

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.posterior.distance import Scales, carried, distance
from onebasin.posterior.divergence import kl, wasserstein2
from onebasin.posterior.fit import fit
from onebasin.posterior.gaussian import Diagonal, Full, Gaussian, LowRank
from onebasin.posterior.posterior import Posterior

MODELS = {
    "relu": lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)),
    "tanh": lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)),
    "convolution": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2)
    ),
}
INPUTS = {"relu": (4, 3), "tanh": (4, 3), "convolution": (4, 1, 3, 3)}
FAMILIES = ("diagonal", "low rank", "mixture", "mixture of low rank")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def known(name: str) -> tuple[ob.Symmetry, Posterior]:
    model = MODELS[name]().double().eval()
    inputs = torch.randn(*INPUTS[name], generator=seeded(0), dtype=torch.float64)
    population = ob.Population.from_models([model, model])
    return ob.discover(model, inputs), fit(population, model=model)


def drawn(name: str, family: str, seed: int, spread: float = 1.0) -> Posterior:
    """A posterior with random centres, and deviations over some orders of magnitude."""
    like, generator = known(name)[1], seeded(seed)
    size = like.layout.size
    count = 2 if family.startswith("mixture") else 1
    components = []
    for _ in range(count):
        centre = torch.randn(size, generator=generator, dtype=torch.float64)
        scale = 0.1 * (spread * torch.randn(size, generator=generator, dtype=torch.float64)).exp()
        factor = 0.2 * torch.randn(size, 2, generator=generator, dtype=torch.float64)
        components.append(Gaussian(centre, LowRank(scale, factor) if "low rank" in family else Diagonal(scale)))
    weights = torch.tensor([1.0] if count == 1 else [0.3, 0.7], dtype=torch.float64)
    return Posterior(tuple(components), weights, like.layout, like.buffers * count)


def measured(p: Posterior, q: Posterior, name: str) -> ob.Distance:
    return distance(p, q, known(name)[0], samples=20, generator=seeded(5))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_common_basin_is_never_farther_than_as_given(name: str, family: str) -> None:
    symmetry, _ = known(name)
    for seed in range(3):
        p, q = drawn(name, family, seed), drawn(name, family, 100 + seed, spread=0.3)
        for moved in (q if seed else carried(q, symmetry.random(seed), symmetry),):
            found = measured(p, moved, name)
            assert float(found.kl_after) <= float(found.kl_before)
            assert float(found.wasserstein_after) <= float(found.wasserstein_before)
            # What is reported is what the element gives.
            direct = carried(moved, found.kl_element, symmetry), carried(moved, found.element, symmetry)
            draws = {"samples": 20, "generator": seeded(5)}
            assert float(found.kl_after) == pytest.approx(float(kl(p, direct[0], **draws)), rel=1e-9)  # type: ignore[arg-type]
            assert float(found.wasserstein_after) == pytest.approx(float(wasserstein2(p, direct[1])), rel=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("freedoms", [("permutation", "sign", "norm-sign"), None])
def test_a_posterior_is_at_no_distance_from_its_own_orbit(
    name: str, family: str, freedoms: tuple[str, ...] | None
) -> None:
    symmetry, _ = known(name)
    for seed in range(1, 2):
        p = drawn(name, family, seed)
        element = symmetry.random(seed) if freedoms is None else symmetry.random(seed, freedoms=freedoms)
        found = measured(p, carried(p, element, symmetry), name)
        assert float(found.kl_after) == pytest.approx(0, abs=1e-6)
        assert float(found.wasserstein_after) == pytest.approx(0, abs=1e-3)
        assert float(found.wasserstein_before) > 0.1


def pair_on_a_line() -> tuple[ob.Symmetry, Posterior, Posterior]:
    """x -> v relu(w x) without biases, one unit: one scale, w e^s and v e^-s."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    symmetry = ob.discover(model, torch.ones(2, 1, dtype=torch.float64))
    like = fit(ob.Population.from_models([model, model]), model=model)
    made = [
        Posterior((Gaussian(centre, Diagonal(scale)),), like.weights[:1] * 0 + 1, like.layout, like.buffers[:1])
        for centre, scale in (
            (torch.tensor([2.0, 0.4]).double(), torch.tensor([0.3, 0.2]).double()),
            (torch.tensor([0.5, 3.0]).double(), torch.tensor([0.1, 0.9]).double()),
        )
    ]
    return symmetry, made[0], made[1]


def test_the_scales_are_those_of_a_search_over_all() -> None:
    symmetry, p, q = pair_on_a_line()
    found = distance(p, q, symmetry)
    scales = Scales(symmetry, q)
    moved = [carried(q, scales.element(torch.tensor([s]).double()), symmetry) for s in torch.linspace(-3, 3, 601)]
    for value, every in (
        (found.wasserstein_after, [wasserstein2(p, other) for other in moved]),
        (found.kl_after, [kl(p, other) for other in moved]),
    ):
        least = min(map(float, every))
        assert least * (1 - 1e-3) < float(value) <= least * (1 + 1e-9)
    assert found.kl_by == found.wasserstein_by == "order, signs and the closest scales"
    assert "by order, signs and the closest scales" in str(found)
    assert found.to_dict()["kl_by"] == "order, signs and the closest scales"


@pytest.mark.parametrize("objective", ["kl", "wasserstein"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_scales_are_those_of_differences(name: str, objective: str) -> None:
    from onebasin.posterior.distance import _OBJECTIVES, _marginals

    symmetry, _ = known(name)
    p, q = drawn(name, "diagonal", 1), drawn(name, "diagonal", 2)
    scales = Scales(symmetry, q)
    if not scales.size:
        assert name == "tanh"
        return
    logs = 0.3 * torch.rand(scales.size, generator=seeded(3), dtype=torch.float64)
    step = torch.randn(scales.size, generator=seeded(4), dtype=torch.float64)

    def value(at: Tensor) -> tuple[float, Tensor]:
        return _OBJECTIVES[objective](*_marginals(p), *_marginals(q), torch.from_numpy(scales.powers @ at.numpy()))

    # The value differs from the divergence itself by what does not depend on the scales ...
    for at in (logs, 2 * logs):
        moved = carried(q, scales.element(at), symmetry)
        exact = float(kl(p, moved)) if objective == "kl" else float(wasserstein2(p, moved)) ** 2
        home = float(kl(p, q)) if objective == "kl" else float(wasserstein2(p, q)) ** 2
        assert value(at)[0] - value(0 * at)[0] == pytest.approx(exact - home, rel=1e-9)
    # ... and its slope is that of a small step.
    slope = float(torch.from_numpy(scales.powers.T @ value(logs)[1].numpy()) @ step)
    small = 1e-5
    assert slope == pytest.approx(
        (value(logs + small * step)[0] - value(logs - small * step)[0]) / (2 * small), rel=1e-5
    )


def test_deviations_count_where_scales_are_chosen() -> None:
    # Means that ask for the scales of p, deviations that would explode with them.
    symmetry, p, q = pair_on_a_line()
    wide = Diagonal(torch.tensor([0.001, 30.0]).double())
    q = Posterior((Gaussian(torch.tensor([40.0, 0.02]).double(), wide),), q.weights, q.layout, q.buffers)
    found = ob.match(p.mean, q.mean, symmetry, std=(p.std, q.std))
    before = float(wasserstein2(p, q))
    assert float(wasserstein2(p, carried(q, found.element, symmetry))) <= before


@pytest.mark.parametrize("name", MODELS)
def test_matched_networks_are_never_farther_apart(name: str) -> None:
    symmetry, _ = known(name)
    for seed in range(6):
        a, b = (drawn(name, "diagonal", 10 * seed + side).mean for side in (0, 1))
        # Scales over several orders of magnitude, other ones in both.
        for power, side in ((4.0, a), (3.0, b)):
            element = symmetry.random(seed, freedoms=("scale",))
            stretched = ob.Element(element.orders, {key: own**power for key, own in element.factors.items()})
            side.update(symmetry.apply(stretched, side))
        found = ob.match(a, b, symmetry)
        assert found.distance_after <= found.distance_before * (1 + 1e-9)


def test_a_given_element_is_taken_as_it_is_and_other_spreads_are_refused() -> None:
    symmetry, _ = known("relu")
    p = drawn("relu", "diagonal", 0)
    element = symmetry.random(1)
    found = distance(p, p, symmetry, element=element)
    assert found.element is element is found.kl_element
    assert float(found.kl_after) > float(found.kl_before) == 0
    assert found.kl_by == "the given element"
    dense = Gaussian(p.components[0].centre, Full(torch.eye(p.layout.size, dtype=torch.float64)))
    with pytest.raises(InputError, match="diagonal or low-rank"):
        distance(p, Posterior((dense,), p.weights, p.layout, p.buffers), symmetry)
    assert math.isfinite(float(found.wasserstein_after))
