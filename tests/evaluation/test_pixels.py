"""Evaluation of pixels: every number by brute force, intervals over images, missing pixels, bounded memory."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from netcal.metrics import ECE
from sklearn.metrics import jaccard_score, roc_auc_score
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.evaluation import pixels
from onebasin.evaluation.evaluate import Evaluation, Resampling, estimates, evaluate
from onebasin.examples.pixels import UNet, shapes
from onebasin.functional import without
from onebasin.functional.heads import GaussianHead, MixtureHead
from onebasin.metrics.bootstrap import absolute
from onebasin.metrics.calibration import best_temperature, ece_gaps
from onebasin.metrics.depth import absolute_relative_error, silog, squared_relative_error, threshold_accuracy
from onebasin.metrics.pixels import bin_sums, image_gaps, iou, iou_of, mean_iou
from onebasin.metrics.regression import central_interval
from onebasin.population.population import Population

QUICK: dict[str, Any] = {"n_resamples": 60}
IMAGES, CLASSES, SIDE, VOID = 12, 3, 6, 255


def convolution(outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(0)
    return nn.Conv2d(2, outputs, 3, padding=1)


def members(model: nn.Module, number: int = 4, spread: float = 0.6) -> Population:
    generator = torch.Generator().manual_seed(1)
    return Population.from_stacked({
        name: value + spread * torch.randn(number, *value.shape, generator=generator)
        for name, value in model.state_dict().items()
    })  # fmt: skip


def images(count: int = IMAGES, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, SIDE, SIDE, generator=generator)
    y = torch.randint(CLASSES, (count, SIDE, SIDE), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.2] = VOID
    return x, y


MODEL = convolution()
NETWORKS = members(MODEL)
X, Y = images()
FAR = 5 * images(7, seed=3)[0]


@pytest.fixture(scope="module")
def whole() -> Evaluation:
    return evaluate(MODEL, NETWORKS, (X, Y), ood=FAR, reference=NETWORKS[:2], ignore_index=VOID, **QUICK)


def flat() -> tuple[Tensor, Tensor, Tensor]:
    """All pixels that count: probabilities (pixels, classes), class numbers, and the image of each."""
    p = ob.predict(MODEL, NETWORKS, X).double().mean(0).movedim(1, -1).reshape(-1, CLASSES)
    kept = (Y != VOID).flatten()
    image = torch.arange(IMAGES).repeat_interleave(SIDE * SIDE)
    return p[kept], Y.flatten()[kept], image[kept]


# ------------------------------------------------------------------ classes


def test_numbers_are_those_of_all_pixels_that_count(whole: Evaluation) -> None:
    p, y, _ = flat()
    expected = {
        "accuracy": ob.metrics.accuracy(p, y),
        "nll": ob.metrics.nll(p, y),
        "brier": ob.metrics.brier(p, y),
        "ece": ob.metrics.ece(p, y),
        "mean_iou": jaccard_score(y, p.argmax(1), average="macro"),
    }
    for name, value in expected.items():
        assert whole.in_distribution[name].value == pytest.approx(float(value), abs=1e-6), name
    each = jaccard_score(y, p.argmax(1), average=None)
    assert [whole.iou[f"class_{k}"].value for k in range(CLASSES)] == pytest.approx(each.tolist())
    assert whole.in_distribution["ece"].value == pytest.approx(ECE(15).measure(p.numpy(), y.numpy()), abs=1e-6)
    assert (whole.examples, whole.pixels, whole.ood_examples, whole.members) == (IMAGES, len(y), 7, 4)
    counts = whole.reliability.count if whole.reliability is not None else torch.zeros(0)
    assert int(counts.sum()) == len(y)


def test_the_bootstrap_draws_images() -> None:
    """Percentiles of draws of whole images by hand are what the weights of sums give."""
    _, y, image = flat()
    predicted = flat()[0].argmax(1)
    counts = torch.randint(0, 3, (20, IMAGES), generator=torch.Generator().manual_seed(4)).double()
    by_weights = iou(ob.predict(MODEL, NETWORKS, X).double().mean(0).argmax(1), Y, 3, ignore_index=VOID, weights=counts)
    for row, found in zip(counts, by_weights, strict=True):
        times = row[image].long()
        rows = torch.repeat_interleave(torch.arange(len(y)), times)
        by_hand = jaccard_score(y[rows], predicted[rows], average=None)
        assert found.tolist() == pytest.approx(by_hand.tolist())


def test_the_interval_of_accuracy_is_that_of_images_as_clusters(whole: Evaluation) -> None:
    p, y, image = flat()
    right = torch.zeros(IMAGES).double().index_add_(0, image, (p.argmax(1) == y).double())
    sizes = torch.bincount(image).double()

    def ratio(counts: Any) -> dict[str, Tensor]:
        weights = torch.ones(IMAGES).double() if counts is None else counts[0]
        return {"accuracy": (weights @ right) / (weights @ sizes)}

    expected = estimates(ratio, [IMAGES], Resampling(60, 0.95, 0))["accuracy"]
    assert tuple(whole.in_distribution["accuracy"]) == pytest.approx(tuple(expected))


def test_images_of_one_pixel_are_examples() -> None:
    """Gaps, their variance and what is unseen are those of `ece` where every image has one pixel."""
    p = torch.softmax(2 * torch.randn(80, 4, generator=torch.Generator().manual_seed(0)).double(), 1)
    y = torch.randint(4, (80,), generator=torch.Generator().manual_seed(1))
    confidence, label = p.max(1)
    sums = bin_sums(confidence[:, None], (label == y)[:, None], torch.ones(80, 1, dtype=torch.bool), 15)
    for found, expected in zip(image_gaps(sums), ece_gaps(p, y), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_repeated_pixels_do_not_narrow_the_interval_of_the_calibration_error() -> None:
    """The same image of equal pixels, with one or a hundred of them, says the same about calibration."""
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(60, 1, generator=generator, dtype=torch.float64)
    right = torch.rand(60, 1, generator=generator) < 0.7

    def ends(times: int) -> list[float]:
        ones = torch.ones(60, times, dtype=torch.bool)
        sums = bin_sums(confidence.expand(-1, times), right.expand(-1, times), ones, 15)
        found = absolute(lambda weights=None: image_gaps(sums, weights), 60, generator=torch.Generator().manual_seed(1))
        return list(map(float, found))

    assert ends(100) == pytest.approx(ends(1), rel=1e-6)


def test_calibration_of_pixels_is_covered() -> None:
    """Calibrated pixels with a common error per image: intervals start at 0 in 95 % of the test sets or more."""
    hits = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        confidence = torch.rand(40, 30, generator=generator, dtype=torch.float64) / 2 + 0.5
        shared = torch.rand(40, 1, generator=generator, dtype=torch.float64)
        alone = torch.rand(40, 30, generator=generator, dtype=torch.float64)
        both = torch.rand(40, 30, generator=generator) < 0.5  # half of the pixels of an image err together
        right = torch.where(both, shared, alone) < confidence
        sums = bin_sums(confidence, right, torch.ones_like(right), 10)
        found = absolute(
            lambda weights=None, sums=sums: image_gaps(sums, weights), 40, generator=generator, n_resamples=200
        )
        hits += float(found.low) == 0
    assert hits >= 35  # 38 are expected at 95 %; fewer than 35 have a probability of 0.05


def test_scores_of_images_are_means_over_their_pixels(whole: Evaluation) -> None:
    near, far = (ob.predict(MODEL, NETWORKS, x).double().mean(0) for x in (X, FAR))
    msp = [-(p.max(1).values).flatten(1).mean(1) for p in (near, far)]
    expected = roc_auc_score([0] * IMAGES + [1] * 7, torch.cat(msp))
    assert whole.detection["msp"]["auroc"].value == pytest.approx(expected)
    each = ob.predict(MODEL, NETWORKS, FAR).double().movedim(2, -1)
    information = ob.metrics.mutual_information(each.reshape(4, -1, CLASSES)).mean()
    assert whole.ood["mutual_information"].value == pytest.approx(float(information), abs=1e-6)


def test_a_mask_tells_pixels_apart() -> None:
    x = X.clone()
    mask = torch.zeros(IMAGES, SIDE, SIDE, dtype=torch.bool)
    mask[:, 1:4, 1:5] = True
    x += 4 * mask[:, None] * torch.randn(x.shape, generator=torch.Generator().manual_seed(8))
    found = evaluate(MODEL, NETWORKS, (X, Y), ood=x, ood_mask=mask, ignore_index=VOID, **QUICK)
    logits = ob.predict(MODEL, NETWORKS, x, quantity="logits").double().mean(0)
    energy = -logits.logsumexp(1).flatten()
    assert found.detection["energy"]["auroc"].value == pytest.approx(roc_auc_score(mask.flatten(), energy), abs=2e-3)
    low, high = found.detection["energy"]["auroc"][1:]
    assert low < found.detection["energy"]["auroc"].value < high
    with pytest.raises(InputError, match="pixels of both kinds"):
        evaluate(MODEL, NETWORKS, (X, Y), ood=x, ood_mask=mask | True, ignore_index=VOID, **QUICK)


def test_comparison_with_a_reference_pixel_by_pixel(whole: Evaluation) -> None:
    a, b = (ob.predict(MODEL, each, X).double().mean(0) for each in (NETWORKS, NETWORKS[:2]))
    kept = Y != VOID
    expected = {
        "agreement": (a.argmax(1) == b.argmax(1))[kept].double().mean(),
        "total_variation": ((a - b).abs().sum(1) / 2)[kept].mean(),
    }
    assert {name: one.value for name, one in whole.reference.items()} == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=1e-6
    )
    again = evaluate(MODEL, NETWORKS, (X, Y), reference=b, ignore_index=VOID, **QUICK)
    assert again.reference["agreement"].value == pytest.approx(whole.reference["agreement"].value)


def test_a_reference_is_not_linearised() -> None:
    y = Y.where(Y != VOID, 0)
    posterior = ob.approximate(MODEL, (X, y), ob.Laplace(epochs=1, structure="diagonal"), compile=False)
    own = ob.predict(MODEL, posterior, X, linearised=True, draws=5, average=True)
    for reference in (NETWORKS, posterior):
        found = evaluate(MODEL, posterior, (X, y), reference=reference, linearised=True, draws=5, **QUICK)
        other = ob.predict(MODEL, reference, X, draws=5, seed=1, average=True)
        gap = float((own - other).abs().sum(1).mean() / 2)
        assert found.reference["total_variation"].value == pytest.approx(gap, rel=1e-5)


def test_the_temperature_is_that_of_half_of_the_images(whole: Evaluation) -> None:
    order = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0))
    logs = ob.predict(MODEL, NETWORKS, X).double().mean(0).log().movedim(1, -1)
    first, second = order[:6], order[6:]
    kept = [Y[half] != VOID for half in (first, second)]
    temperature = best_temperature(logs[first][kept[0]], Y[first][kept[0]])
    assert whole.temperature == pytest.approx(temperature, rel=1e-4)
    nll = torch.nn.functional.cross_entropy(logs[second][kept[1]] / temperature, Y[second][kept[1]])
    assert whole.tempered["nll"].value == pytest.approx(float(nll), rel=1e-4)


def test_blocks_of_any_size_give_the_same(whole: Evaluation, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(pixels, "_BLOCK_VALUES", 5 * CLASSES * SIDE * SIDE)
    cut = evaluate(
        MODEL, NETWORKS, (X, Y), ood=FAR, reference=NETWORKS[:2], ignore_index=VOID, **QUICK,
        progress=lambda done, total, text: seen.append((done, total)),
    )  # fmt: skip
    for name, one in whole.in_distribution.items():
        assert tuple(cut.in_distribution[name]) == pytest.approx(tuple(one)), name
    assert cut.temperature == pytest.approx(whole.temperature)
    assert cut.detection["msp"]["auroc"].value == whole.detection["msp"]["auroc"].value
    assert all(0 < done <= total for done, total in seen)
    assert [total for _, total in seen][:1] == [3 * 2 * 4]  # blocks x passes x networks


def test_draws_of_a_posterior_are_the_same_in_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior = ob.fit(NETWORKS)
    depth = torch.rand(IMAGES, CLASSES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    found = []
    for size in (1 << 20, 3 * CLASSES * SIDE * SIDE):
        monkeypatch.setattr(pixels, "_BLOCK_VALUES", size)
        classes = evaluate(MODEL, posterior, (X, Y), ignore_index=VOID, draws=5, **QUICK)
        values = evaluate(MODEL, posterior, (X, depth), noise=1.0, draws=5, **QUICK)
        found.append([one.value for each in (classes, values) for one in each.in_distribution.values()])
    assert found[0] == pytest.approx(found[1])


def test_class_numbers_of_ignored_pixels_do_not_matter(whole: Evaluation) -> None:
    other = torch.where(Y == VOID, -1, Y)
    found = evaluate(MODEL, NETWORKS, (X, other), ignore_index=-1, **QUICK)
    assert dict(found.in_distribution) == dict(whole.in_distribution)


def test_sequences_and_volumes_are_pixels_too() -> None:
    model = nn.Conv1d(2, 3, 1)
    networks = members(model, 2)
    x, y = torch.randn(5, 2, 7), torch.randint(3, (5, 7))
    p = ob.predict(model, networks, x).double().mean(0)
    found = evaluate(model, networks, (x, y), **QUICK)
    assert found.in_distribution["accuracy"].value == pytest.approx(float((p.argmax(1) == y).double().mean()))


def test_one_logit_per_pixel_is_two_classes() -> None:
    model = convolution(1)
    networks = members(model)
    y = (Y == 1).float()
    y[0, 0] = torch.nan
    found = evaluate(model, networks, (X, y), likelihood="bernoulli", **QUICK)
    p = ob.predict(model, networks, X, quantity="values").double().sigmoid().mean(0)[:, 0]
    kept = ~y.isnan()
    assert found.pixels == int(kept.sum())
    expected = torch.nn.functional.binary_cross_entropy(p[kept], y[kept].double())
    assert found.in_distribution["nll"].value == pytest.approx(float(expected), rel=1e-6)


def test_the_report_shows_pixels(whole: Evaluation, tmp_path: Any) -> None:
    text = str(whole)
    assert f"{IMAGES} images, {whole.pixels} pixels" in text and "mean iou" in text and "class 2" in text
    record = whole.to_dict()
    assert record["pixels"] == whole.pixels and set(record["iou"]) == {"class_0", "class_1", "class_2"}
    assert "mean iou" in set(whole.to_dataframe()["metric"])
    whole.save(tmp_path / "x.json")
    assert whole.plot() is not None
    record_text = str(whole.record())
    assert "over images" in record_text and "Wilson" not in record_text


def test_memory_does_not_grow_with_networks_or_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of a pass holds a block of images, whatever there are of images and networks."""
    monkeypatch.setattr(pixels, "_BLOCK_VALUES", 1 << 14)
    monkeypatch.setattr(pixels, "_SAMPLE_VALUES", 1 << 14)
    largest: list[int] = []
    inner = torch.Tensor.double

    def double(self: Tensor) -> Tensor:
        largest.append(self.numel())
        return inner(self)

    monkeypatch.setattr(torch.Tensor, "double", double)
    model = nn.Conv2d(1, 4, 1)
    x, y = torch.randn(64, 1, 32, 32), torch.randint(4, (64, 32, 32))
    evaluate(model, members(model, 6), (x, y), n_resamples=5)
    everything = 64 * 4 * 32 * 32
    assert max(largest) <= everything // 16


