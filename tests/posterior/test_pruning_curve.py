"""Curves: every point is the whole network pruned once, and nothing is left pruned behind."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import CRITERIA, LEVELS, prune, pruning_curve
from onebasin.state import State, spec_of, state_of


def setting(outputs: int = 3) -> tuple[nn.Module, Posterior, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, outputs))
        mean = {name: value.clone() for name, value in state_of(model).items()}
        layout = FlatLayout(tuple(mean), spec_of(mean), {})
        gaussian = Gaussian(layout.flat(mean), Diagonal(torch.rand(layout.size, dtype=torch.float64)))
        x = torch.randn(200, 5)
        y = model(x).argmax(1) if outputs > 1 else model(x).detach()
    return model, Posterior.equal([gaussian], layout, [mean]), (x, y)


def judged(model: nn.Module, state: State, data: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Accuracy and loss by torch alone."""
    logits = torch.func.functional_call(model, state, data[0]).detach()
    return float((logits.argmax(1) == data[1]).double().mean()), float(F.cross_entropy(logits.double(), data[1]))


@pytest.mark.parametrize("per", ["global", "tensor"])
def test_every_point_is_what_pruning_once_gives(per: str) -> None:
    model, posterior, data = setting()
    found = pruning_curve(model, posterior, data, per=per, repeats=2, seed=4)
    assert tuple(found.points) == CRITERIA
    assert found.levels == LEVELS
    assert found.examples == 200
    for by in CRITERIA:
        for level, point in zip(LEVELS, found.points[by], strict=True):
            masks = [prune(posterior, level, by, per=per, seed=seed) for seed in ((4, 5) if by == "random" else (4,))]
            each = [judged(model, one.apply(posterior.mean), data) for one in masks]
            assert point.kept == masks[0].kept
            assert point.accuracy == pytest.approx(sum(a for a, _ in each) / len(each))
            assert point.loss == pytest.approx(sum(b for _, b in each) / len(each), rel=1e-5)
            expected = abs(each[0][0] - each[-1][0]) / 2**0.5
            assert point.spread == pytest.approx(expected, abs=1e-12)


def test_at_one_all_criteria_agree_and_the_network_is_whole() -> None:
    model, posterior, data = setting()
    found = pruning_curve(model, posterior, data, levels=(1.0,))
    assert {found.accuracy(by) for by in CRITERIA} == {(1.0,)}


def test_nothing_that_was_given_is_changed() -> None:
    model, posterior, data = setting()
    other = {name: value + 1 for name, value in posterior.mean.items()}
    kept = [model.state_dict(), other, posterior.mean, posterior.std, {"x": data[0], "y": data[1]}]
    before = [{name: value.clone() for name, value in tensors.items()} for tensors in kept]
    model.train()
    first = pruning_curve(model, posterior, data, state=other)
    again = pruning_curve(model, posterior, data, state=other)
    assert first == again  # the second call does not start from a network that the first one left pruned
    assert model.training
    now = [model.state_dict(), other, posterior.mean, posterior.std, {"x": data[0], "y": data[1]}]
    for tensors, old in zip(now, before, strict=True):
        assert all(torch.equal(tensors[name], value) for name, value in old.items())


def test_another_network_is_pruned_by_the_masks_of_the_posterior() -> None:
    model, posterior, data = setting()
    other = {name: value.flip(0) for name, value in posterior.mean.items()}
    found = pruning_curve(model, posterior, data, state=other, by=["snr"], levels=[0.5])
    expected = judged(model, prune(posterior, 0.5, "snr").apply(other), data)
    assert found.accuracy("snr") == (pytest.approx(expected[0]),)
    assert found.loss("snr")[0] == pytest.approx(expected[1], rel=1e-5)


def test_a_network_alone_and_values_instead_of_classes() -> None:
    model, posterior, data = setting(outputs=1)
    found = pruning_curve(
        model, posterior.mean, data, by=["magnitude", "random"], loss="mse", names=["*.weight"], levels=[1, 0.5]
    )
    assert found.accuracy("magnitude") == (None, None)
    assert found.loss("magnitude")[0] == pytest.approx(0, abs=1e-12)
    assert found.loss("magnitude")[1] > 0
    assert [point.kept for point in found.points["magnitude"]] == [72, 36]
    assert str(found).splitlines()[0].split() == ["kept", "%", "magnitude", "random"]


def test_the_table_and_the_record_say_the_same() -> None:
    model, posterior, data = setting()
    found = pruning_curve(model, posterior, data, by=["snr", "sigma"], levels=[0.5, 0.01])
    rows = [line.split() for line in str(found).splitlines()]
    assert [row[0] for row in rows[2:]] == ["50", "1"]
    content = json.loads(found.to_json())
    assert content == json.loads(json.dumps(found.to_dict()))
    for column, by in enumerate(("snr", "sigma"), start=1):
        stored = [point["accuracy"] for point in content["criteria"][by]]
        assert stored == list(found.accuracy(by))
        assert [row[column] for row in rows[2:]] == [f"{100 * value:.2f}" for value in stored]


def test_requests_that_make_no_sense_are_refused() -> None:
    model, posterior, data = setting()
    for wrong in ({"by": []}, {"levels": []}, {"repeats": 0}):
        with pytest.raises(InputError, match="at least one"):
            pruning_curve(model, posterior, data, **wrong)
    with pytest.raises(InputError, match="standard deviations"):
        pruning_curve(model, posterior.mean, data)
