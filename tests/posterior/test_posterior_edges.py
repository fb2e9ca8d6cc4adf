"""Posteriors, pruning and evaluation at their edges: old files, equal spreads, numbers that do not fit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onebasin import Population, discover, fit, load_posterior
from onebasin.errors import InputError, SpecError
from onebasin.evaluation.evaluate import Estimate, Evaluation, evaluate
from onebasin.posterior.divergence import gaussian_kl
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank
from onebasin.posterior.pruning import pruning_curve
from onebasin.posterior.units import remove_units
from onebasin.storage.tensor_file import read_header, write_tensors


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def population(members: int = 12, width: int = 30) -> Population:
    return Population.from_stacked({"w": torch.randn(members, width, generator=stream())})


def test_files_of_version_1_have_every_tensor_and_are_read(tmp_path: Path) -> None:
    found = fit(
        population(), "mixture", components=[0, 1] * 6, pooled=True, covariance="low-rank", rank=3, diagonal=False
    )
    facts = dict(read_header(found.save(tmp_path / "new.safetensors")).metadata) | {"version": "1"}
    del facts["same"], facts["zeros"]
    tensors = {"weights": found.weights}
    for index, own in enumerate(found.components):
        tensors[f"{index}.centre"] = own.centre
        tensors |= {f"{index}.shape.{name}": value for name, value in own.covariance.tensors().items()}
    write_tensors(tmp_path / "old.safetensors", tensors, facts)
    old, new = (load_posterior(tmp_path / f"{name}.safetensors") for name in ("old", "new"))
    for before, after, own in zip(old.components, new.components, found.components, strict=True):
        for one in (before, after):
            assert torch.equal(one.centre, own.centre)
            assert all(
                torch.equal(value, own.covariance.tensors()[name]) for name, value in one.covariance.tensors().items()
            )
    assert old.storage == new.storage == found.storage == 5.0  # two centres, one factor of three, and no zeros


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    found = fit(population(width=4000), "mixture", components=[0, 1, 2] * 4, pooled=True)
    size = found.save(tmp_path / "q.safetensors").stat().st_size
    assert found.nbytes == 4 * 4 * 4000 + 3 * 8
    assert 0 < size - found.nbytes < 4000  # the header
    assert found.pooled and load_posterior(tmp_path / "q.safetensors").pooled
    assert not fit(population()).pooled
    assert not fit(population(), "mixture", components=[0, 1, 2] * 4).pooled


@pytest.mark.parametrize("seed", range(20))
def test_kl_of_widths_that_differ_by_many_orders(seed: int) -> None:
    mp = pytest.importorskip("mpmath")
    generator = stream(seed)

    def covariance(shape: LowRank) -> Any:
        factor = mp.matrix(shape.factor.tolist())
        return factor * factor.T + mp.diag([mp.mpf(scale) ** 2 for scale in shape.scale.tolist()])

    def shape() -> LowRank:
        uniform, normal = torch.rand(2, 6, generator=generator, dtype=torch.float64), torch.randn
        return LowRank(10 ** (-8 * uniform[0]), 10 ** (-8 * uniform[1, :, None])
                       * normal(6, 3, generator=generator, dtype=torch.float64))  # fmt: skip

    p, q = (Gaussian(torch.randn(6, generator=generator, dtype=torch.float64), shape()) for _ in range(2))
    with mp.workdps(60):
        own, other = covariance(p.covariance), covariance(q.covariance)  # type: ignore[arg-type]
        gap, inverse = mp.matrix((p.centre - q.centre).tolist()), other**-1
        trace = sum((inverse * own)[i, i] for i in range(6)) + (gap.T * inverse * gap)[0]
        exact = float((trace - 6 + mp.log(mp.det(other)) - mp.log(mp.det(own))) / 2)
    assert gaussian_kl(p, q) == pytest.approx(exact, rel=1e-9)
    assert gaussian_kl(q, Gaussian(q.centre, q.covariance)) == pytest.approx(0.0, abs=1e-6)


def test_kl_of_diagonal_gaussians_stays_what_it_was() -> None:
    p, q = (Gaussian(torch.randn(5, generator=stream(i)), Diagonal(torch.rand(5, generator=stream(9 + i)) + 0.1))
            for i in range(2))  # fmt: skip
    own, other = (torch.distributions.Normal(g.centre.double(), g.covariance.std().double()) for g in (p, q))
    exact = float(torch.distributions.kl_divergence(own, other).sum())
    assert gaussian_kl(p, q) == pytest.approx(exact, rel=1e-12)


def test_components_with_fewer_directions_say_so() -> None:
    found = fit(population(8), "mixture", components=[0, 0, 0, 1, 1, 1, 1, 1], covariance="low-rank", rank=3)
    assert (found.provenance["fit"]["rank"], found.provenance["fit"]["rank_asked"]) == ([2, 3], 3)
    assert "rank_asked" not in fit(population(8), "low-rank", rank=3).provenance["fit"]


def test_weights_too_large_to_square_are_not_called_infinite() -> None:
    weights = torch.randn(4, 3, generator=stream(), dtype=torch.float64)
    weights[1, 1] = 1e200
    with pytest.raises(SpecError, match="of size 1e\\+200"):
        fit(Population.from_stacked({"w": weights}))


MODEL = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
POPULATION = Population.from_models([MODEL, MODEL, MODEL])
INPUTS = torch.randn(20, 3, generator=stream())
RIGHT = MODEL(INPUTS).argmax(1)


@pytest.mark.parametrize("units", [[2, 1], (1, 2), torch.tensor([1, 2])])
def test_units_to_keep_may_be_a_list(units: object) -> None:
    symmetry = discover(MODEL, INPUTS)
    [name] = [space.name for space in symmetry.spaces if space.permutable]
    kept = remove_units(MODEL, symmetry, keep={name: units}).kept  # type: ignore[dict-item]
    assert kept[name].tolist() == [1, 2]
    for wrong in ([0.5], "ab", [], 2):
        with pytest.raises(InputError, match="share"):
            remove_units(MODEL, symmetry, keep={name: wrong})  # type: ignore[dict-item]


@pytest.mark.parametrize("option", [{"levels": 0.5}, {"by": "snr"}])
def test_pruning_curves_take_lists(option: dict[str, object]) -> None:
    with pytest.raises(InputError, match="as a list"):
        pruning_curve(MODEL, fit(POPULATION), (INPUTS, RIGHT), **option)  # type: ignore[arg-type]


def test_without_a_mistake_there_is_no_temperature() -> None:
    found = evaluate(MODEL, POPULATION, (INPUTS, RIGHT), n_resamples=20)
    assert (found.temperature, dict(found.tempered)) == (None, {})
    [said] = found.remarks
    assert "all of the 10 there are right" in said and said in str(found)
    assert json.loads(found.to_json())["remarks"] == [said]
    wrong = RIGHT.clone()
    wrong[::4] = 1 - wrong[::4]
    assert evaluate(MODEL, POPULATION, (INPUTS, wrong), n_resamples=20).remarks == ()


def test_infinite_numbers_are_null_in_records_and_seen_in_tables() -> None:
    found = Evaluation("gaussian", 1, 1, 0, {"nll": Estimate(math.inf, 1.0, math.nan)})
    assert json.loads(found.to_json())["inside"]["nll"] == {"value": None, "low": 1.0, "high": None}
    assert "inf [1.0000, nan]" in str(found)


@pytest.mark.parametrize(
    ("option", "text"), [({"noise": 1.0}, "noise=1.0 is for values"), ({"draws": 5}, "posteriors only")]
)
def test_options_that_nothing_reads_are_refused(option: dict[str, float], text: str) -> None:
    with pytest.raises(InputError, match=text):
        evaluate(MODEL, POPULATION, (INPUTS, RIGHT), n_resamples=20, **option)  # type: ignore[arg-type]
    evaluate(MODEL, POPULATION, (INPUTS, RIGHT), reference=fit(POPULATION), n_resamples=20, draws=3)
