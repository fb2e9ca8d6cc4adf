"""Faults that a review of posteriors, compacting, evaluation and pruning found; each test is one of them."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onebasin import Population, fit, load_posterior
from onebasin.errors import InputError
from onebasin.metrics.bootstrap import interval
from onebasin.posterior.divergence import kl, wasserstein2
from onebasin.posterior.fidelity import augment
from onebasin.posterior.gaussian import Diagonal, Gaussian, LowRank
from onebasin.posterior.layout import FlatLayout, flat_layout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import prune
from onebasin.posterior.refine import refine
from onebasin.state import TensorSpec

Run = Callable[..., tuple[int, str, str]]
MODELS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))

def line():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

def example_input():
    return torch.zeros(2, 3)
"""


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior(*components: Gaussian, dtype: torch.dtype = torch.float32) -> Posterior:
    layout = FlatLayout(("w",), {"w": TensorSpec((components[0].size,), dtype)}, {})
    return Posterior.equal(list(components), layout, [{} for _ in components])


def point(centre: float, scale: float) -> Gaussian:
    return Gaussian(torch.tensor([centre]), Diagonal(torch.tensor([scale])))


def around(model: nn.Module, members: int, noise: float, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = stream(seed)
    return [
        {name: x + noise * torch.randn(x.shape, generator=generator) for name, x in model.state_dict().items()}
        for _ in range(members)
    ]


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def stock(tmp_path: Path, restored_imports: None) -> Path:
    """A model file, a folder with six networks of different basins, a posterior of them, and data."""
    (tmp_path / "models.py").write_text(MODELS)
    folder = tmp_path / "nets"
    folder.mkdir()
    states = around(net(), 6, 2.0)
    for number, state in enumerate(states):
        save_file(state, folder / f"{number}.safetensors")
    fit(Population.from_states(states)).save(tmp_path / "q.safetensors")
    x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(60) % 3)
    np.savez(tmp_path / "values.npz", x=x, y=x[:, :1])
    return tmp_path


def test_kl_to_a_fitted_low_rank_gaussian_has_the_digits_of_the_dense_formula() -> None:
    scales = torch.tensor([1.0] + [1e-3] * 5, dtype=torch.float64)
    population = Population.from_stacked({"w": torch.randn(30, 6, generator=stream(), dtype=torch.float64) * scales})
    p, q = fit(population), fit(population, "low-rank", rank=1)
    mp = pytest.importorskip("mpmath")
    with mp.workdps(50):
        own = mp.diag([mp.mpf(s) ** 2 for s in p.components[0].covariance.tensors()["scale"].tolist()])
        parts = q.components[0].covariance.tensors()
        factor = mp.matrix(parts["factor"].tolist())
        other = factor * factor.T + mp.diag([mp.mpf(s) ** 2 for s in parts["scale"].tolist()])
        ratio = other**-1 * own
        trace = sum(ratio[i, i] for i in range(6))
        exact = float((trace - 6 + mp.log(mp.det(other)) - mp.log(mp.det(own))) / 2)  # both have the same centre
    assert float(kl(p, q)) == pytest.approx(exact, rel=1e-6)  # 0.03546 where 0.03180 is right


def test_kl_is_never_negative_where_one_direction_carries_a_weight() -> None:
    ones, zeros = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    scale = torch.tensor([1e-8, 1.0, 1.0], dtype=torch.float64)
    along = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    p = posterior(Gaussian(zeros, Diagonal(ones)), dtype=torch.float64)
    q = posterior(Gaussian(zeros, LowRank(scale, along)), dtype=torch.float64)
    assert float(kl(p, q)) == pytest.approx(0.0, abs=1e-6)  # -0.5


def test_wasserstein_finds_the_best_transport_whatever_the_size_of_the_weights() -> None:
    parts = [point(1e-5 * centre, 1e-7) for centre in (0.0, 1.0, 2.0, 5.0)]
    p, q = posterior(*parts), posterior(*(parts[i] for i in (2, 0, 3, 1)))
    assert float(wasserstein2(p, q)) < 1e-9  # the same mixture in another order


