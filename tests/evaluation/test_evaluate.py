"""The report on a population: every number computed in another way, streamed or not, for populations and posteriors."""

import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.evaluation.evaluate import Estimate, Evaluation, evaluate
from onebasin.functional.population_pass import predictions
from onebasin.inference.likelihood import LearnedNoise
from onebasin.metrics.calibration import ace, best_temperature, ece
from onebasin.metrics.detection import fpr95
from onebasin.metrics.regression import central_interval, gaussian_nll
from onebasin.population.population import Population
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.reporting import Figure
from onebasin.state import spec_of, state_of

QUICK: dict[str, Any] = {"n_resamples": 50}


def network(inputs: int = 3, classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, classes))


def population(model: nn.Module, members: int = 6, seed: int = 0) -> Population:
    generator = torch.Generator().manual_seed(seed)
    return Population.from_stacked({
        name: value + 0.7 * torch.randn(members, *value.shape, generator=generator)
        for name, value in state_of(model).items()
    })  # fmt: skip


def posterior(model: nn.Module, std: float = 0.5) -> Posterior:
    state = state_of(model)
    layout = FlatLayout(tuple(state), spec_of(state), {})
    centre = layout.flat(state)
    return Posterior.equal([Gaussian(centre, Diagonal(torch.full_like(centre, std)))], layout, [{}])


def examples(count: int = 200, inputs: int = 3, classes: int = 4, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, inputs, generator=generator), torch.randint(classes, (count,), generator=generator)


MODEL = network()
POPULATION = population(MODEL)
DATA = examples()
OUTSIDE = 4 * examples(150, seed=2)[0]


@pytest.fixture(scope="module")
def whole() -> Evaluation:
    return evaluate(MODEL, POPULATION, DATA, ood=OUTSIDE, reference=POPULATION[:2])


def softmaxes(inputs: Tensor, population: Population = POPULATION) -> np.ndarray:
    z = predictions(MODEL, population, inputs).double().numpy()
    e = np.exp(z - z.max(2, keepdims=True))
    found: np.ndarray = e / e.sum(2, keepdims=True)
    return found


# ---------------------------------------------------------------------- classes


def test_numbers_on_the_examples(whole: Evaluation) -> None:
    members, y = softmaxes(DATA[0]), DATA[1].numpy()
    p = members.mean(0)
    information = -(p * np.log(p)).sum(1) + (members * np.log(members)).sum(2).mean(0)
    expected = {
        "accuracy": (p.argmax(1) == y).mean(),
        "nll": log_loss(y, p, labels=range(4)),
        "brier": brier_score_loss(y, p, labels=range(4), scale_by_half=False),
        "ece": float(ece(torch.from_numpy(p), DATA[1])),
        "ace_class_wise": float(ace(torch.from_numpy(p), DATA[1])),
        "ace_top_label": float(ace(torch.from_numpy(p), DATA[1], kind="top-label")),
        "mutual_information": information.mean(),
    }
    assert whole.in_distribution.keys() == expected.keys()
    assert (whole.kind, whole.members, whole.examples, whole.ood_examples) == ("categorical", 6, 200, 150)
    for name, value in expected.items():
        assert whole.in_distribution[name].value == pytest.approx(value, rel=1e-6), name
        assert whole.in_distribution[name].low <= whole.in_distribution[name].high, name
    # The standard error of a share, of which a 95 % interval is 2 x 1.96 wide.
    share = whole.in_distribution["accuracy"]
    error = math.sqrt(share.value * (1 - share.value) / 200)
    assert share.high - share.low == pytest.approx(3.92 * error, rel=0.15)


def test_numbers_on_foreign_inputs(whole: Evaluation) -> None:
    z = {name: predictions(MODEL, POPULATION, x).double().numpy() for name, x in (("in", DATA[0]), ("out", OUTSIDE))}
    p = {"in": softmaxes(DATA[0]), "out": softmaxes(OUTSIDE)}
    entropy = {name: -(own.mean(0) * np.log(own.mean(0))).sum(1) for name, own in p.items()}
    scores = {
        "msp": {name: -own.mean(0).max(1) for name, own in p.items()},
        "entropy": entropy,
        "mutual_information": {name: entropy[name] + (p[name] * np.log(p[name])).sum(2).mean(0) for name in p},
        "max_logit": {name: -own.mean(0).max(1) for name, own in z.items()},
        "energy": {name: -np.log(np.exp(own.mean(0)).sum(1)) for name, own in z.items()},
    }
    labels = np.r_[np.zeros(200), np.ones(150)]
    assert whole.detection.keys() == scores.keys()
    for name, own in scores.items():
        found, both = whole.detection[name], np.r_[own["in"], own["out"]]
        assert found["auroc"].value == pytest.approx(roc_auc_score(labels, both), abs=1e-6), name
        assert found["aupr_out"].value == pytest.approx(average_precision_score(labels, both), abs=1e-6), name
        assert found["aupr_in"].value == pytest.approx(average_precision_score(1 - labels, -both), abs=1e-6), name
        tensors = torch.from_numpy(own["in"]), torch.from_numpy(own["out"])
        assert found["fpr95_in"].value == pytest.approx(float(fpr95(*tensors, positive="in_distribution")), abs=1e-6), (
            name
        )
        assert found["fpr95_out"].value == pytest.approx(float(fpr95(*tensors)), abs=1e-6), name
    assert whole.ood["mutual_information"].value == pytest.approx(scores["mutual_information"]["out"].mean())


