"""Frozen parameters and other constants: no verb moves them, and all agree on which tensors are trained."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, SymmetryError
from onebasin.functional.call import global_seed
from onebasin.posterior.layout import flat_layout
from onebasin.state import state_of, trained_parameters
from tests.judging import numbers
from tests.models import BATTERY, Case
from tests.models.oracle import double

NAMES = (
    "mlp_relu", "mlp_tanh", "residual_mlp_prenorm", "weight_norm_relu", "tied_autoencoder_tanh", "grouped",
    "densenet_bn", "squeeze_excite", "lstm", "decoder_rope_gqa", "normaliser",
)  # fmt: skip
CASES = [pytest.param(case, id=case.name) for case in BATTERY if case.name in NAMES]
State = dict[str, Tensor]


def freeze(model: nn.Module, seed: int) -> set[str]:
    """Freeze about a third of the parameters, and give half of those equal entries, which allow orders."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.named_parameters())
    for _, parameter in parameters:
        frozen, flat = torch.rand(2, generator=generator).tolist()
        parameter.requires_grad_(frozen > 1 / 3)
        if frozen <= 1 / 3 and flat < 0.5:
            parameter.data.fill_(0.3)
    parameters[int(torch.randint(len(parameters), (), generator=generator))][1].requires_grad_(False)
    parameters[-1][1].requires_grad_(True)
    model.double()
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = {name for name, value in model.named_parameters(remove_duplicate=False) if id(value) not in trained}
    buffers = {name for name, value in model.named_buffers() if value.is_floating_point() and "running" not in name}
    return held | buffers


def members(model: nn.Module, constant: set[str], count: int) -> list[State]:
    """Networks that differ in what is trained only."""
    generator = torch.Generator().manual_seed(1)
    states = []
    for _ in range(count):
        state = {name: tensor.clone() for name, tensor in state_of(model).items()}
        for name, parameter in model.named_parameters():
            if name not in constant:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                state[name] = state[name] + 0.3 * noise
        for name, parameter in model.named_parameters(remove_duplicate=False):
            state[name] = state[next(n for n, p in model.named_parameters() if p is parameter)]
        states.append(state)
    return states


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    model.train(training)
    yield
    model.eval()


def outputs(model: nn.Module, state: State, inputs: object, training: bool) -> Tensor:
    wide = inputs if isinstance(inputs, tuple) else (inputs,)
    copied = {name: tensor.clone() for name, tensor in state.items()}  # batch norms update their statistics in place
    with mode(model, training), torch.no_grad(), global_seed(0):
        found = torch.func.functional_call(model, copied, wide, tie_weights=False)
    leaves = found if isinstance(found, tuple) else (found,)
    return torch.cat([leaf.reshape(-1) for leaf in leaves if isinstance(leaf, Tensor)])


def verbs(symmetry: ob.Symmetry, states: list[State]) -> Iterator[tuple[str, list[State]]]:
    """Everything that moves networks, each with the networks it gives."""
    population = ob.Population.from_states(states)
    yield "apply", [symmetry.apply(symmetry.random(seed), state) for seed, state in enumerate(states)]
    yield "align", list(ob.align(population, symmetry).population)
    balanced = ob.balance(population, symmetry).population
    assert balanced is not None
    yield "balance", list(balanced)
    normal = ob.canonicalise(population, symmetry).population
    assert normal is not None
    yield "canonicalise", list(normal)
    found = ob.match(states[0], states[1], symmetry)
    yield "match", [states[0], symmetry.apply(found.element, states[1]), *states[2:]]


@pytest.mark.parametrize("case", CASES)
def test_no_verb_moves_what_is_frozen_and_all_keep_the_function(case: Case) -> None:
    model, inputs = case.build(), case.inputs()
    if isinstance(inputs, dict):
        pytest.skip("keyword inputs")
    constant = freeze(model, seed=len(case.name))
    assert constant
    inputs = double(inputs)
    symmetry = ob.discover(model, inputs)
    assert set(symmetry.frozen) == constant
    states = members(model, constant, 3)
    # Scales before a batch norm change the training function by about eps / variance, all else by rounding.
    loose = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    before = {training: [outputs(model, state, inputs, training) for state in states] for training in (False, True)}
    for verb, moved in verbs(symmetry, states):
        for number, state in enumerate(moved):
            for name in constant:
                assert torch.equal(state[name], states[number][name]), f"{verb} moves {name}"
            for training, tolerance in ((False, 1e-8), (True, 1e-2 if loose else 1e-8)):
                after, value = outputs(model, state, inputs, training), before[training][number]
                assert float((after - value).abs().max()) <= tolerance * float(value.abs().max()), (verb, training)
    merged = ob.merge(None, ob.Population.from_states(states), symmetry, variance=None)
    assert all(torch.equal(merged[name], states[0][name]) for name in constant)


