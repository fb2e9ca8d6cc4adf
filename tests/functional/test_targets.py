"""Targets are classes or values: what was said decides, and floats that may be labels are asked about."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.functional.losses import kind_of_targets, labels_seen, loss_of_targets
from onebasin.state import state_of
from tests.judging import approximate, sample

Run = Callable[..., tuple[int, str, str]]
X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
LABELS = (X @ torch.tensor([1.0, -2.0, 0.5]) > 0).long()
REAL = X @ torch.tensor([1.0, -2.0, 0.5])
LIKE_LABELS = {
    "0 and 1": LABELS.float(),
    "a column": LABELS.double()[:, None],
    "-1 and 1": 2.0 * LABELS - 1,
    "from 1": LABELS + 1.0,
    "smoothed": 0.1 + 0.8 * LABELS,
    "standardised": (LABELS - LABELS.float().mean()) / LABELS.float().std(),
}


def two_outputs() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(3, 2)


@pytest.mark.parametrize("targets", LIKE_LABELS.values(), ids=LIKE_LABELS.keys())
def test_float_labels_are_asked_about_wherever_a_kind_is_chosen(targets: Tensor) -> None:
    model, population = two_outputs(), ob.Population.from_states([state_of(two_outputs())])
    both = r"targets\.long\(\).*likelihood=\"bernoulli\".*likelihood=\"gaussian\""
    with pytest.raises(InputError, match=both):
        sample(model, (X, targets), "ensemble", epochs=1)
    with pytest.raises(InputError, match=both):
        approximate(model, (X, targets), "laplace", epochs=1)
    with pytest.raises(InputError, match=both):
        ob.evaluate(model, population, (X, targets), n_resamples=10)
    with pytest.raises(InputError, match=r"targets\.long\(\).*mse"):
        loss_of_targets(targets)


def test_all_targets_decide_not_the_first_few() -> None:
    late = torch.zeros(200)
    late[150] = 0.25
    late[151] = 0.5
    assert kind_of_targets(late) == "gaussian"
    found = sample(two_outputs(), (X, late), "ensemble", epochs=1)
    assert found.provenance["likelihood"] == "learned_gaussian"


@pytest.mark.parametrize("said", [{"likelihood": "gaussian"}, {"noise": "learned"}])
def test_a_regression_on_whole_numbers_can_be_said(said: dict[str, str]) -> None:
    found = sample(two_outputs(), (X, LABELS.float()), "ensemble", epochs=1, **said)
    assert found.provenance["likelihood"] == "learned_gaussian"
    assert ob.evaluate(two_outputs(), found, (X, LABELS.float()), n_resamples=10, **said).kind == "gaussian"


def test_the_remedies_of_the_question_work() -> None:
    """The same labels as whole numbers make a classifier, which is right; as 0 and 1 with one logit too."""
    found = sample(two_outputs(), (X, LABELS), "ensemble", epochs=50, lr=0.05)
    assert found.provenance["likelihood"] == "categorical"
    assert ob.evaluate(two_outputs(), found, (X, LABELS), n_resamples=10).in_distribution["accuracy"].value > 0.9
    said = {"likelihood": "bernoulli"}
    one = sample(nn.Linear(3, 1), (X, LABELS.float()), "ensemble", epochs=50, lr=0.05, **said)
    assert (
        ob.evaluate(nn.Linear(3, 1), one, (X, LABELS.float()), n_resamples=10, **said).in_distribution["accuracy"].value
        > 0.9
    )


@pytest.mark.parametrize("targets", [LABELS, LABELS.bool(), LABELS.int()], ids=["int64", "bool", "int32"])
def test_whole_numbers_for_one_output_are_asked_about(targets: Tensor) -> None:
    with pytest.raises(InputError, match=r"at least 2 classes.*\"bernoulli\".*\"gaussian\""):
        sample(nn.Linear(3, 1), (X, targets), "ensemble", epochs=1)
    population = ob.Population.from_states([state_of(nn.Linear(3, 1))])
    with pytest.raises(InputError, match=r"\"bernoulli\".*\"gaussian\""):
        ob.evaluate(nn.Linear(3, 1), population, (X, targets), n_resamples=10)


def test_whole_numbers_are_values_where_that_is_said() -> None:
    counts = (10 * REAL).round().long()
    with pytest.raises(InputError, match=r'leave noise out for classes, or add likelihood="gaussian"'):
        sample(nn.Linear(3, 1), (X, counts), "ensemble", epochs=1, noise=1.0)
    said = {"likelihood": "gaussian", "noise": 1.0}
    found = sample(nn.Linear(3, 1), (X, counts), "ensemble", epochs=200, lr=0.1, prior=None, **said)
    assert ob.evaluate(nn.Linear(3, 1), found, (X, counts), n_resamples=10, **said).in_distribution["rmse"].value < 1


@pytest.mark.parametrize("shape", [(200,), (200, 1)])
def test_values_need_no_question(shape: tuple[int, ...]) -> None:
    assert labels_seen(REAL.reshape(shape)) == ""
    found = sample(two_outputs(), (X, REAL.reshape(shape)), "ensemble", epochs=1)
    assert found.provenance["likelihood"] == "learned_gaussian"


@pytest.mark.usefixtures("restored_imports")
def test_compare_and_prune_ask_for_the_loss(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef net():\n"
        "    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))\n\n\n"
        "def example_input():\n    return torch.randn(4, 3)\n"
    )
    for name, seed in (("a", 1), ("b", 2)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        save_file(state_of(model), tmp_path / f"{name}.safetensors")
    np.savez(tmp_path / "data.npz", x=X.numpy(), y=LABELS.float().numpy())
    one = f"{tmp_path}/a.safetensors"
    for verb in (
        f"compare {one} {tmp_path}/b.safetensors --model {tmp_path}/model.py:net",
        f"prune {tmp_path}/model.py:net {one}",
    ):
        code, out, err = run(*verb.split(), "--data", f"{tmp_path}/data.npz")
        assert code == 10 and "can be either" in err, out + err
        code, out, err = run(*verb.split(), "--data", f"{tmp_path}/data.npz", "--loss", "mse")
        assert code == 0, err
    code, _, err = run("prune", f"{tmp_path}/model.py:net", one, "--loss", "mse")
    assert code == 10 and "--data" in err
