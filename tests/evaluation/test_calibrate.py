"""Calibration: scalings against scikit-learn and brute force, folding in float64, held-out numbers, refusals."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.metrics import best_temperature, fit_isotonic, fit_scaling
from onebasin.posterior import Block, Diagonal, Full, Gaussian, Kronecker, LowRank, OutputMap, Partial, flat_layout
from onebasin.state import state_of

QUICK: dict[str, Any] = {"n_resamples": 20}


def network(classes: int = 3, bias: bool = True) -> nn.Module:
    with ob.global_seed(0):
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, classes, bias=bias))


def population(model: nn.Module, members: int = 4, sharp: float = 3.0) -> ob.Population:
    generator = torch.Generator().manual_seed(0)
    return ob.Population.from_stacked({
        name: sharp * (value + 0.2 * torch.randn(members, *value.shape, generator=generator))
        for name, value in state_of(model).items()
    })  # fmt: skip


def labelled(model: nn.Module, count: int = 300, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs, and classes drawn from the model at its own temperature."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    with torch.no_grad():
        p = (2 * model(x)).softmax(1)
    return x, torch.multinomial(p, 1, generator=generator)[:, 0]


MODEL = network()
POPULATION = population(MODEL)
DATA = labelled(MODEL)


def average_nll(logits: Tensor, targets: Tensor) -> float:
    p = logits.double().softmax(2).mean(0)
    return float(-p.gather(1, targets[:, None]).log().mean())


# ---------------------------------------------------------------------- scalings


def test_one_member_has_the_temperature_that_evaluate_takes() -> None:
    logits = ob.predict(MODEL, POPULATION[:1], DATA[0], quantity="logits")
    assert fit_scaling(logits, DATA[1]).temperature == pytest.approx(best_temperature(logits[0], DATA[1]), rel=1e-12)


def test_the_temperature_of_a_population_is_the_least_nll_of_its_average() -> None:
    logits = ob.predict(MODEL, POPULATION, DATA[0], quantity="logits").double()
    found = minimize_scalar(lambda t: average_nll(logits / math.exp(t), DATA[1]), bounds=(-3, 5), method="bounded",
                            options={"xatol": 1e-10})  # fmt: skip
    assert fit_scaling(logits, DATA[1]).temperature == pytest.approx(math.exp(found.x), rel=1e-6)


def test_matrix_scaling_is_logistic_regression_on_the_logits() -> None:
    """Without a ridge both have the same maximum, whose probabilities are unique though A and c are not."""
    logits = ob.predict(MODEL, POPULATION[:1], DATA[0], quantity="logits").double()
    own = fit_scaling(logits, DATA[1], "matrix", ridge=0.0)(logits[0]).softmax(1)
    theirs = LogisticRegression(C=np.inf, tol=1e-10, max_iter=5000).fit(logits[0].numpy(), DATA[1].numpy())
    assert np.abs(own.numpy() - theirs.predict_proba(logits[0].numpy())).max() < 1e-4


def test_the_scalings_are_nested_and_a_large_ridge_gives_the_temperature() -> None:
    logits = ob.predict(MODEL, POPULATION, DATA[0], quantity="logits").double()
    found = [fit_scaling(logits, DATA[1], method, ridge=0.0) for method in ("temperature", "vector", "matrix")]
    losses = [average_nll(one(logits), DATA[1]) for one in found]
    assert average_nll(logits, DATA[1]) > losses[0] > losses[1] > losses[2]
    held = fit_scaling(logits, DATA[1], "matrix", ridge=1e8)
    assert torch.allclose(held.matrix, found[0].matrix, atol=1e-6)
    assert found[0].diagonal is not None
    assert found[1].temperature is None
    assert found[2].diagonal is None
    assert not bool(fit_scaling(logits, DATA[1], "vector", shift=False).shift.any())


def test_isotonic_maps_ascend_and_pool_as_by_hand() -> None:
    p = torch.tensor([0.1, 0.3, 0.4, 0.8]).double()
    both = torch.stack([1 - p, p], 1)
    targets = torch.tensor([0, 1, 0, 1])  # of class 1: 0, then 1 and 0 pool to 1/2 twice, then 1
    found = fit_isotonic(both, targets)
    expected = (4 * torch.tensor([0, 0.5, 0.5, 1]).double() + p) / 5
    assert torch.allclose(found.values[1], expected)
    assert torch.allclose(found(both)[:, 1], expected)  # class 0 mirrors it, so the sum is 1
    between = found(torch.tensor([[0.65, 0.35]]).double())[0, 1]
    assert float(between) == pytest.approx(float(expected[1:3].mean()))


# ---------------------------------------------------------------------- folding


@pytest.mark.parametrize("method", ["temperature", "vector", "matrix"])
@pytest.mark.parametrize("per", ["population", "member"])
def test_folded_networks_predict_what_the_map_says(method: str, per: str) -> None:
    wide = POPULATION.to(dtype=torch.float64)
    before = {name: value.clone() for name, value in wide.stacked().items()}
    found = ob.calibrate(MODEL, wide, DATA, method, per=per, ridge=0.01, folds=2, **QUICK)
    assert isinstance(found.networks, ob.Population)
    logits = ob.predict(MODEL, wide, DATA[0], quantity="logits")
    folded = ob.predict(MODEL, found.networks, DATA[0], average=True)
    assert float((folded - found(logits)).abs().max()) < 1e-12
    assert found.proof is not None
    assert found.proof < 1e-10
    assert len(found.scalings) == (4 if per == "member" else 1)
    assert all(torch.equal(value, before[name]) for name, value in wide.stacked().items())
    assert all(torch.equal(found.networks.tensor(name), before[name]) for name in ("0.weight", "0.bias"))


def test_a_network_comes_back_as_a_network_and_convolutions_fold_too() -> None:
    with ob.global_seed(0):
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten())
    state = {name: 4 * value for name, value in state_of(model).items()}
    found = ob.calibrate(model, state, DATA, "matrix", folds=2, ridge=0.1, **QUICK)
    assert isinstance(found.networks, dict)
    assert found.networks["1.weight"].shape == state["1.weight"].shape
    assert not torch.equal(found.networks["1.weight"], state["1.weight"])
    one = ob.Population.from_states([state])
    again = ob.predict(model, ob.Population.from_states([found.networks]), DATA[0], average=True)
    assert torch.allclose(again, found(ob.predict(model, one, DATA[0], quantity="logits")), atol=1e-6)


class Sum(nn.Module):
    """Two last layers, and log probabilities as outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.a(x) + self.b(x)).log_softmax(1)


