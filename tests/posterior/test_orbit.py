import functools
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment.assignment import Assignment
from onebasin.alignment.layout import BlockLayout
from onebasin.errors import InputError
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.orbit import Proposal, _best, _Orbit, orbit_log_density
from onebasin.posterior.posterior import Posterior
from onebasin.state import State, as_spec
from onebasin.symmetry.space import Element

DISCRETE = ("permutation", "sign", "norm-sign")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Heads(nn.Module):
    """Two heads of two features each: features are permuted inside heads, and heads as wholes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.attend(x, x, x, need_weights=False)[0]
        return made


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tanh": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), (1, 2)),
    "deep": (lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), (1, 2)),
    "both": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), (1, 2)),
}


@functools.cache
def made(name: str) -> tuple[ob.Symmetry, FlatLayout]:
    build, shape = MODELS[name]
    model = build().double()
    layout = FlatLayout(tuple(key for key, _ in model.named_parameters()), as_spec(model), {})
    return ob.discover(model, torch.zeros(*shape, dtype=torch.float64)), layout


def elements(symmetry: ob.Symmetry) -> Iterator[Element]:
    """All permutations and signs."""
    tables = []
    for space in symmetry.spaces:
        orders = list(itertools.permutations(range(space.size))) if space.permutable else [tuple(range(space.size))]
        signs = [number for number, kind in enumerate(space.generators) if kind.endswith("sign")]
        flips = itertools.product((1.0, -1.0), repeat=len(signs) * space.copies * space.size)
        tables.append(
            [
                (space, *pair, signs)
                for pair in itertools.product(itertools.product(orders, repeat=space.copies), list(flips))
            ]
        )
    for choice in itertools.product(*tables):
        identity = symmetry.identity()
        orders_of, factors_of = dict(identity.orders), dict(identity.factors)
        for space, order, flip, signs in choice:
            if space.permutable:
                orders_of[space.name] = torch.tensor(order).reshape(orders_of[space.name].shape)
            if signs:
                table = factors_of[space.name]
                table[signs] = torch.tensor(flip, dtype=torch.float64).reshape(table[signs].shape)
        yield Element(orders_of, factors_of)


def gaussian(size: int, width: float, seed: int, rank: int = 0) -> Gaussian:
    centre = torch.randn(size, generator=seeded(seed), dtype=torch.float64)
    scale = width * (0.5 + torch.rand(size, generator=seeded(seed + 1), dtype=torch.float64))
    if not rank:
        return Gaussian(centre, Diagonal(scale))
    return Gaussian(centre, LowRank(scale, width * torch.randn(size, rank, generator=seeded(2), dtype=torch.float64)))


def posterior(layout: FlatLayout, *components: Gaussian) -> Posterior:
    share = torch.full((len(components),), 1 / len(components), dtype=torch.float64)
    return Posterior(components, share, layout, ({},) * len(components))


def exact(density: Posterior, state: State, symmetry: ob.Symmetry) -> float:
    logs = [density.log_density(symmetry.apply(element, state)) for element in elements(symmetry)]
    assert math.log10(len(logs)) == pytest.approx(symmetry.log10_order)
    return float(torch.tensor(logs, dtype=torch.float64).logsumexp(0)) - math.log(len(logs))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [0.1, 0.7, 3.0])
@pytest.mark.parametrize("rank", [0, 1])
def test_orbit_average_is_that_over_all_elements(name: str, width: float, rank: int) -> None:
    symmetry, layout = made(name)
    density = posterior(layout, gaussian(layout.size, width, 5, rank))
    state = symmetry.apply(symmetry.random(3, freedoms=DISCRETE), density.draw(1, seeded(4)).member(0))
    truth = exact(density, state, symmetry)
    found = orbit_log_density(density, state, symmetry, samples=1500, generator=seeded(0))
    assert abs(found.value - truth) < 4 * found.error
    assert found.error < 0.15
    assert found.bound <= truth + 1e-9
    assert found.effective > 50


def test_errors_are_those_of_repeated_estimates() -> None:
    symmetry, layout = made("deep")
    density = posterior(layout, gaussian(layout.size, 1.5, 5))
    state = density.draw(1, seeded(4)).member(0)
    truth = exact(density, state, symmetry)
    found = [orbit_log_density(density, state, symmetry, samples=200, generator=seeded(seed)) for seed in range(60)]
    ratios = torch.tensor([(each.value - truth) / each.error for each in found])
    # 60 values of standard normal size: mean within 4 / sqrt(60), root mean square not above 1.4 (chi-square, 1e-5).
    assert abs(float(ratios.mean())) < 4 / math.sqrt(60) + 0.1  # the logarithm of an unbiased estimate is a bit low
    assert float(ratios.square().mean().sqrt()) < 1.4


def test_mixture_averages_each_component_over_its_own_orbit() -> None:
    symmetry, layout = made("tanh")
    density = posterior(layout, gaussian(layout.size, 0.5, 5), gaussian(layout.size, 0.8, 9))
    state = density.draw(2, seeded(1)).member(1)
    found = orbit_log_density(density, state, symmetry, samples=800, generator=seeded(0))
    assert abs(found.value - exact(density, state, symmetry)) < 4 * found.error
    assert found.error < 0.1


def test_value_is_the_same_for_every_copy_of_a_network() -> None:
    symmetry, layout = made("deep")
    density = posterior(layout, gaussian(layout.size, 0.3, 5))
    state = density.draw(1, seeded(4)).member(0)
    for seed in range(3):
        moved = symmetry.apply(symmetry.random(seed, freedoms=DISCRETE), state)
        found = [
            orbit_log_density(density, each, symmetry, samples=100, generator=seeded(0)) for each in (state, moved)
        ]
        assert found[0].value == pytest.approx(found[1].value, abs=4 * (found[0].error + found[1].error))
        assert found[0].bound == pytest.approx(found[1].bound, abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_of_the_proposal_sum_to_one_and_are_those_of_its_draws(name: str) -> None:
    symmetry, layout = made(name)
    component = gaussian(layout.size, 1.5, 5)
    state = posterior(layout, component).draw(1, seeded(4)).member(0)
    orbit = _Orbit(layout, state, symmetry)
    overlap = orbit._overlap(component)
    proposal = Proposal(overlap, _best(overlap))
    assert proposal.reaches_all
    board = BlockLayout.of(symmetry)
    assignment = Assignment(board, plain=True)
    vertices = [assignment.vertex(element, board) for element in elements(symmetry)]
    chances = proposal.log_probability(vertices).exp()
    assert float(chances.sum()) == pytest.approx(1.0, abs=1e-9)
    drawn, log_chance = proposal.draw(2000, seeded(1))
    torch.testing.assert_close(proposal.log_probability(drawn), log_chance)
    # How often the most probable element is drawn is binomial.
    top = float(chances.max())
    hits = int((log_chance.exp() > top * (1 - 1e-9)).sum())
    ties = int((chances > top * (1 - 1e-9)).sum())
    assert abs(hits / 2000 - ties * top) < norm.isf(1e-5) * math.sqrt(ties * top / 2000)


def test_heads_are_reached_by_uniform_draws() -> None:
    model = Heads().double()
    symmetry = ob.discover(model, torch.randn(1, 3, 4, generator=seeded(0), dtype=torch.float64))
    symmetry = symmetry.without({space.name: ["sign"] for space in symmetry.spaces}, "the orders alone are few to list")
    layout = FlatLayout(tuple(key for key, _ in model.named_parameters()), as_spec(model), {})
    component = gaussian(layout.size, 4.0, 5)  # broad: other heads count
    density = posterior(layout, component)
    state = density.draw(1, seeded(4)).member(0)
    orbit = _Orbit(layout, state, symmetry)
    overlap = orbit._overlap(component)
    assert not Proposal(overlap, _best(overlap)).reaches_all
    truth = exact(density, state, symmetry)
    found = orbit_log_density(density, state, symmetry, samples=1500, generator=seeded(0))
    assert abs(found.value - truth) < 4 * found.error
    assert found.error < 0.3


def test_wide_layers_are_estimated_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2)).double()
    symmetry = ob.discover(model, torch.zeros(1, 4, dtype=torch.float64))
    layout = FlatLayout(tuple(key for key, _ in model.named_parameters()), as_spec(model), {})
    density = posterior(layout, gaussian(layout.size, 0.2, 5))
    state = symmetry.apply(symmetry.random(3, freedoms=DISCRETE), density.draw(1, seeded(4)).member(0))
    monkeypatch.setattr("onebasin.posterior.orbit._CHUNK", 40 * 40 * 2 * 7)
    found = orbit_log_density(density, state, symmetry, samples=50, generator=seeded(0))
    assert found.value >= found.bound - 4 * found.error
    # A narrow posterior holds one copy: the average is what that one gives, over |G| = 40! 2^40.
    assert found.bound == pytest.approx(
        density.log_density(density.draw(1, seeded(4)).member(0)) - math.lgamma(41) - 40 * math.log(2), abs=1e-6
    )
    assert found.value - found.bound < 5
    assert "effective" in str(found)


def test_what_has_no_density_or_too_few_draws_is_refused() -> None:
    symmetry, layout = made("tanh")
    density = posterior(layout, gaussian(layout.size, 0.3, 5))
    state = density.draw(1, seeded(4)).member(0)
    with pytest.raises(InputError, match="at least 10"):
        orbit_log_density(density, state, symmetry, samples=3, generator=seeded(0))
    flat = Gaussian(
        torch.zeros(layout.size, dtype=torch.float64), Diagonal(torch.zeros(layout.size, dtype=torch.float64))
    )
    with pytest.raises(InputError, match="density"):
        orbit_log_density(posterior(layout, flat), state, symmetry, generator=seeded(0))