# ------------------------------------------------------------------ values


def depth_case(outputs: int = 2) -> tuple[nn.Module, Population, Tensor, Tensor]:
    model = convolution(outputs)
    networks = members(model, 3, spread=0.2)
    generator = torch.Generator().manual_seed(5)
    y = 1 + 3 * torch.rand(IMAGES, SIDE, SIDE, generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.2] = torch.nan
    return model, networks, X, y


class Positive(nn.Module):
    """A positive mean and a log deviation per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = convolution(2)

    def forward(self, x: Tensor) -> Tensor:
        mean, log_std = self.inner(x).chunk(2, dim=1)
        return torch.cat([nn.functional.softplus(mean) + 0.5, 0.3 * log_std], 1)


def positive_case() -> tuple[nn.Module, Population, Tensor, Tensor]:
    model = Positive()
    return model, members(model, 3, spread=0.2), X, depth_case()[3]


@pytest.mark.parametrize("channel", [False, True])
def test_numbers_of_pixels_with_learned_noise(channel: bool) -> None:
    model, networks, x, y = positive_case()
    found = evaluate(model, networks, (x, y[:, None] if channel else y), coverage=(0.5, 0.9), **QUICK)
    mean, log_std = ob.predict(model, networks, x, quantity="values").double().chunk(2, dim=2)
    kept = ~y.isnan()
    m, s, t = mean[:, :, 0][:, kept].numpy(), log_std[:, :, 0][:, kept].exp().numpy(), y[kept].double().numpy()
    density = scipy.stats.norm.pdf(t, m, s).mean(0)
    d = np.log(m.mean(0)) - np.log(t)
    ratio = np.maximum(m.mean(0) / t, t / m.mean(0))
    low, high = central_interval(torch.tensor(m), torch.tensor(s), 0.9)
    expected = {
        "rmse": np.sqrt(((m.mean(0) - t) ** 2).mean()),
        "mae": np.abs(m.mean(0) - t).mean(),
        "nll": -np.log(density).mean(),
        "coverage_90": ((t >= low.numpy()) & (t <= high.numpy())).mean(),
        "width_90": float((high - low).mean()),
        "silog": np.sqrt((d**2).mean() - d.mean() ** 2),
        "abs_rel": (np.abs(m.mean(0) - t) / t).mean(),
        "sq_rel": ((m.mean(0) - t) ** 2 / t).mean(),
        "delta_1": (ratio < 1.25).mean(),
        "delta_2": (ratio < 1.25**2).mean(),
        "delta_3": (ratio < 1.25**3).mean(),
    }
    assert set(found.in_distribution) == {*expected, "coverage_50", "width_50"}
    for name, value in expected.items():
        assert found.in_distribution[name].value == pytest.approx(value, rel=1e-6), name
    assert (found.kind, found.pixels) == ("gaussian", int(kept.sum()))
    guess = torch.where(kept, mean.mean(0)[:, 0], torch.nan)
    for metric, name in ((silog, "silog"), (absolute_relative_error, "abs_rel"), (squared_relative_error, "sq_rel")):
        assert float(metric(guess, y)) == pytest.approx(expected[name], rel=1e-6)
    assert float(threshold_accuracy(guess, y, 2)) == pytest.approx(expected["delta_2"])
    assert found.coverage[17] == pytest.approx(expected["coverage_90"])  # the curve at 90 %


def test_a_draw_of_images_is_a_draw_of_whole_images() -> None:
    model, networks, x, y = positive_case()
    guess = ob.predict(model, networks, x, quantity="values").double().mean(0)[:, 0]
    counts = torch.randint(0, 3, (5, IMAGES), generator=torch.Generator().manual_seed(4))
    found = silog(guess, y, weights=counts.double())
    for row, value in zip(counts, found, strict=True):
        rows = torch.repeat_interleave(torch.arange(IMAGES), row)
        assert float(value) == pytest.approx(float(silog(guess[rows], y[rows])))


def test_given_noise_and_predictions_that_are_not_positive() -> None:
    model, networks, x, y = depth_case(1)
    found = evaluate(model, networks, (x, y), noise=0.7, **QUICK)
    kept = ~y.isnan()
    m = ob.predict(model, networks, x, quantity="values").double()[:, :, 0][:, kept].numpy()
    density = scipy.stats.norm.pdf(y[kept].double().numpy(), m, 0.7).mean(0)
    assert found.in_distribution["nll"].value == pytest.approx(-np.log(density).mean(), rel=1e-6)
    assert "silog" not in found.in_distribution and "abs_rel" in found.in_distribution
    assert any("no silog" in remark for remark in found.remarks)
    assert "silog" not in evaluate(model, networks, (x, y - 10), noise=0.7, **QUICK).in_distribution


@pytest.mark.parametrize(
    ("word", "columns"), [("laplace", 2), ("student_t", 3), ("mixture", 6), ("evidential_values", 4)]
)
@pytest.mark.parametrize("pixel", [False, True])
def test_distribution_heads_are_mixed_over_networks(word: str, columns: int, pixel: bool) -> None:
    """NLL, coverage and width against quadrature of the mixture's density on a grid."""
    head: Any = ob.LIKELIHOODS[word]
    if pixel:
        model: nn.Module = convolution(columns)
        x, y = X[:2, :, :3, :3], torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0))
        y[0, 0, 0] = torch.nan
    else:
        torch.manual_seed(0)
        model, x, y = nn.Linear(3, columns), torch.randn(6, 3), torch.randn(6)
    networks = members(model, 3, spread=0.3)
    found = evaluate(model, networks, (x, y), likelihood=word, coverage=(0.5, 0.8), **QUICK)
    outputs = ob.predict(model, networks, x, quantity="values").double()
    goals = y[:, None]
    kept = ~goals.isnan()
    # Density of the mixture on a fine grid, value by value; heavy tails need a wide one.
    grid = torch.sinh(torch.linspace(-12, 12, 8001, dtype=torch.float64))
    density = torch.zeros(len(grid), *goals.shape, dtype=torch.float64)
    at_goal = torch.zeros(goals.shape, dtype=torch.float64)
    for out in outputs:
        parameters = head.parameters(out)
        points = grid.reshape(-1, *[1] * goals.dim()).expand(-1, *goals.shape)
        density += head.log_prob(parameters, points).exp() / 3
        at_goal += head.log_prob(parameters, goals.double()).exp() / 3
    steps = torch.cumulative_trapezoid(density, grid, dim=0)
    below = torch.cat([torch.zeros_like(steps[:1]), steps])
    torch.testing.assert_close(below[-1][kept], torch.ones_like(below[-1][kept]), rtol=0, atol=2e-3)
    assert found.in_distribution["nll"].value == pytest.approx(float(-at_goal[kept].log().mean()), rel=1e-6)
    widths, inside = [], []
    for place in kept.nonzero():
        own = below[(slice(None), *place)].numpy()
        low, high = np.interp([0.1, 0.9], own, grid.numpy())
        widths.append(high - low)
        inside.append(low <= float(goals[tuple(place)]) <= high)
    assert found.in_distribution["width_80"].value == pytest.approx(np.mean(widths), rel=5e-3)
    assert found.in_distribution["coverage_80"].value == pytest.approx(np.mean(inside), abs=1e-9)
    assert found.kind == word and found.pixels == (int(kept.sum()) if pixel else 0)