def test_comparison_with_a_population_and_with_its_predictive(whole: Evaluation) -> None:
    p, q = softmaxes(DATA[0]).mean(0), softmaxes(DATA[0], POPULATION[:2]).mean(0)
    assert whole.reference["agreement"].value == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    assert whole.reference["total_variation"].value == pytest.approx(np.abs(p - q).sum(1).mean() / 2)
    given = evaluate(MODEL, POPULATION, DATA, reference=torch.from_numpy(q), **QUICK)
    for name, estimate in given.reference.items():
        assert estimate.value == pytest.approx(whole.reference[name].value)
    itself = evaluate(MODEL, POPULATION, DATA, reference=POPULATION, **QUICK)
    assert itself.reference == {"agreement": Estimate(1, 1, 1), "total_variation": Estimate(0, 0, 0)}


def test_the_temperature_never_sees_what_it_is_judged_on(whole: Evaluation) -> None:
    logs = torch.from_numpy(np.log(softmaxes(DATA[0]).mean(0)))
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    fitting, judging = order[:100], order[100:]
    temperature = best_temperature(logs[fitting], DATA[1][fitting])
    assert whole.temperature == pytest.approx(temperature, rel=1e-5)
    p = (logs[judging] / temperature).softmax(1)
    y = DATA[1][judging]
    assert whole.tempered["nll"].value == pytest.approx(log_loss(y.numpy(), p.numpy(), labels=range(4)), rel=1e-6)
    assert whole.tempered["ece"].value == pytest.approx(float(ece(p, y)), abs=1e-6)
    assert whole.tempered["nll_before"].value == pytest.approx(
        log_loss(y.numpy(), logs[judging].exp().numpy(), labels=range(4)), rel=1e-6
    )
    assert whole.tempered["nll"].value < whole.tempered["nll_before"].value, "random networks are too sure"


def test_members_are_averaged_in_a_stream_of_any_width() -> None:
    one = evaluate(MODEL, POPULATION, DATA, ood=OUTSIDE, chunk=1, batch=7, **QUICK)
    all_ = evaluate(MODEL, POPULATION, DATA, ood=OUTSIDE, chunk=6, **QUICK)
    for name, estimate in one.in_distribution.items():
        assert estimate == pytest.approx(all_.in_distribution[name], abs=1e-5), name
    for score, numbers in one.detection.items():
        for name, estimate in numbers.items():
            assert estimate == pytest.approx(all_.detection[score][name], abs=1e-2), (score, name)


def test_equal_members_do_not_disagree_at_all() -> None:
    same = Population.from_stacked(
        {name: value[:1].expand(9, *value.shape[1:]) for name, value in POPULATION.stacked().items()}
    )
    found = evaluate(MODEL, same, DATA, chunk=1, **QUICK)
    assert found.in_distribution["mutual_information"] == Estimate(0, 0, 0)
    single = evaluate(MODEL, POPULATION[:1], DATA, chunk=1, **QUICK)
    for name in ("accuracy", "brier", "ece"):
        assert found.in_distribution[name] == single.in_distribution[name]


def test_overconfident_networks_cost_much_and_not_infinitely_much() -> None:
    huge = Population.from_stacked({name: 1e4 * value for name, value in POPULATION[:2].stacked().items()})
    found = evaluate(MODEL, huge, DATA, **QUICK)
    assert 100 < found.in_distribution["nll"].value < math.inf
    json.loads(found.to_json())