def perceptron() -> nn.Sequential:
    with global_seed(0):
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def test_a_frozen_layer_holds_its_units_and_nothing_else() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    symmetry = ob.discover(model, torch.zeros(2, 3))
    assert [(space.size, space.freedoms) for space in symmetry.spaces] == [(4, ("permutation", "sign"))]
    assert symmetry.frozen == {"0.weight": (), "0.bias": ()} and symmetry.unexplained == ()
    assert "0.weight[0], 0.weight[1], 0.bias[0]: it is a constant" in str(symmetry)


def test_a_network_that_is_frozen_as_a_whole_was_frozen_for_inference() -> None:
    model = perceptron()
    free = ob.discover(model, torch.zeros(2, 3))
    assert ob.discover(model.requires_grad_(False), torch.zeros(2, 3)) == free
    assert trained_parameters(model) == tuple(dict(model.named_parameters()))


def test_what_is_frozen_can_be_said() -> None:
    model = perceptron()
    symmetry = ob.discover(model, torch.zeros(2, 3), frozen=["0", "2.bias"])
    assert set(symmetry.frozen) == {"0.weight", "0.bias", "2.bias"}
    model[0].requires_grad_(False)
    assert [space.size for space in ob.discover(model, torch.zeros(2, 3), frozen=()).spaces] == [5, 4]
    with pytest.raises(InputError, match="write for example"):
        ob.discover(model, torch.zeros(2, 3), frozen=["9"])


def test_equal_entries_allow_an_order_but_no_factor() -> None:
    model = perceptron()
    nn.init.constant_(model[2].bias, 0.7)
    model[2].bias.requires_grad_(False)
    symmetry = ob.discover(model, torch.zeros(2, 3))
    assert [space.freedoms for space in symmetry.spaces] == [("permutation", "scale"), ("permutation",)]
    assert symmetry.frozen == {"2.bias": (0,)} and symmetry.unexplained == ()
    other = {**state_of(model), "2.bias": torch.arange(4.0)}
    with pytest.raises(SymmetryError, match="discover the symmetry of the model with the constants"):
        symmetry.apply(symmetry.random(0), other)
    assert torch.equal(symmetry.apply(symmetry.identity(), other)["2.bias"], other["2.bias"])


class Masked(nn.Module):
    """Units under a mask of zeros and ones, as Masksembles stores them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 2)
        mask = torch.tensor([1.0, 1, 0, 1, 0, 1])
        if kind == "parameter":
            self.mask = nn.Parameter(mask, requires_grad=False)
        else:
            self.register_buffer("mask", mask, persistent=kind == "persistent")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * self.mask)


@pytest.mark.parametrize("kind", ["parameter", "persistent", "transient"])
def test_masks_are_constants_however_they_are_stored(kind: str) -> None:
    model = Masked(kind)
    symmetry = ob.discover(model, torch.zeros(2, 3))
    assert [(space.size, space.freedoms) for space in symmetry.spaces] == [(6, ("scale",))]
    state = {name: tensor.double() for name, tensor in state_of(model).items()}
    moved = symmetry.apply(symmetry.random(0), state)
    assert kind == "transient" or torch.equal(moved["mask"], state["mask"])
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model.double()
    torch.testing.assert_close(
        torch.func.functional_call(model, moved, (x,)), torch.func.functional_call(model, state, (x,))
    )
    assert ob.verify(model, symmetry, x).passed


class Spectral(nn.Module):
    """A buffer that training updates is a statistic, and goes along with its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_buffers_that_training_updates_go_along() -> None:
    symmetry = ob.discover(Spectral(), torch.zeros(2, 3))
    assert symmetry.frozen == {} and symmetry.spaces[0].permutable
    assert any("parametrizations.weight.0._u" in leg.tensor for leg in symmetry.spaces[0].legs)