def test_a_mixture_of_one_component_is_a_gaussian() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.randn(30, 2)
    model = nn.Linear(3, 4)
    networks = members(model, 3)
    stacked = {name: torch.cat([torch.zeros(3, 2, *v.shape[2:]), v], 1) for name, v in networks.stacked().items()}
    one = evaluate(nn.Linear(3, 6), Population.from_stacked(stacked), (x, y), likelihood=MixtureHead(), **QUICK)
    same = evaluate(model, networks, (x, y), likelihood=GaussianHead(), **QUICK)
    plain = evaluate(model, networks, (x, y), noise="learned", **QUICK)
    for name in plain.in_distribution:
        assert one.in_distribution[name].value == pytest.approx(same.in_distribution[name].value), name
        assert plain.in_distribution[name].value == pytest.approx(same.in_distribution[name].value), name


def test_evidence_and_smoothing_predict_with_their_own_probabilities() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 4), torch.randn(50, 3), torch.randint(4, (50,))
    networks = members(model, 3)
    alpha = 1 + torch.nn.functional.softplus(ob.predict(model, networks, x, quantity="logits").double())
    p = (alpha / alpha.sum(2, keepdim=True)).mean(0)
    found = evaluate(model, networks, (x, y), likelihood="evidential_classes", **QUICK)
    assert found.in_distribution["nll"].value == pytest.approx(float(ob.metrics.nll(p, y)), rel=1e-6)
    plain = evaluate(model, networks, (x, y), **QUICK)
    assert dict(evaluate(model, networks, (x, y), likelihood="focal", **QUICK).in_distribution) == dict(
        plain.in_distribution
    )