def test_one_logit_is_two_classes() -> None:
    binary = network(classes=1)
    networks, (x, y) = population(binary), examples(classes=2)
    two = nn.Sequential(binary, nn.Linear(1, 2))  # z -> (0, z)
    stacked = {f"0.{name}": value for name, value in networks.stacked().items()}
    stacked["1.weight"] = torch.tensor([[0.0], [1.0]]).expand(6, 2, 1)
    stacked["1.bias"] = torch.zeros(6, 2)
    pairs = evaluate(two, Population.from_stacked(stacked), (x, y), ood=OUTSIDE, **QUICK)
    for targets in (y, y.float()[:, None]):
        found = evaluate(binary, networks, (x, targets), ood=OUTSIDE, likelihood="bernoulli", **QUICK)
        assert found.kind == "bernoulli"
        for name, estimate in found.in_distribution.items():
            assert estimate == pytest.approx(pairs.in_distribution[name], abs=1e-5), name
        for score in ("msp", "entropy", "mutual_information"):
            assert found.detection[score]["auroc"].value == pytest.approx(
                pairs.detection[score]["auroc"].value, abs=1e-3
            )


def test_posteriors_are_drawn_from_and_seeds_decide() -> None:
    given = posterior(MODEL)
    one, two = (evaluate(MODEL, given, DATA, draws=20, seed=3, **QUICK) for _ in range(2))
    assert one.to_dict() == two.to_dict()
    assert one.members == 20
    assert one.to_dict() != evaluate(MODEL, given, DATA, draws=20, seed=4, **QUICK).to_dict()
    assert evaluate(MODEL, given, DATA, **QUICK).members == 100
    # A reference posterior gets other random numbers: two populations of the same posterior are close, but not equal.
    itself = evaluate(MODEL, given, DATA, reference=given, draws=400, **QUICK).reference["total_variation"].value
    assert 0 < itself < 0.05
    sharp = evaluate(MODEL, posterior(MODEL, 1e-6), DATA, draws=3, **QUICK)
    assert sharp.in_distribution["mutual_information"].value < 1e-9


