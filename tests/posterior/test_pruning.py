"""Masks: exact counts by every criterion, and a network that stays what it was until a copy of it is pruned."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onebasin as ob
from onebasin import Population
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.posterior.gaussian import Diagonal, Gaussian
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior
from onebasin.posterior.pruning import CRITERIA, LEVELS, Masks, count, prune
from onebasin.state import State, spec_of, state_of


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def posterior_of(mean: State, std: State, names: tuple[str, ...] | None = None, **tied: str) -> Posterior:
    chosen = names or tuple(name for name in mean if name not in tied)
    layout = FlatLayout(chosen, spec_of(mean), tied)
    return Posterior.equal([Gaussian(layout.flat(mean), Diagonal(layout.flat(std)))], layout, [mean])


def some_posterior(seed: int = 0, **shapes: tuple[int, ...]) -> Posterior:
    shapes = shapes or {"a": (5, 4), "b": (5,), "c": (3, 5)}
    stream = seeded(seed)
    mean = {name: torch.randn(shape, generator=stream) for name, shape in shapes.items()}
    std = {name: torch.rand(shape, generator=stream) for name, shape in shapes.items()}
    return posterior_of(mean, std)


def flat(tensors: dict[str, Tensor] | Masks) -> np.ndarray:
    return np.concatenate([value.numpy().reshape(-1) for value in tensors.values()])


def best(posterior: Posterior, by: str, many: int) -> set[int]:
    """The kept places by an independent way: Python's own sort of exact numbers."""
    mean, std = np.abs(flat(posterior.mean).astype(float)), flat(posterior.std).astype(float)
    value = {
        "snr": mean / std,
        "signal-plus-noise": mean + std,
        "magnitude": mean,
        "sigma": -std,
        "sigma-high": std,
    }[by]
    return set(sorted(range(len(value)), key=lambda place: -value[place])[:many])


@pytest.mark.parametrize("by", [by for by in CRITERIA if by != "random"])
@pytest.mark.parametrize("keep", [0.03, 0.2, 0.5, 0.99, 1.0])
def test_the_best_are_kept(by: str, keep: float) -> None:
    posterior = some_posterior()
    masks = prune(posterior, keep, by)
    assert set(np.flatnonzero(flat(masks))) == best(posterior, by, int(40 * keep))


@given(size=st.integers(1, 400), hundredths=st.integers(1, 100), by=st.sampled_from(CRITERIA))
@settings(max_examples=60, deadline=None)
def test_counts_are_exact(size: int, hundredths: int, by: str) -> None:
    masks = prune(some_posterior(w=(size,)), hundredths / 100, by)
    assert masks.kept == size * hundredths // 100
    assert masks.size == size
    assert masks.share == masks.kept / size


def test_every_hundredth_of_every_size_is_floored_exactly() -> None:
    sizes, hundredths = range(1, 500), range(1, 101)
    assert all(count(h / 100, size) == size * h // 100 for size in sizes for h in hundredths)


def test_the_levels_and_counts_of_the_paper() -> None:
    weights = 784 * 512 + 512 + 5120 + 10
    counts = [prune({"w": torch.zeros(weights)}, level, "magnitude").kept for level in LEVELS]
    assert counts == [407050, 366345, 325640, 284935, 244230, 203525, 162820, 122115, 81410, 40705, 20352, 4070]


def test_per_tensor_keeps_a_share_of_each() -> None:
    posterior = some_posterior()
    masks = prune(posterior, 0.5, "magnitude", per="tensor")
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"a": 10, "b": 2, "c": 7}
    for name, mask in masks.items():
        size = posterior.mean[name].abs()
        assert size[mask].min() > size[~mask].max()


def test_without_noise_a_signal_is_sure_and_nothing_is_nothing() -> None:
    mean = {"w": torch.tensor([0.0, 1e-9, 5.0, 0.0, 3.0])}
    std = {"w": torch.tensor([0.0, 0.0, 0.1, 2.0, 0.0])}
    posterior = posterior_of(mean, std)
    assert prune(posterior, 0.4, "snr")["w"].tolist() == [False, True, False, False, True]
    assert prune(posterior, 0.6, "snr")["w"].tolist() == [False, True, True, False, True]
    assert prune(posterior, 0.2, "snr")["w"].tolist() == [False, False, False, False, True]  # ties go to magnitude


