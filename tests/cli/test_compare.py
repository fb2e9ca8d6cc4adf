"""Two populations on the command line."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.data import Examples
from onebasin.cli.networks import Known
from onebasin.cli.work.compare import compare_populations, several
from onebasin.errors import InputError, StorageError
from onebasin.functional.call import global_seed
from onebasin.population.population import Population
from tests.judging import numbers


def model(seed: int, classes: int = 3) -> nn.Module:
    with global_seed(seed):
        return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, classes)).double()


@pytest.fixture(scope="module")
def known() -> Known:
    example = torch.zeros(1, 2).double()
    return Known(ob.discover(model(0), example), model(0), example)


def population(first: int, members: int, classes: int = 3) -> Population:
    return Population.from_models([model(first + number, classes) for number in range(members)])


def test_distances_mmd_and_predictives(known: Known) -> None:
    a, b, inputs = population(0, 5), population(50, 6), numbers(40, 2)
    found = compare_populations(known, a, b, Examples(inputs, None), permutations=19, n_resamples=10)
    p, q = (
        torch.stack([model(first + number)(inputs).softmax(-1) for number in range(members)]).mean(0).detach()
        for first, members in ((0, 5), (50, 6))
    )
    assert found.agreement == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert found.total_variation == pytest.approx(float((p - q).abs().sum(1).mean() / 2))
    told = json.loads(json.dumps(found.told()))
    assert set(told["discrepancy"]["forms"]) == {"balanced/max"} and told["examples"] == 40
    assert told["discrepancy"]["function"] is not None
    page = str(found)
    assert all(word in page for word in ("within A", "MMD^2", "balanced/max", "agreement", "40 examples"))


def test_what_has_no_classes_has_no_agreement() -> None:
    example = torch.zeros(1, 2).double()
    known = Known(ob.discover(model(0, 1), example), model(0, 1), example)
    data = Examples(numbers(7, 2), None)
    found = compare_populations(known, population(0, 3, 1), population(50, 3, 1), data, permutations=19, n_resamples=10)
    assert found.agreement is None and found.report.function is not None
    assert found.report.function.squared != 0 and "agreement" not in str(found)


def test_without_data_or_without_a_model(known: Known) -> None:
    found = compare_populations(
        known, population(0, 3), population(50, 3), permutations=19, n_resamples=10, normal_forms="balanced/norm"
    )
    assert found.report.function is None and set(found.report.normal_forms) == {"balanced/norm"}
    with pytest.raises(InputError, match="--model"):
        compare_populations(
            Known(known.symmetry, None, None), population(0, 3), population(50, 3), Examples(numbers(2, 2), None)
        )


def test_which_paths_hold_several(known: Known, tmp_path: Path) -> None:
    population(0, 3).save(tmp_path / "three")
    population(0, 1).save(tmp_path / "one")
    assert len(several(str(tmp_path / "three"), known) or ()) == 3
    assert several(str(tmp_path / "one"), known) is None
    assert several(str(tmp_path / "three#1"), known) is None


def test_values_of_a_regression_are_no_classes(known: Known) -> None:
    given = (population(0, 3), population(50, 3), Examples(numbers(7, 2), None))
    classes, values = (
        compare_populations(known, *given, permutations=19, n_resamples=0, **output)
        for output in ({}, {"quantity": "values"})
    )
    assert classes.agreement is not None and values.agreement is None and values.total_variation is None
    assert classes.report.function is not None and values.report.function is not None
    assert classes.report.function.squared != values.report.function.squared


def test_paths_that_do_not_exist(known: Known, tmp_path: Path) -> None:
    population(0, 3).save(tmp_path / "three")
    for text in ("two", "two#1", "three#x"):
        with pytest.raises(StorageError, match=text):
            several(str(tmp_path / text), known)