def test_models_and_the_global_generator_stay_as_they_were() -> None:
    before = {name: value.clone() for name, value in MODEL.state_dict().items()}
    state = torch.random.get_rng_state()
    evaluate(MODEL, posterior(MODEL), DATA, ood=OUTSIDE, draws=2, **QUICK)
    assert all(torch.equal(value, before[name]) for name, value in MODEL.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert MODEL.training


# ---------------------------------------------------------------------- values


def regression() -> tuple[nn.Module, Population, Tensor, Tensor]:
    model = network(classes=1)
    networks = population(model)
    x, _ = examples()
    means = predictions(model, networks, x).double()[:, :, 0]
    noise = torch.randn(200, generator=torch.Generator().manual_seed(5))
    return model, networks, x, means.mean(0).float() + noise


@pytest.mark.parametrize("column", [False, True])
def test_numbers_of_values(column: bool) -> None:
    model, networks, x, y = regression()
    found = evaluate(model, networks, (x, y[:, None] if column else y), noise=0.8, coverage=(0.5, 0.9), **QUICK)
    means, goals = predictions(model, networks, x).double()[:, :, 0], y.double()
    low, high = central_interval(means, 0.8, 0.9)
    expected = {
        "rmse": np.sqrt(((means.numpy().mean(0) - goals.numpy()) ** 2).mean()),
        "nll": float(gaussian_nll(means, goals, 0.8)),
        "coverage_90": float(((goals >= low) & (goals <= high)).double().mean()),
        "width_90": float((high - low).mean()),
    }
    assert set(found.in_distribution) == {*expected, "coverage_50", "width_50"}
    for name, value in expected.items():
        assert found.in_distribution[name].value == pytest.approx(value, rel=1e-6), name
    assert (found.kind, found.temperature, dict(found.detection)) == ("gaussian", None, {})


def test_learned_noise_is_the_networks_own() -> None:
    model, networks, x, y = regression()
    learned = LearnedNoise(model)
    stacked = {f"model.{name}": value for name, value in networks.stacked().items()}
    noise = torch.linspace(0.5, 1.5, 6)
    stacked["log_noise"] = noise.log()[:, None]
    found = evaluate(learned, Population.from_stacked(stacked), (x, y), **QUICK)
    means = predictions(model, networks, x).double()[:, :, 0]
    expected = float(gaussian_nll(means, y.double(), noise.double()[:, None]))
    assert found.in_distribution["nll"].value == pytest.approx(expected, rel=1e-6)


# ---------------------------------------------------------------------- the report


def test_calibration_errors_lie_in_their_intervals(whole: Evaluation) -> None:
    numbers = [*whole.in_distribution.items(), *whole.tempered.items()]
    errors = [own for name, own in numbers if name.startswith(("ece", "ace"))]
    assert len(errors) == 5
    for value, low, high in errors:
        assert 0 <= low <= value <= high <= 1
        assert low < high


def test_the_record_is_plain_json(whole: Evaluation) -> None:
    record = json.loads(whole.to_json())
    assert record == whole.to_dict()
    assert record["inside"]["nll"].keys() == {"value", "low", "high"}
    assert record["detection"]["energy"]["auroc"]["value"] == whole.detection["energy"]["auroc"].value
    settings = {"level": 0.95, "seed": 0, "method": "bca", "resamples": 1000, "bins": 15}
    assert record["settings"] == {**settings, "calibration_method": "absolute"}


def test_the_table_shows_every_number(whole: Evaluation) -> None:
    text = str(whole)
    assert "6 networks, 200 examples, 150 out-of-distribution inputs, categorical" in text
    groups = [whole.in_distribution, whole.tempered, whole.ood, whole.reference, *whole.detection.values()]
    for estimate in (estimate for group in groups for estimate in group.values()):
        assert f"{estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}]" in text
    assert f"T = {whole.temperature:.4g}" in text
    assert "out-of-distribution" not in str(evaluate(MODEL, POPULATION, DATA, **QUICK))
    assert all(line == line.rstrip() for line in text.splitlines())


def test_two_examples_are_enough_and_one_has_no_half() -> None:
    x, y = DATA
    assert evaluate(MODEL, POPULATION, (x[:2], y[:2]), **QUICK).temperature is not None
    single = evaluate(MODEL, POPULATION, (x[:1], y[:1]), **QUICK)
    assert (single.temperature, dict(single.tempered)) == (None, {})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"likelihood": "poisson"}, "categorical, bernoulli, gaussian"),
        ({"data": (DATA[0], DATA[1][:5])}, "one target for each of 200 examples"),
        ({"data": (DATA[0], DATA[1] + 3)}, "class numbers from 0 to 3"),
        ({"data": (DATA[0] * torch.nan, DATA[1])}, "found NaN or infinity: leave these"),
        ({"likelihood": "bernoulli"}, "one logit per example"),
        ({"data": (DATA[0], DATA[1].float())}, "noise"),
        ({"data": (DATA[0], DATA[1].float()), "ood": OUTSIDE, "noise": 1.0}, "gaussian likelihood"),
        ({"reference": torch.eye(4)}, "same examples"),
        ({"reference": MODEL}, "Population or a Posterior"),
        ({"networks": MODEL}, "Population or a Posterior"),
        ({"bins": 0}, "at least 1 bin"),
        ({"n_resamples": 1}, "n_resamples >= 2"),
    ],
)
def test_mistakes_get_a_sentence(changes: dict[str, Any], text: str) -> None:
    arguments = {"networks": POPULATION, "data": DATA, **changes}
    with pytest.raises(InputError, match=text):
        evaluate(MODEL, **arguments)


def test_one_column_of_outputs_is_no_classifier() -> None:
    model = network(classes=1)
    with pytest.raises(InputError, match="at least 2 classes"):
        evaluate(model, population(model), DATA)
    with pytest.raises(InputError, match="0 or 1"):
        evaluate(model, population(model), DATA, likelihood="bernoulli")


def test_the_figures_hold_the_numbers_of_the_tables(whole: Evaluation) -> None:
    found = whole.reliability
    assert found is not None and int(found.count.sum()) == whole.examples
    gaps = (found.accuracy - found.confidence).abs().nan_to_num() * found.count / whole.examples
    assert float(gaps.sum()) == pytest.approx(whole.in_distribution["ece"].value)
    for counts in whole.scores.values():  # every example and every input is in a bin
        assert (sum(counts.in_distribution), sum(counts.ood)) == (whole.examples, whole.ood_examples)
    middles = [(a + b) / 2 for a, b in pairwise(whole.scores["msp"].edges)]
    near, far = whole.scores["msp"].in_distribution, whole.scores["msp"].ood
    above = sum(a * b * ((y > x) + (y == x) / 2) for x, a in zip(middles, near, strict=True)
                for y, b in zip(middles, far, strict=True)) / (whole.examples * whole.ood_examples)  # fmt: skip
    assert above == pytest.approx(whole.detection["msp"]["auroc"].value, abs=0.03)  # bins of 1 / 40