class Dict(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(x), "features": x}


def test_dict_outputs() -> None:
    def same(inner: nn.Module, data: Any, **options: Any) -> None:
        networks = members(inner, 2)
        boxed = Population.from_stacked({f"inner.{name}": v for name, v in networks.stacked().items()})
        found = evaluate(Dict(inner), boxed, data, output="logits", **options, **QUICK)
        plain = evaluate(inner, networks, data, **options, **QUICK)
        assert found.to_json() == plain.to_json()

    same(convolution(), (X, Y), ignore_index=VOID)
    same(convolution(2), (X, torch.rand(IMAGES, SIDE, SIDE)))
    same(nn.Linear(3, 3), (X[:, 0, 0, :3], X[:, 0, 1, 0]), likelihood="student_t")
    same(nn.Linear(3, 3), (X[:, 0, 0, :3], Y[:, 0, 0] % 3), likelihood="label_smoothing")
    drawn = ob.sample(
        Dict(convolution()), (X, Y), ob.Ensemble(epochs=1), output="logits", ignore_index=VOID, likelihood="focal"
    )
    assert len(drawn) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "class numbers from 0 to 2, found 0 to 255"),
        ({"ignore_index": 1}, "class numbers from 0 to 2"),
        ({"data": (X, Y.float())}, "likelihood"),
        ({"data": (X, torch.full_like(Y, VOID)), "ignore_index": VOID}, "found none"),
        ({"data": (X, Y[:, :3]), "ignore_index": VOID}, "expected outputs"),
        ({"ignore_index": VOID, "reference": torch.ones(2, 3)}, "same examples"),
        ({"data": (X, torch.rand(IMAGES, SIDE, SIDE)), "likelihood": "laplace"}, "for the likelihood 'laplace'"),
        ({"data": (X, torch.rand(IMAGES, SIDE, SIDE)), "noise": 1.0}, "for the likelihood 'gaussian'"),
        ({"data": (X, torch.rand(IMAGES, SIDE, SIDE)), "noise": 1.0, "ignore_index": 3}, "mark values"),
        ({"data": (X, torch.full((IMAGES, SIDE, SIDE), torch.nan)), "noise": 1.0}, "nothing but NaN"),
        ({"data": (X, torch.rand(IMAGES, SIDE, SIDE)), "likelihood": "laplace", "ood": FAR}, "found a laplace"),
    ],
)
def test_mistakes_get_a_sentence(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        evaluate(MODEL, **{"networks": NETWORKS, "data": (X, Y), **QUICK, **changes})


def test_a_class_that_is_nowhere_has_no_overlap() -> None:
    y = torch.zeros(IMAGES, SIDE, SIDE, dtype=torch.int64)
    stacked = {name: value.clone() for name, value in NETWORKS.stacked().items()}
    stacked["bias"][:, 2] = -100
    found = evaluate(MODEL, Population.from_stacked(stacked), (X, y), **QUICK)
    assert "class_2" not in found.iou and "class 2" in "".join(found.remarks)
    assert found.in_distribution["mean_iou"].value == pytest.approx(np.mean([one.value for one in found.iou.values()]))
    single = evaluate(MODEL, NETWORKS, (X[:1], Y[:1]), ignore_index=VOID, **QUICK)
    assert any("one only" in remark for remark in single.remarks) and single.temperature is None


def test_iou_without_evaluation() -> None:
    predicted = torch.tensor([[0, 1, 1], [2, 2, 0]])
    targets = torch.tensor([[0, 1, 2], [2, 0, 0]])
    expected = jaccard_score(targets.flatten(), predicted.flatten(), average=None)
    assert iou(predicted, targets).tolist() == pytest.approx(expected.tolist())
    assert float(mean_iou(predicted, targets)) == pytest.approx(expected.mean())
    assert math.isnan(iou_of(torch.zeros(2, 3, 4))[0])
    assert without(targets, 2).min() == -100


def test_a_unet_is_discovered_trained_aligned_and_judged() -> None:
    """Its four widths permute and scale; alignment changes no number; training finds shapes that chance does not."""
    x, classes, level = shapes(48)
    data = shapes(20, seed=1)
    unet = UNet(3)
    symmetry = ob.discover(unet, x[:2])
    assert sorted(space.size for space in symmetry.spaces) == [8, 8, 8, 16]
    training = ob.Ensemble(epochs=20, batch=16, lr=0.02)
    networks = ob.sample(unet, (x, classes), training, chains=2, prior=None, ignore_index=VOID)
    before = evaluate(unet, networks, data[:2], ignore_index=VOID, **QUICK)
    after = evaluate(unet, ob.align(networks, symmetry).population, data[:2], ignore_index=VOID, **QUICK)
    for name, one in before.in_distribution.items():
        assert after.in_distribution[name].value == pytest.approx(one.value, abs=1e-4), name
    assert before.in_distribution["mean_iou"].low > 0.45  # all background: 0.24
    assert before.pixels == 20 * 15 * 16
    heads = ob.sample(UNet(2), (x, level), training, chains=2, prior=None, likelihood="laplace")
    found = evaluate(UNet(2), heads, (data[0], data[2]), likelihood="laplace", **QUICK)
    spread = float(data[2][~data[2].isnan()].std())
    assert found.in_distribution["rmse"].high < spread / 2
    assert found.in_distribution["delta_1"].low > 0.7