def test_several_last_layers_and_log_probabilities() -> None:
    """A temperature passes through log_softmax; a vector does not, and the proof finds that."""
    with ob.global_seed(0):
        model = Sum()
    state = {name: 6 * value for name, value in state_of(model).items()}
    found = ob.calibrate(model, state, DATA, folds=2, **QUICK)
    assert found.networks is not None
    vector = ob.calibrate(model, state, DATA, "vector", ridge=0.01, folds=2, **QUICK)
    assert vector.networks is None
    assert "not the result of its last layer" in vector.why


class Halved(nn.Module):
    """Outputs that are no last layer's as they are, in two ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last = how, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.last(x)
        return z.tanh() if self.how == "tanh" else z + x @ self.last.weight.T


def test_what_cannot_be_folded_says_why_and_is_a_function_still() -> None:
    for how, why in (("tanh", "not the result"), ("twice", "used more than once")):
        with ob.global_seed(0):
            model = Halved(how)
        state = {name: 6 * value for name, value in state_of(model).items()}
        found = ob.calibrate(model, state, DATA, folds=2, **QUICK)
        assert found.networks is None
        assert why in found.why
        logits = ob.predict(model, ob.Population.from_states([state]), DATA[0], quantity="logits")
        temperature = best_temperature(logits[0], DATA[1])
        assert torch.allclose(found(logits), (logits[0].double() / temperature).softmax(1))


def test_without_a_bias_there_is_no_shift() -> None:
    model = network(bias=False)
    found = ob.calibrate(model, population(model), DATA, "vector", ridge=0.1, folds=2, **QUICK)
    assert found.networks is not None
    assert not bool(found.scalings[0].shift.any())


def test_one_logit_is_scaled_as_platt_did() -> None:
    model = network(classes=1)
    networks = population(model, members=1)
    data = DATA[0], (DATA[1] > 0).long()
    found = ob.calibrate(model, networks, data, "vector", likelihood="bernoulli", ridge=1e-9, folds=2, **QUICK)
    z = ob.predict(model, networks, DATA[0], quantity="values")[0].double().numpy()
    theirs = LogisticRegression(C=np.inf, tol=1e-10).fit(z, data[1].numpy())
    assert isinstance(found.networks, ob.Population)
    folded = ob.predict(model, found.networks, DATA[0], quantity="values")[0].double().sigmoid().numpy()[:, 0]
    assert np.abs(folded - theirs.predict_proba(z)[:, 1]).max() < 1e-4


# ---------------------------------------------------------------------- posteriors


def posterior(covariance: str) -> ob.Posterior:
    wide = POPULATION.to(dtype=torch.float64)
    layout = flat_layout(wide)
    generator = torch.Generator().manual_seed(3)
    size = layout.size
    last = torch.arange(25, 43)  # weight and bias of the last layer
    scale = 0.1 + torch.rand(size, generator=generator, dtype=torch.float64)
    square = torch.randn(size, size, generator=generator, dtype=torch.float64)
    full = Full.from_covariance(square @ square.T / size)
    blocks = []
    for name in layout.names:
        shape = tuple(layout.spec[name].shape)
        p, q = shape if len(shape) == 2 else (shape[0], 1)
        turn = torch.linalg.qr(torch.randn(q, q, generator=generator, dtype=torch.float64))[0]
        blocks.append(Block(None, turn, 0.1 + torch.rand(p, q, generator=generator, dtype=torch.float64)))
    found: Any = {
        "diagonal": Diagonal(scale),
        "low-rank": LowRank(scale, square[:, :3]),
        "full": full,
        "kronecker": Kronecker(blocks),
        "last": Partial(Full.from_covariance(square[:18] @ square[:18].T), last, size),
        "last-diagonal": Partial(Diagonal(scale[last]), last, size),
    }[covariance]
    centre = layout.flat(wide.member(0))
    return ob.Posterior.equal([Gaussian(centre, found), Gaussian(centre.flip(0), found)], layout, [{}, {}])


MAPS = {
    "temperature": (torch.eye(3) / 3, torch.zeros(3)),
    "vector": (torch.diag(torch.tensor([0.5, -1.5, 2.0])), torch.tensor([1.0, 0.0, -2.0])),
    "matrix": (torch.tensor([[1.0, 0.5, 0], [0, 0.7, -0.2], [0.3, 0, 2]]), torch.tensor([1.0, 0.0, -2.0])),
}
EXACT = [
    *((kind, name) for kind in ("diagonal", "low-rank", "full", "kronecker", "last", "last-diagonal")
      for name in ("temperature", "vector")),
    ("full", "matrix"), ("last", "matrix"),
]  # fmt: skip


def jacobian(output: OutputMap, one: ob.Posterior) -> Tensor:
    """J (D, D) of the folded map, column by column, from networks."""
    layout, zero = one.layout, torch.zeros(1, one.layout.size, dtype=torch.float64)

    def moved(flat: Tensor) -> Tensor:
        whole = output.of_networks(layout.laid_out(flat, {}))
        return torch.cat([whole[name].reshape(len(flat), -1) for name in layout.names], 1)

    return (moved(torch.eye(layout.size, dtype=torch.float64)) - moved(zero)).T


@pytest.mark.parametrize(("kind", "name"), EXACT)
def test_a_posterior_moves_exactly(kind: str, name: str) -> None:
    """Centres are moved networks; the covariance is J C J^T, by its density at moved points and its deviations."""
    matrix, shift = MAPS[name]
    output = OutputMap((("2.weight", "2.bias"),), matrix.double(), shift.double())
    one = posterior(kind)
    moved = output.of_posterior(one)
    turn = jacobian(output, one)
    for before, after in zip(one.components, moved.components, strict=True):
        states = one.layout.laid_out(before.centre[None], {})
        wanted = torch.cat([value.reshape(-1) for value in output.of_networks(states).values()])
        assert torch.equal(after.centre, wanted)
        columns = torch.eye(one.layout.size, dtype=torch.float64)
        dense = _dense(before.covariance, columns)
        assert torch.allclose(_dense(after.covariance, columns), turn @ dense @ turn.T, atol=1e-12)
    if "last" not in kind:  # a density exists
        point = one.draw(1, torch.Generator().manual_seed(0)).member(0)
        there = {key: value[0] for key, value in output.of_networks({k: v[None] for k, v in point.items()}).items()}
        expected = one.log_density(point) - float(turn.det().abs().log())
        assert moved.log_density(there) == pytest.approx(expected, rel=1e-9)


def _dense(covariance: Any, columns: Tensor) -> Tensor:
    """The covariance as a matrix, from the tensors that define it."""
    if isinstance(covariance, Diagonal):
        return torch.diag(covariance.scale.square())
    if isinstance(covariance, LowRank):
        return torch.diag(covariance.scale.square()) + covariance.factor @ covariance.factor.T
    if isinstance(covariance, Full):
        return covariance.factor @ covariance.factor.T
    if isinstance(covariance, Partial):
        whole = torch.zeros_like(columns)
        whole[covariance.places[:, None], covariance.places] = _dense(covariance.inner, columns)
        return whole
    parts = []
    for block in covariance.blocks:
        left = torch.eye(block.scale.shape[0], dtype=torch.float64) if block.left is None else block.left
        right = torch.eye(block.scale.shape[1], dtype=torch.float64) if block.right is None else block.right
        turn = torch.kron(left.contiguous(), right.contiguous())
        parts.append(turn @ torch.diag(block.scale.reshape(-1).square()) @ turn.T)
    return torch.block_diag(*parts)


@pytest.mark.parametrize("kind", ["diagonal", "low-rank", "kronecker", "last-diagonal"])
def test_independent_weights_are_not_mixed_in_silence(kind: str) -> None:
    matrix, shift = MAPS["matrix"]
    output = OutputMap((("2.weight", "2.bias"),), matrix.double(), shift.double())
    with pytest.raises(InputError, match='method="vector" or "temperature"'):
        output.of_posterior(posterior(kind))


def test_turned_rows_of_a_kronecker_covariance_take_one_factor_only() -> None:
    block = Block(torch.linalg.qr(torch.ones(3, 3) + torch.eye(3))[0].double(), None, torch.ones(3, 1).double())
    layout = flat_layout(ob.Population.from_stacked({"w": torch.zeros(1, 3, 1)}))
    one = ob.Posterior.equal([Gaussian(torch.zeros(3).double(), Kronecker([block]))], layout, [{}])
    half = OutputMap((("w", None),), torch.eye(3).double() / 2, torch.zeros(3).double())
    assert torch.allclose(half.of_posterior(one).flat_std, one.flat_std / 2)
    with pytest.raises(InputError, match='method="temperature"'):
        OutputMap((("w", None),), MAPS["vector"][0].double(), torch.zeros(3).double()).of_posterior(one)
    with pytest.raises(InputError, match="with a bias"):
        OutputMap((("w", None),), torch.eye(3).double(), torch.ones(3).double())


def test_draws_of_a_calibrated_posterior_are_calibrated_draws() -> None:
    q = ob.fit(population(MODEL, members=20).to(dtype=torch.float64))
    found = ob.calibrate(MODEL, q, DATA, draws=10, folds=2, **QUICK)
    assert isinstance(found.networks, ob.Posterior)
    assert found.networks.provenance["calibrated"] is True
    logits = ob.predict(MODEL, q, DATA[0], quantity="logits", draws=10)
    folded = ob.predict(MODEL, found.networks, DATA[0], draws=10, average=True)
    assert torch.allclose(folded, found(logits), atol=1e-10)


# ---------------------------------------------------------------------- numbers


def test_numbers_are_those_of_evaluate_and_of_maps_that_never_saw_the_example() -> None:
    found = ob.calibrate(MODEL, POPULATION, DATA, folds=5, **QUICK)
    logits = ob.predict(MODEL, POPULATION, DATA[0], quantity="logits")
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    after = torch.zeros(300, dtype=torch.float64)
    for part in range(5):
        held = order[part::5]
        rest = torch.tensor([row for row in range(300) if row not in set(held.tolist())])
        temperature = fit_scaling(logits[:, rest], DATA[1][rest]).temperature
        assert temperature is not None
        p = (logits[:, held].double() / temperature).softmax(2).mean(0)
        after[held] = -p.gather(1, DATA[1][held][:, None])[:, 0].log()
    assert found.after["nll"].value == pytest.approx(float(after.mean()), rel=1e-9)
    before = ob.evaluate(MODEL, POPULATION, DATA, n_resamples=20).in_distribution
    for name, value in found.before.items():
        assert value.value == pytest.approx(before[name].value, rel=1e-6), name
    assert found.gain.value == pytest.approx(found.before["nll"].value - found.after["nll"].value)
    assert found.gain.low <= found.gain.value <= found.gain.high


def test_a_calibrated_average_stays_calibrated_on_new_examples() -> None:
    """Fitted on 300 examples, the NLL of 2,000 new ones falls to the one that was promised, within its noise."""
    new = labelled(MODEL, 2000, seed=9)
    found = ob.calibrate(MODEL, POPULATION, DATA, **QUICK)
    assert isinstance(found.networks, ob.Population)
    assert found.temperature is not None
    scores = [ob.evaluate(MODEL, one, new, n_resamples=20).in_distribution for one in (POPULATION, found.networks)]
    assert scores[1]["nll"].value < scores[0]["nll"].value - 0.05
    logs = ob.predict(MODEL, found.networks, new[0], average=True).gather(1, new[1][:, None]).log()
    error = math.sqrt(float(logs.var()) * (1 / 300 + 1 / 2000))
    assert abs(scores[1]["nll"].value - found.after["nll"].value) < 4 * error


def test_average_and_isotonic_are_functions_of_average_probabilities() -> None:
    average = ob.predict(MODEL, POPULATION, DATA[0], average=True)
    pooled = ob.calibrate(MODEL, POPULATION, DATA, per="average", folds=2, **QUICK)
    assert pooled.networks is None
    assert pooled.temperature == pytest.approx(best_temperature(average.log(), DATA[1]), rel=1e-5)
    powered = average ** (1 / pooled.temperature)
    assert torch.allclose(pooled(average), powered / powered.sum(1, keepdim=True), atol=1e-6)
    isotonic = ob.calibrate(MODEL, POPULATION, DATA, "isotonic", folds=2, **QUICK)
    logits = ob.predict(MODEL, POPULATION, DATA[0], quantity="logits").double()
    exact = (logits.log_softmax(2).logsumexp(0) - math.log(4)).softmax(1)  # steps are steep: the very same numbers
    assert torch.allclose(isotonic(exact), fit_isotonic(exact, DATA[1])(exact), atol=1e-9)
    assert "bend" in isotonic.why
    with pytest.raises(InputError, match="average=True"):
        pooled(average[None])
    with pytest.raises(InputError, match="of 4 members"):
        ob.calibrate(MODEL, POPULATION, DATA, per="member", folds=2, **QUICK)(average[None])


def test_the_ridge_is_the_one_of_least_cross_validated_loss() -> None:
    some = DATA[0][:60], DATA[1][:60]
    found = ob.calibrate(MODEL, POPULATION[:1], some, "matrix", folds=3, **QUICK)
    others = [ob.calibrate(MODEL, POPULATION[:1], some, "matrix", folds=3, ridge=r, **QUICK) for r in (0.001, 1.0)]
    assert found.ridge in (0.001, 0.01, 0.1, 1.0, 10.0)
    assert all(found.after["nll"].value <= other.after["nll"].value + 1e-12 for other in others)


def test_a_folder_for_networks_and_progress(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    POPULATION.save(tmp_path / "raw")
    stored = ob.Population.open(tmp_path / "raw")
    found = ob.calibrate(MODEL, stored, DATA, "vector", per="member", ridge=0.1, folds=2, path=tmp_path / "new",
                         progress=lambda *each: told.append(each), **QUICK)  # fmt: skip
    assert isinstance(found.networks, ob.Population)
    assert not found.networks.in_memory
    memory = ob.calibrate(MODEL, POPULATION, DATA, "vector", per="member", ridge=0.1, folds=2, **QUICK).networks
    assert isinstance(memory, ob.Population)
    assert all(torch.equal(found.networks.tensor(name), memory.tensor(name)) for name in memory.names)
    assert told[-1] == (3, 3, "fits")


def test_log_densities_of_other_weights_are_left_out(tmp_path: Path) -> None:
    known = replace(POPULATION, log_density=torch.arange(4.0).double())
    for path in (None, tmp_path / "new"):
        folded = ob.calibrate(MODEL, known, DATA, folds=2, path=path, **QUICK).networks
        assert isinstance(folded, ob.Population) and folded.log_density is None
    assert ob.Population.open(tmp_path / "new").log_density is None


def test_refusals_name_the_remedy() -> None:
    right = DATA[0], ob.predict(MODEL, POPULATION[:1], DATA[0], average=True).argmax(1)
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (POPULATION, DATA, {"method": "platt"}, "give 'temperature'"),
        (POPULATION, DATA, {"per": "class"}, "give 'population'"),
        (POPULATION, DATA, {"method": "isotonic", "per": "member"}, "leave per out"),
        (posterior("diagonal"), DATA, {"per": "member"}, "leave per out"),
        (POPULATION, DATA, {"folds": 1}, "leave folds out"),
        (POPULATION, (DATA[0][:5], DATA[1][:5]), {}, "give more"),
        (POPULATION, (DATA[0], torch.randn(300, 3)), {}, "ob.conformal"),
        (POPULATION[:1], right, {}, "give more held-out examples"),
    ]
    for networks, data, options, remedy in cases:
        with pytest.raises(InputError, match=remedy.replace("(", r"\(")):
            ob.calibrate(MODEL, networks, data, **QUICK, **options)
    one, pair = network(classes=1), (DATA[0], (DATA[1] > 0).long())
    with pytest.raises(InputError, match='choose method="vector"'):
        ob.calibrate(one, population(one), pair, "matrix", likelihood="bernoulli")


def test_the_record_says_what_was_folded() -> None:
    found = ob.calibrate(MODEL, POPULATION, DATA, folds=2, **QUICK)
    assert "folded into the weights" in str(found)
    kept = replace(found, networks=None, proof=None, why="no reason")
    assert "Nothing is folded into weights: no reason" in str(kept)
    assert found.to_dict()["temperature"] == found.temperature