def test_ties_go_to_magnitude_then_to_the_first() -> None:
    mean, std = {"w": torch.tensor([1.0, 2.0, 2.0, 1.0])}, {"w": torch.ones(4)}
    assert prune(posterior_of(mean, std), 0.75, "sigma")["w"].tolist() == [True, True, True, False]


def test_random_is_fair_and_follows_its_seed() -> None:
    posterior = some_posterior(w=(400,))
    masks = [prune(posterior, 0.25, "random", seed=seed)["w"] for seed in range(200)]
    assert torch.equal(masks[3], prune(posterior, 0.25, "random", seed=3)["w"])
    kept = torch.stack(masks).double().mean(0)
    # Each weight is kept with probability 1/4 in 200 draws: 4.5 standard errors over 400 weights.
    assert float((kept - 0.25).abs().max()) < 4.5 * (0.25 * 0.75 / 200) ** 0.5
    assert abs(float(kept[:200].mean() - kept[200:].mean())) < 4.5 * (0.25 * 0.75 / 200 / 100) ** 0.5


def test_names_and_patterns_choose_tensors() -> None:
    posterior = some_posterior()
    masks = prune(posterior, 0.5, "magnitude", names=["[ac]"])
    assert list(masks) == ["a", "c"]
    assert masks.kept == 17
    assert torch.equal(masks.apply(posterior.mean)["b"], posterior.mean["b"])
    with pytest.raises(InputError, match="found 'd'"):
        prune(posterior, names=["d"])


def test_what_is_not_uncertain_has_no_mask() -> None:
    mean = {"w": torch.randn(4, generator=seeded(0)), "running_mean": torch.ones(4), "steps": torch.tensor(3)}
    posterior = posterior_of(mean, {"w": torch.ones(4)}, names=("w",))
    masks = prune(posterior, 0.25)
    assert list(masks) == ["w"]
    pruned = masks.apply(mean)
    assert torch.equal(pruned["running_mean"], torch.ones(4))
    assert pruned["steps"] == 3


def test_a_network_alone_is_pruned_by_magnitude_or_at_random() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for network in (model, model.state_dict()):
        masks = prune(network, 0.5, "magnitude")
        assert list(masks) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert masks.kept == 12
    with pytest.raises(InputError, match="needs standard deviations"):
        prune(model, 0.5, "snr")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).relu())


def test_tied_tensors_count_once_and_stay_equal() -> None:
    model = Tied()
    mean = {name: value.clone() for name, value in state_of(model).items()}
    posterior = posterior_of(mean, {name: torch.ones(4, 4) for name in mean}, **{"last.weight": "first.weight"})
    for what in (model, model.state_dict(), posterior):
        masks = prune(what, 0.5, "magnitude")
        assert (masks.size, masks.kept) == (16, 8)
        pruned = masks.apply(mean)
        assert torch.equal(pruned["first.weight"], pruned["last.weight"])
        assert int((pruned["first.weight"] == 0).sum()) == 8


@pytest.mark.parametrize("keep", [0.0, -0.1, 1.01, float("nan")])
def test_shares_that_make_no_sense_are_refused(keep: float) -> None:
    with pytest.raises(InputError, match="0 < keep <= 1"):
        prune(some_posterior(), keep)


def test_other_words_are_refused() -> None:
    with pytest.raises(InputError, match="criterion"):
        prune(some_posterior(), by="size")
    with pytest.raises(InputError, match="expected per"):
        prune(some_posterior(), per="layer")
    with pytest.raises(InputError, match="finite"):
        prune({"w": torch.tensor([1.0, float("nan")])}, by="magnitude")


# ---------------------------------------------------------------------- masks


def test_pruning_changes_nothing_that_was_given() -> None:
    posterior = some_posterior()
    network = {name: value.clone() for name, value in posterior.mean.items()} | {"free": torch.ones(3)}
    before = {name: value.clone() for name, value in network.items()}
    masks = prune(posterior, 0.3)
    pruned = masks.apply(network)
    for value in pruned.values():
        value.add_(7)  # what came back is the caller's own, masked tensor or not
    assert all(torch.equal(network[name], before[name]) for name in network)
    all_kept = prune(posterior, 1.0).apply(network)
    assert all(all_kept[name].data_ptr() != network[name].data_ptr() for name in network)


