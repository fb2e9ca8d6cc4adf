"""R-hat and effective sample size of every weight against arviz-stats, and the tables made of them."""

import arviz_stats.base as arviz
import numpy as np
import pandas as pd
import pytest
import torch

import onebasin as ob
from onebasin.errors import InputError
from tests.judging import numbers

ORDER = torch.arange(80).reshape(4, 20).T.flatten()  # chains interleaved


@pytest.fixture(scope="module")
def draws() -> dict[str, torch.Tensor]:
    weight, bias = numbers(4, 20, 3, 2), numbers(4, 20, 2).cumsum(1)  # the bias is a random walk
    bias[..., 1] = 0.5  # and one weight never varies
    return {"weight": weight, "bias": bias, "steps": torch.zeros(4, 20, dtype=torch.int64)}


@pytest.fixture(scope="module")
def found(draws: dict[str, torch.Tensor]) -> ob.WeightDiagnostics:
    flat = {name: value.flatten(0, 1)[ORDER] for name, value in draws.items()}
    population = ob.Population.from_stacked(flat, chain=torch.arange(4).repeat_interleave(20)[ORDER])
    return ob.weight_diagnostics(population)


def test_every_weight_has_the_numbers_of_arviz(draws: dict[str, torch.Tensor], found: ob.WeightDiagnostics) -> None:
    stats = arviz.array_stats
    table = pd.DataFrame(found.table())
    assert found.names == ("weight", "bias") and (found.chains, found.draws, found.weights) == (4, 20, 8)
    assert list(table.columns) == ["name", "index", "rhat", "ess_bulk", "ess_tail"] and len(table) == 8
    for _, row in table.iterrows():
        chains = draws[row["name"]].numpy()[(slice(None), slice(None), *row["index"])]
        if np.ptp(chains) == 0:
            assert np.isnan(row["rhat"]) and row["ess_bulk"] == 80
            continue
        assert row["rhat"] == pytest.approx(float(stats.rhat(chains)), rel=1e-9)
        assert row["ess_bulk"] == pytest.approx(float(stats.ess(chains, method="bulk")), rel=1e-9)
        assert row["ess_tail"] == pytest.approx(float(stats.ess(chains, method="tail", prob=0.05)), rel=1e-9)


def test_a_row_per_tensor_and_what_is_printed(found: ob.WeightDiagnostics) -> None:
    table = pd.DataFrame(found.by_tensor()).set_index("name")
    weight = np.sort(found.rhat["weight"].flatten().numpy())
    assert table.loc["weight", "rhat_max"] == weight[-1] and table.loc["weight", "rhat_median"] in weight[2:4]
    assert table.loc["weight", "ess_bulk_min"] == float(found.ess_bulk["weight"].min())
    assert table.loc["weight", "share_mixed"] == pytest.approx((weight < 1.05).mean())
    assert table.loc["bias", "weights"] == 1 and table.loc["bias", "rhat_max"] == float(found.rhat["bias"][0]) > 1.05
    text = str(found)
    assert text.startswith("4 chains of 20 draws") and "worst weights:\nbias[0]" in text


def test_wrong_names_and_short_chains(found: ob.WeightDiagnostics) -> None:
    population = ob.Population.from_stacked({"w": numbers(8, 2), "n": torch.arange(8)})
    assert ob.weight_diagnostics(population, ["w"]).names == ("w",)
    for name in ("n", "x"):
        with pytest.raises(InputError, match=f"floating-point tensors.*found '{name}'"):
            ob.weight_diagnostics(population, [name])
    with pytest.raises(InputError, match="at least 4 draws"):
        ob.weight_diagnostics(population[:3])