def test_every_verb_agrees_on_what_is_trained() -> None:
    model = perceptron()
    model[0].requires_grad_(False)
    frozen = {"0.weight", "0.bias"}
    population = ob.Population.from_states(members(model.double(), frozen, 6))
    expected = ("2.weight", "2.bias", "4.weight", "4.bias")
    assert trained_parameters(model) == expected
    for layout in (flat_layout(population, model), flat_layout(population)):
        assert layout.names == expected
    fitted = ob.fit(population, model=model)
    assert all(float(fitted.std[name].abs().max()) == 0 for name in frozen)
    assert all(torch.equal(fitted.draw(1, torch.Generator().manual_seed(0)).member(0)[name], model.state_dict()[name])
               for name in frozen)  # fmt: skip
    symmetry = ob.discover(model, torch.zeros(2, 3).double())
    for options in ({"symmetry": symmetry}, {}):
        compared = ob.discrepancy(population[:3], population[3:], permutations=0, n_resamples=0, **options)
        assert tuple(compared.raw.layers) == expected
    assert set(ob.prune(fitted, keep=0.5).tensors) == set(expected)


def test_one_network_or_equal_networks_have_no_constants() -> None:
    state = state_of(perceptron())
    assert flat_layout(ob.Population.from_states([state])).names == tuple(state)
    assert flat_layout(ob.Population.from_states([state, state])).names == tuple(state)


def test_older_files_are_read_and_impossible_ones_refused() -> None:
    symmetry = ob.discover(perceptron(), torch.zeros(2, 3))
    data = json.loads(symmetry.to_json())
    old = {name: value for name, value in data.items() if name not in ("frozen", "companions")}
    assert ob.Symmetry.from_json(json.dumps(old)) == symmetry
    for wrong in (
        {"frozen": {"0.weight": [0]}},
        {"frozen": {"9": []}},
        {"frozen": {"0.weight": [7]}},
        {"companions": {"0.bias": ["0.weight", "std"]}},
        {"companions": {"4.bias": ["4.bias", "no"]}},
    ):
        with pytest.raises(SymmetryError, match="no Symmetry in the format"):
            ob.Symmetry.from_json(json.dumps({**data, **wrong}))


class Kept(nn.BatchNorm1d):
    """A norm of a frozen backbone: it never enters training mode."""

    def train(self, mode: bool = True) -> "Kept":
        return super().train(False)


def constant_norms() -> dict[str, nn.Module]:
    affine = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    affine[1].requires_grad_(False)
    still = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).train()
    still[1].eval()
    kept = nn.Sequential(nn.Linear(4, 6), Kept(6), nn.ReLU(), nn.Linear(6, 3))
    return {"affine": affine, "still": still, "kept": kept}


@pytest.mark.parametrize("name", constant_norms())
def test_statistics_of_frozen_norms_are_constants(name: str) -> None:
    model = constant_norms()[name]
    with torch.no_grad():
        model[1].running_mean.copy_(numbers(6)), model[1].running_var.copy_(numbers(6, seed=1).exp())
    symmetry = ob.discover(model, numbers(5, 4).float())
    states = [copy.deepcopy(model).state_dict() for _ in range(4)]
    for index, state in enumerate(states):
        for key in ("0.weight", "0.bias", "3.weight"):
            state[key] = state[key] + 0.3 * numbers(*state[key].shape, seed=index).float()
    population = ob.Population.from_states(states)
    for moved in (
        ob.align(population, symmetry).population,
        ob.balance(population, symmetry).population,
        ob.canonicalise(population, symmetry).population,
    ):
        for key in ("1.running_mean", "1.running_var"):
            assert torch.equal(moved.tensor(key), population.tensor(key)), key


def test_a_batch_of_one_does_not_turn_constants_into_statistics() -> None:
    class Standardise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", numbers(6).float())
            self.register_buffer("running_var", numbers(6, seed=1).float().exp())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - self.running_mean) / self.running_var.sqrt()

    model = nn.Sequential(
        nn.Linear(4, 6), Standardise(), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
    )
    one, several = (ob.discover(model, numbers(batch, 4).float()) for batch in (1, 4))
    assert [space.name for space in one.spaces] == [space.name for space in several.spaces]
    assert "1.running_mean" in one.frozen and "4.running_mean" not in one.frozen


def test_ordinary_norms_keep_their_freedoms_at_an_example_of_zeros() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    assert not ob.discover(model, torch.zeros(2, 4)).frozen