def test_a_population_is_pruned_member_by_member() -> None:
    posterior = some_posterior()
    population = posterior.draw(5, seeded(1))
    before = population.stacked()["a"].clone()
    masks = prune(posterior, 0.3)
    pruned = masks.apply(population)
    for index in range(5):
        expected = masks.apply(population.member(index))
        assert all(torch.equal(value, pruned.member(index)[name]) for name, value in expected.items())
    assert torch.equal(population.stacked()["a"], before)
    assert isinstance(pruned, Population)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    network = {"w": torch.randn(6, generator=seeded(0)).to(dtype)}
    assert prune(network, 0.5, "magnitude").apply(network)["w"].dtype is dtype


def test_nan_under_a_mask_is_gone() -> None:
    masks = Masks({"w": torch.tensor([True, False])})
    assert masks.apply({"w": torch.tensor([1.0, float("nan")])})["w"].tolist() == [1.0, 0.0]


def test_masks_of_another_architecture_are_refused() -> None:
    masks = prune(some_posterior(), 0.5)
    with pytest.raises(SpecError, match="no such tensor"):
        masks.apply({"a": torch.zeros(5, 4)})
    with pytest.raises(SpecError, match="shape"):
        masks.apply({"a": torch.zeros(4, 5), "b": torch.zeros(5), "c": torch.zeros(3, 5)})
    with pytest.raises(SpecError, match="bool"):
        Masks({"w": torch.ones(2)})


def test_ones_keep_everything() -> None:
    network = {"w": torch.randn(3, generator=seeded(0)), "steps": torch.tensor(1)}
    masks = Masks.ones(network)
    assert (masks.kept, masks.share, list(masks)) == (3, 1.0, ["w"])
    assert torch.equal(masks.apply(network)["w"], network["w"])


def test_the_table_shows_every_tensor() -> None:
    masks = prune(some_posterior(), 0.5, "magnitude", per="tensor")
    lines = str(masks).splitlines()
    assert "19 of 40 weights are kept (47.50%), chosen by magnitude." in lines
    assert lines[4].split() == ["tensor", "kept", "of", "share", "(%)"]
    assert [line.split() for line in lines[6:]] == [
        ["all", "19", "40", "47.50"], ["a", "10", "20", "50.00"], ["b", "2", "5", "40.00"], ["c", "7", "15", "46.67"],
    ]  # fmt: skip


def test_masks_come_back_from_their_file(tmp_path: Path) -> None:
    model = Tied()
    masks = prune(model, 0.5, "magnitude")
    found = Masks.load(masks.save(tmp_path / "new" / "masks.safetensors"))
    assert found == masks
    assert found != Masks.ones(masks.apply(state_of(model)))
    assert (found.tied, found.facts) == (masks.tied, masks.facts)
    many = prune(some_posterior(z=(2,), a=(30,), m=(7, 3)), 0.5)
    assert list(Masks.load(many.save(tmp_path / "many.safetensors"))) == ["z", "a", "m"]


def test_other_files_are_no_masks(tmp_path: Path) -> None:
    some_posterior().save(tmp_path / "posterior.safetensors")
    with pytest.raises(StorageError, match="another kind"):
        Masks.load(tmp_path / "posterior.safetensors")
    with pytest.raises(StorageError, match="does not exist"):
        Masks.load(tmp_path / "nothing.safetensors")
    path = prune(some_posterior(), 0.5).save(tmp_path / "masks.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StorageError):
        Masks.load(path)


@functools.cache
def convolution() -> tuple[nn.Module, ob.Symmetry]:
    model = nn.Sequential(nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).eval()
    return model, ob.discover(model, torch.zeros(2, 2, 6))


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_to_mask_and_to_move_commute(seed: int) -> None:
    model, symmetry = convolution()
    network = state_of(model)
    masks = prune(model, 0.4, "random", seed=seed)
    element = symmetry.random(seed)
    one = masks.carried(element, symmetry).apply(symmetry.apply(element, network))
    other = symmetry.apply(element, masks.apply(network))
    assert all(torch.equal(one[name], other[name]) for name in network)
    assert masks.carried(element, symmetry).kept == masks.kept