def test_the_lower_bound_of_wasserstein_is_one_for_half_precision_networks() -> None:
    p = posterior(point(0.9, 1.0), point(1.1, 1.0), dtype=torch.bfloat16)
    q = posterior(point(0.9005, 1.0), point(1.0505, 1.0), point(1.0505, 1.0), dtype=torch.bfloat16)
    # In one dimension the distance is that of quantiles, which a fine grid gives.
    levels = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    grid = torch.linspace(-8, 10, 200_001, dtype=torch.float64)
    quantiles = []
    for own in (p, q):
        below = torch.stack([torch.special.ndtr(grid - c.centre.double()) for c in own.components]).mean(0)
        quantiles.append(torch.from_numpy(np.interp(levels, below, grid)))
    truth = float((quantiles[0] - quantiles[1]).square().mean().sqrt())
    assert wasserstein2(p, q).low <= 1.05 * truth  # 0.0078 where the distance is 0.0025


def test_a_posterior_takes_the_room_on_disk_that_it_says(tmp_path: Path) -> None:
    population = Population.from_stacked({"w": torch.randn(40, 5000, generator=stream())}, chain=torch.arange(40) % 8)
    found = fit(population, "mixture", components="chains", pooled=True, covariance="low-rank", rank=5)
    file = found.save(tmp_path / "q.safetensors")
    assert file.stat().st_size / (4 * 5000) < found.storage + 1  # 56 networks where it says 14
    assert load_posterior(file).storage == found.storage


def test_low_rank_fits_of_few_networks_find_small_tensors_beside_large_ones() -> None:
    large = torch.randn(12, 1, generator=stream(1))
    small = 1e-5 * torch.randn(12, 2, generator=stream(2)) @ torch.randn(2, 100, generator=stream(3))
    found = fit(Population.from_stacked({"large": large, "small": small}), "low-rank", rank=3)
    factor = found.components[0].covariance.tensors()["factor"].double()
    share = factor[1:].square().sum() / small.double().var(0).sum()
    assert float(share) > 0.99  # three directions span all of it; 0.13


def test_low_rank_fits_have_the_deviation_of_each_weight_far_from_zero() -> None:
    weights = (1e4 + 1e-3 * torch.randn(40, 30, generator=stream(), dtype=torch.float64)).float()
    found = fit(Population.from_stacked({"w": weights}), "low-rank", rank=39)
    exact = weights.double().std(0)
    assert float((found.components[0].covariance.std().double() / exact - 1).abs().max()) < 1e-3  # 0.078


def test_a_rank_that_the_networks_do_not_have_is_not_in_the_record() -> None:
    found = fit(Population.from_stacked({"w": torch.randn(5, 100, generator=stream())}), "low-rank", rank=20)
    assert found.provenance["fit"]["rank"] == found.components[0].covariance.tensors()["factor"].shape[1]


def test_ties_are_seen_although_a_third_tensor_is_equal_in_the_first_network() -> None:
    zero = torch.zeros(3)
    states = [{"a": zero, "b": zero.clone(), "c": zero.clone()}]
    for seed in range(5):
        tied = torch.randn(3, generator=stream(seed))
        states.append({"a": torch.randn(3, generator=stream(50 + seed)), "b": tied, "c": tied.clone()})
    assert flat_layout(Population.from_states(states)).tied == {"c": "b"}