def test_the_coverage_curve_goes_through_the_levels_of_the_table() -> None:
    from onebasin.evaluation.figures import LEVELS

    noise = torch.Generator().manual_seed(0)
    population = Population.from_stacked({"weight": torch.randn(5, 1, 1, generator=noise).double()})
    x = torch.randn(60, 1, generator=noise).double()
    found = evaluate(nn.Linear(1, 1, bias=False).double(), population, (x, x), noise=0.7, n_resamples=20)
    for level in (0.5, 0.9, 0.95):
        expected = found.in_distribution[f"coverage_{100 * level:g}"].value
        assert found.coverage[LEVELS.index(level)] == pytest.approx(expected, abs=1e-9)


# ---------------------------------------------------------------------- abstention and shift


def test_abstention_is_reported_with_intervals_and_a_curve(whole: Evaluation) -> None:
    p, y = softmaxes(DATA[0]).mean(0), DATA[1].numpy()
    wrong = (p.argmax(1) != y)[np.argsort(-p.max(1), kind="stable")]
    risks = wrong.cumsum() / np.arange(1, 201)
    assert whole.selective["aurc"].value == pytest.approx(risks.mean(), abs=1e-9)
    assert whole.selective["augrc"].value == pytest.approx(np.trapezoid([0, *wrong.cumsum() / 200], dx=1 / 200))
    assert whole.selective["risk_at_80"].value == pytest.approx(risks[159])
    assert whole.selective["coverage_at_5"].value == pytest.approx(max([0, *np.flatnonzero(risks <= 0.05) + 1]) / 200)
    assert whole.selective_risk == pytest.approx([risks[10 * k - 1] for k in range(1, 21)])
    assert all(one.low <= one.value <= one.high for name, one in whole.selective.items() if "risk" in name)
    assert "aurc" in str(whole)
    assert whole.to_dict()["selective"].keys() == whole.selective.keys()
    assert "risk" in {item.name for item in whole.record().items if isinstance(item, Figure)}


def shifted(severity: int) -> Tensor:
    return DATA[0] + 0.5 * severity


def test_shifted_inputs_have_the_scores_of_an_evaluation_of_their_own() -> None:
    made: list[int] = []

    def late() -> Tensor:
        made.append(2)
        return shifted(2)

    found = evaluate(MODEL, POPULATION, DATA, shifted={"up": {1: shifted(1), 2: late}, "down": -shifted(1)}, **QUICK)
    assert made == [2]
    assert found.shifted is not None
    assert {name: list(levels) for name, levels in found.shifted.numbers.items()} == {"up": [1, 2], "down": [1]}
    sets = {("up", 1): shifted(1), ("up", 2): shifted(2), ("down", 1): -shifted(1)}
    alone = {place: evaluate(MODEL, POPULATION, (x, DATA[1]), **QUICK).in_distribution for place, x in sets.items()}
    for (name, severity), expected in alone.items():
        for metric, value in found.shifted.numbers[name][severity].items():
            assert value.value == pytest.approx(expected[metric].value), (name, severity, metric)
    for metric, value in found.shifted.mean.items():
        assert value.value == pytest.approx(np.mean([expected[metric].value for expected in alone.values()])), metric
        assert math.isnan(value.low) == (metric == "ece")
    assert found.shifted.clean["nll"] == found.in_distribution["nll"]
    assert "under shift" in str(found)
    assert json.loads(found.to_json())["shifted"]["numbers"]["up"]["2"]["accuracy"]["value"] is not None
    axes = found.plot(figure="shift")
    assert len(axes) == 3


def test_the_interval_of_a_mean_over_shifts_draws_the_same_examples_of_all() -> None:
    """Equal shifts are one: their mean has the interval of each, not one that is narrower by a root of two."""
    found = evaluate(MODEL, POPULATION, DATA, shifted={"a": shifted(1), "b": shifted(1)}, n_resamples=200).shifted
    assert found is not None
    assert found.mean["nll"] == pytest.approx(found.numbers["a"][1]["nll"])


def test_refusals_of_shifts() -> None:
    with pytest.raises(InputError, match="in their order"):
        evaluate(MODEL, POPULATION, DATA, shifted={"few": DATA[0][:5]}, **QUICK)
    with pytest.raises(InputError, match=r"onebasin\.data\.shifts"):
        evaluate(MODEL, POPULATION, DATA, shifted=DATA[0], **QUICK)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="number them 1, 2"):
        evaluate(MODEL, POPULATION, DATA, shifted={"none": {0: DATA[0]}}, **QUICK)
    with pytest.raises(InputError, match="evaluate each set of shifted data alone"):
        evaluate(MODEL, POPULATION, (DATA[0], DATA[0].double()), shifted={"a": DATA[0]}, noise=1.0)