def test_pruning_of_half_precision_networks_takes_the_deviation_that_was_fitted() -> None:
    step = 2.0**-24
    weights = torch.ones(20, 2, dtype=torch.float16)
    weights[:, 0] = 16 * step
    weights[0, 0] += step  # std 1.3e-8, which float16 rounds to zero: mean / std is 72
    weights[::2, 1] += 2.0**-10  # mean / std is 2,000
    found = fit(Population.from_stacked({"w": weights}))
    assert prune(found, 0.5, "snr")["w"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("family", "options"),
    [("mixture", {"components": True}), ("low-rank", {"rank": 2.5}), ("mixture", {"components": ["a", "b"] * 2})],
)
def test_fit_refuses_options_of_the_wrong_type(family: str, options: dict[str, object]) -> None:
    population = Population.from_stacked({"w": torch.randn(4, 3, generator=stream())})
    with pytest.raises(InputError):
        fit(population, family, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", [{"steps": 2.5}, {"draws": 4.0}, {"batch": 8.0}, {"mixed": 1.5}])
def test_refine_refuses_numbers_that_are_not_whole(option: dict[str, float]) -> None:
    population = Population.from_states(around(net(), 4, 0.1))
    with pytest.raises(InputError):
        refine(net(), fit(population), population, torch.zeros(5, 3), **option)  # type: ignore[arg-type]


def test_refine_with_a_kl_weight_leaves_out_networks_without_spread() -> None:
    population = Population.from_states(around(net(), 1, 0.1) * 3)
    inputs = torch.randn(10, 3, generator=stream())
    found = refine(net(), fit(population), population, inputs, kl_weight=1.0, steps=2, draws=2)
    assert math.isfinite(found.provenance["refined"]["distance"])


@pytest.fixture
def every_warning() -> Iterator[None]:
    """Torch gives a warning whenever there is reason, not only the first time."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@pytest.mark.usefixtures("every_warning")
def test_refine_says_in_its_own_words_that_predictions_are_not_finite() -> None:
    population = Population.from_states(around(net(), 4, 0.1))
    inputs = torch.randn(10, 3, generator=stream())
    with pytest.raises(InputError, match="finite predictions"):  # and not in torch's: warnings are errors here
        refine(net(), fit(population), population, inputs, steps=5, draws=2, lr=1e30)


def test_surroundings_of_a_single_number_are_numbers() -> None:
    found = augment(torch.ones(1, 1), noise=2.0, mixed=1, generator=stream())
    assert isinstance(found, tuple) and bool(torch.isfinite(found[0]).all())


def test_evaluate_tells_an_infinite_nll_without_a_bug(run: Run, stock: Path) -> None:
    folder = stock / "lines"
    folder.mkdir()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for number, state in enumerate(around(model, 3, 0.1)):
        save_file(state, folder / f"{number}.safetensors")
    _, _, complaint = run("evaluate", f"{stock}/models.py:line", folder, stock / "values.npz", "--noise", "1e-160")
    assert "bug" not in complaint


def test_intervals_of_functions_of_torch() -> None:
    values = torch.arange(30.0)
    found = interval(torch.mean, values, generator=stream(), n_resamples=50)
    assert float(found.low) <= float(found.value) <= float(found.high)


def test_prune_does_not_write_masks_over_the_network(run: Run, stock: Path) -> None:
    file = stock / "out.safetensors"
    code, _, _ = run("prune", f"{stock}/models.py:net", stock / "q.safetensors", "-o", file, "--masks", file)
    assert code != 0 or all(value.is_floating_point() for value in load_file(file).values())


def test_prune_does_with_a_network_what_its_help_says(run: Run, stock: Path) -> None:
    code, out, _ = run("prune", f"{stock}/models.py:net", stock / "nets" / "0.safetensors")
    assert code == 0 and "by magnitude" in out  # "... or of a network, which ... is pruned by magnitude"


def test_compact_does_not_make_its_own_folder_unreadable(run: Run, stock: Path) -> None:
    nets = stock / "nets"
    run("compact", nets, "-o", nets / "q.safetensors", "--model", f"{stock}/models.py:net")
    assert len(Population.open(nets)) == 6


def test_compact_does_not_replace_the_manifest_of_its_population(run: Run, stock: Path) -> None:
    folder = Population.open(stock / "nets").save(stock / "population")
    output = folder / "population.safetensors"
    run("compact", folder, "-o", output, "--model", f"{stock}/models.py:net", "--force")
    assert len(Population.open(folder)) == 6


def test_compact_refuses_to_refine_and_calibrate_at_once(run: Run, stock: Path) -> None:
    known = ("--model", f"{stock}/models.py:net", "--data", stock / "data.npz", "--steps", 1)
    code, _, _ = run("compact", stock / "nets", "-o", stock / "r.safetensors", *known, "--refine", "--fit-scales")
    assert code != 0


def test_compact_does_not_say_that_predictions_are_kept_where_they_are_not(run: Run, stock: Path) -> None:
    output = stock / "r.safetensors"
    known = ("--model", f"{stock}/models.py:net", "--raw", "--refine", "--steps", 1)
    data = ("--data", stock / "data.npz", "--test", stock / "data.npz")
    code, out, _ = run("compact", stock / "nets", "-o", output, *known, *data)
    rows = json.loads(output.with_suffix(".json").read_text())["record"]["values"]["predictions"]
    assert code == 0 and rows["posterior"]["total_variation"] > 0.1
    assert "the predictions are kept" not in out


def test_compact_tells_the_share_at_the_prior_beside_what_chance_gives(run: Run, stock: Path) -> None:
    output = stock / "r.safetensors"
    _, out, _ = run("compact", stock / "nets", "-o", output, "--model", f"{stock}/models.py:net", "--prior", 2)
    expected = json.loads(output.with_suffix(".json").read_text())["record"]["values"]["prior"]["expected"]
    assert f"{100 * expected:.1f} %" in out  # "a share is only read right beside the one that such draws would give"
