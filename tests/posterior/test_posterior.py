import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import onebasin as ob
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.posterior.families import covariance_class
from onebasin.posterior.gaussian import Block, Covariance, Diagonal, Full, Gaussian, Kronecker, LowRank, Partial
from onebasin.posterior.layout import FlatLayout
from onebasin.posterior.posterior import Posterior, load_posterior, shares
from onebasin.state import TensorSpec, spec_of
from onebasin.storage.tensor_file import read_tensors, write_tensors

Z = 4.5  # |z| of a normal exceeds this with probability 7e-6


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numbers(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=seeded(seed), dtype=dtype)


def shapes_of(size: int, rank: int, seed: int = 0) -> list[Covariance]:
    scale = numbers(size, seed=seed).exp()
    return [Diagonal(scale), LowRank(scale, numbers(size, rank, seed=seed + 1))]


def covariance(shape: Covariance) -> Tensor:
    made = shape.tensors()
    factor = made.get("factor", torch.zeros(shape.size, 0, dtype=torch.float64))
    return torch.diag(made["scale"] ** 2) + factor @ factor.T


@pytest.mark.parametrize("shape", shapes_of(5, 3), ids=lambda shape: shape.kind)
def test_draws_have_mean_and_covariance_of_the_closed_form(shape: Covariance) -> None:
    centre, exact, count = numbers(5, seed=7), covariance(shape), 40_000
    drawn = Gaussian(centre, shape).draw_flat(count, seeded(3))
    # The whitened sample mean is standard normal / sqrt(n): its squared length is chi-square with D degrees.
    root = torch.linalg.cholesky(exact)
    whitened = torch.linalg.solve_triangular(root, (drawn - centre).T, upper=False).T
    assert count * float(whitened.mean(0).square().sum()) < chi2.ppf(1 - 1e-4, 5)
    # Each entry of the whitened sample covariance has variance 1 / n off the diagonal and 2 / n on it.
    second = whitened.T @ whitened / count - torch.eye(5)
    bound = Z * (torch.ones(5, 5) + torch.eye(5)).sqrt() / math.sqrt(count)
    assert bool((second.abs() < bound).all())
    torch.testing.assert_close(shape.std(), exact.diagonal().sqrt())


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 12), rank=st.integers(0, 15), seed=st.integers(0, 1000))
def test_log_density_is_that_of_torch(size: int, rank: int, seed: int) -> None:
    points, centre = 2 * numbers(4, 3, size, seed=seed + 5), numbers(size, seed=seed + 6)
    for shape in shapes_of(size, rank, seed):
        found = Gaussian(centre, shape).log_density(points)
        expected = MultivariateNormal(centre, covariance(shape)).log_prob(points)
        assert found.shape == (4, 3) and found.dtype == torch.float64
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_log_density_of_low_rank_survives_a_tiny_diagonal() -> None:
    # One direction of length 1e4 beside a diagonal of 1e-3: Woodbury's difference would lose 14 digits. Along the
    # direction u the variance is s^2 + f^2, across it s^2.
    scale, length, size = 1e-3, 1e4, 3
    direction = numbers(size)
    direction = direction / direction.norm()
    shape = LowRank(torch.full((size,), scale, dtype=torch.float64), length * direction[:, None])
    along = scale**2 + length**2
    exact = -0.5 * (9e8 / along + size * math.log(2 * math.pi) + math.log(along) + 2 * (size - 1) * math.log(scale))
    assert float(shape.log_density(3e4 * direction)) == pytest.approx(exact, rel=1e-6)


def test_draws_follow_the_generator_and_the_dtype_of_the_centre() -> None:
    for shape in shapes_of(4, 2):
        gaussian = Gaussian(torch.zeros(4), shape)
        first, second = gaussian.draw_flat(3, seeded(1)), gaussian.draw_flat(3, seeded(1))
        assert torch.equal(first, second) and first.dtype == torch.float32
        assert not torch.equal(first, gaussian.draw_flat(3, seeded(2)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight


NAMES = ("one.weight", "one.bias", "norm.weight", "norm.bias", "two.bias")


def mixture(dtype: torch.dtype = torch.float32, weights: tuple[float, ...] = (0.2, 0.5, 0.3)) -> Posterior:
    """Three components of the two shapes for a model with tied weights and an integer buffer."""
    model = Tied().to(dtype)
    layout = FlatLayout(NAMES, spec_of(model.state_dict()), {"two.weight": "one.weight"})
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    components, rest = [], []
    for index in range(len(weights)):
        scale = numbers(layout.size, seed=index).exp().to(wide)
        factor = numbers(layout.size, 2, seed=10 + index).to(wide)
        shape = LowRank(scale, factor) if index % 2 else Diagonal(scale)
        components.append(Gaussian(numbers(layout.size, seed=20 + index).to(wide), shape))
        rest.append(
            {
                "norm.running_mean": numbers(3, seed=30 + index).to(dtype),
                "norm.running_var": numbers(3, seed=40 + index).exp().to(dtype),
                "norm.num_batches_tracked": torch.tensor(5 + index),
            }
        )
    chosen = torch.tensor(weights, dtype=torch.float64)
    return Posterior(tuple(components), chosen, layout, tuple(rest), {"method": "test", "seed": 3})


def reference(posterior: Posterior) -> MixtureSameFamily:
    centres = torch.stack([component.centre for component in posterior.components]).double()
    matrices = torch.stack([covariance(component.covariance) for component in posterior.components]).double()
    return MixtureSameFamily(Categorical(posterior.weights), MultivariateNormal(centres, matrices))


def test_log_density_of_a_mixture_is_that_of_torch() -> None:
    posterior = mixture(torch.float64)
    oracle = reference(posterior)
    for state in posterior.draw(10, seeded(0), statistics=False):
        expected = float(oracle.log_prob(posterior.layout.flat(state)))
        assert posterior.log_density(state) == pytest.approx(expected, rel=1e-9)


def test_moments_of_a_mixture_are_those_of_torch() -> None:
    posterior = mixture(torch.float64)
    oracle = reference(posterior)
    torch.testing.assert_close(posterior.layout.flat(posterior.mean), oracle.mean)
    torch.testing.assert_close(posterior.layout.flat(posterior.std), oracle.variance.sqrt())


def test_moments_of_a_mixture_are_those_of_its_draws() -> None:
    posterior, count = mixture(torch.float64), 20_000
    stacked = posterior.draw(count, seeded(5), statistics=False).stacked()
    for name in NAMES:
        values, std = stacked[name], posterior.std[name]
        error = (values.mean(0) - posterior.mean[name]) / (std / math.sqrt(count))
        assert float(error.abs().max()) < Z
        fourth = ((values - values.mean(0)) / values.std(0)).pow(4).mean(0)
        relative = (values.var(0) / std.square() - 1) / ((fourth - 1) / count).sqrt()
        assert float(relative.abs().max()) < Z


def test_what_is_not_uncertain_is_averaged_if_it_can_be() -> None:
    posterior = mixture(torch.float64)
    means = torch.stack([own["norm.running_mean"] for own in posterior.buffers])
    torch.testing.assert_close(posterior.mean["norm.running_mean"], posterior.weights @ means)
    assert int(posterior.mean["norm.num_batches_tracked"]) == 5
    assert not posterior.std["norm.running_mean"].any() and not posterior.std["norm.num_batches_tracked"].any()


def test_draws_carry_the_rest_of_their_component_and_ties() -> None:
    posterior = mixture()
    population = posterior.draw(10, seeded(0), statistics=False)
    assert population.spec == posterior.spec and population.provenance == {"method": "test", "seed": 3}
    stacked, chain = population.stacked(), population.chain
    assert chain is not None and torch.bincount(chain).tolist() == [2, 5, 3]
    assert torch.equal(stacked["norm.num_batches_tracked"], chain + 5)
    assert torch.equal(stacked["two.weight"], stacked["one.weight"])
    Tied().load_state_dict(population.member(0))


@settings(max_examples=50, deadline=None)
@given(members=st.integers(1, 60), each=st.integers(1, 9), seed=st.integers(0, 99))
def test_equal_components_get_equal_shares(members: int, each: int, seed: int) -> None:
    weights = torch.full((members,), 1 / members, dtype=torch.float64)
    assert shares(weights, members * each, seeded(seed)).tolist() == [each] * members


def test_shares_have_the_expectation_of_the_weights() -> None:
    weights = torch.tensor([0.05, 0.41, 0.3, 0.24], dtype=torch.float64)
    generator, rounds, n = seeded(1), 4000, 7
    counts = torch.stack([shares(weights, n, generator) for _ in range(rounds)]).double()
    assert bool((counts.sum(1) == n).all())
    assert bool(((counts - n * weights).abs() < 1).all())
    error = (counts.mean(0) - n * weights) / (counts.std(0) / math.sqrt(rounds))
    assert float(error.abs().max()) < Z


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_saved_and_loaded_it_is_the_same_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    posterior = mixture(dtype)
    path = posterior.save(tmp_path / "new" / "posterior.safetensors")
    loaded = load_posterior(path)
    assert loaded.spec == posterior.spec and list(loaded.spec) == list(posterior.spec)
    assert loaded.provenance == posterior.provenance and loaded.layout.names == posterior.layout.names
    assert loaded.layout.tied == posterior.layout.tied and torch.equal(loaded.weights, posterior.weights)
    first, second = (own.draw(7, seeded(4), statistics=False).stacked() for own in (posterior, loaded))
    for name, value in first.items():
        assert value.dtype == posterior.spec[name].dtype and torch.equal(value, second[name])
    for ours, theirs in zip(posterior.components, loaded.components, strict=True):
        assert torch.equal(ours.centre, theirs.centre) and ours.covariance.kind == theirs.covariance.kind
        mine, others = ours.covariance.tensors(), theirs.covariance.tensors()
        assert mine.keys() == others.keys()
        assert all(torch.equal(mine[key], others[key]) and mine[key].dtype == others[key].dtype for key in mine)
    for own, other in zip(posterior.buffers, loaded.buffers, strict=True):
        assert all(torch.equal(own[key], other[key]) and own[key].dtype == other[key].dtype for key in own)


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mixture().save(tmp_path / "a.safetensors")
    mixture(weights=(1.0,)).save(tmp_path / "a.safetensors")
    assert len(load_posterior(tmp_path / "a.safetensors").components) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_that_are_no_posterior_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        load_posterior(tmp_path / "absent.safetensors")
    mixture().draw(2, seeded(0), statistics=False).save(tmp_path / "population.safetensors")
    with pytest.raises(StorageError, match="another kind of file"):
        load_posterior(tmp_path / "population.safetensors")
    whole = mixture().save(tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(StorageError):
        load_posterior(tmp_path / "cut.safetensors")
    (tmp_path / "odd.safetensors").write_bytes(whole.replace(b"low_rank", b"row_lank"))
    with pytest.raises(StorageError, match="does not match its checksum"):
        load_posterior(tmp_path / "odd.safetensors")
    tensors, facts = read_tensors(tmp_path / "whole.safetensors")
    write_tensors(tmp_path / "odd.safetensors", tensors, {**facts, "kinds": facts["kinds"].replace("low_rank", "odd")})
    with pytest.raises(StorageError, match="do not fit"):
        load_posterior(tmp_path / "odd.safetensors")
    (tmp_path / "newer.safetensors").write_bytes(whole.replace(b'"version":"2"', b'"version":"3"'))
    with pytest.raises(StorageError, match="upgrade"):
        load_posterior(tmp_path / "newer.safetensors")


def test_a_stacked_equal_mixture_narrows_what_was_wide(tmp_path: Path) -> None:
    layout = FlatLayout(("w",), {"w": TensorSpec((2,), torch.float16), "m": TensorSpec((), torch.bfloat16)}, {})
    made = Posterior.equal([Gaussian(torch.zeros(2), Diagonal(torch.ones(2)))] * 2, layout, [{"m": torch.ones(())}] * 2)
    assert made.buffers[0]["m"].dtype == torch.bfloat16 and made.weights.tolist() == [0.5, 0.5]
    assert made.draw(2, seeded(0)).member(0)["w"].dtype == torch.float16


def one_of_each(size: int) -> list[Covariance]:
    root = numbers(size, size, seed=1)
    left, right = (torch.linalg.qr(numbers(side, side, seed=side)).Q for side in (2, size // 2))
    blocks = [Block(left, right, numbers(2, size // 2).exp())]
    full, kronecker = Full.from_covariance(root @ root.T), Kronecker(blocks)
    partial = Partial(Kronecker(blocks), torch.arange(size) + 3, size + 5)
    return [*shapes_of(size, 2), full, kronecker, partial]


def test_every_shape_can_be_stored(tmp_path: Path) -> None:
    made = one_of_each(6)
    assert all(covariance_class(shape.kind) is type(shape) for shape in made)
    for shape in made:
        layout = FlatLayout(("w",), {"w": TensorSpec((shape.size,), torch.float64)}, {})
        posterior = Posterior.equal([Gaussian(numbers(shape.size), shape)], layout, [{}])
        loaded = load_posterior(posterior.save(tmp_path / f"{shape.kind}.safetensors"))
        assert torch.equal(posterior.draw(5, seeded(1)).tensor("w"), loaded.draw(5, seeded(1)).tensor("w"))
        point = posterior.draw(1, seeded(2)).member(0)
        assert posterior.log_density(point) == loaded.log_density(point)
        assert torch.equal(posterior.std["w"], loaded.std["w"])


def test_bad_input_is_told_in_a_sentence() -> None:
    good = mixture()
    with pytest.raises(InputError, match="finite numbers >= 0, found negative"):
        Diagonal(torch.tensor([1.0, -1.0]))
    with pytest.raises(InputError, match="found shape"):
        Diagonal(torch.ones(2, 2))
    with pytest.raises(InputError, match=r"factor \(3, K\)"):
        LowRank(torch.ones(3), torch.ones(2, 3))
    with pytest.raises(InputError, match="1 weights with zero"):
        Diagonal(torch.tensor([1.0, 0.0])).log_density(torch.zeros(2))
    with pytest.raises(InputError, match="centre"):
        Gaussian(torch.zeros(3), Diagonal(torch.ones(2)))
    with pytest.raises(InputError, match="at least one component"):
        Posterior((), torch.ones(0), good.layout, ())
    with pytest.raises(InputError, match="sum 1"):
        Posterior(good.components, torch.ones(3), good.layout, good.buffers)
    with pytest.raises(SpecError, match="over the"):
        Posterior((Gaussian(torch.zeros(2), Diagonal(torch.ones(2))),), torch.ones(1), good.layout, good.buffers[:1])
    with pytest.raises(SpecError, match="buffers of component 0"):
        Posterior(good.components[:1], torch.ones(1), good.layout, ({},))
    with pytest.raises(SpecError, match="the network"):
        good.log_density({"w": torch.zeros(2)})
    with pytest.raises(InputError, match="n=0"):
        good.draw(0, seeded(0))
    with pytest.raises(SpecError, match="names of the spec"):
        FlatLayout(("absent",), good.spec, {})


def test_a_provenance_that_is_no_json_is_refused(tmp_path: Path) -> None:
    good = mixture()
    odd = Posterior(good.components, good.weights, good.layout, good.buffers, {"model": object()})
    with pytest.raises(InputError, match="plain JSON"):
        odd.save(tmp_path / "odd.safetensors")


def test_a_map_of_one_layer_averages_what_is_too_large() -> None:
    noise = torch.Generator().manual_seed(0)
    population = ob.Population.from_stacked({
        "conv.weight": torch.randn(3, 400, 2, 1, 3, generator=noise).double(), "bias": torch.randn(3, 4).double(),
    })  # fmt: skip
    posterior = ob.fit(population)
    found = ob.layer_map(posterior, "conv.weight")
    mean, std = found.grids
    assert mean.shape == std.shape == (200, 6)  # out by in * k * k, two rows in a cell
    whole = population.tensor("conv.weight").mean(0).flatten(1)
    torch.testing.assert_close(mean, (whole[::2] + whole[1::2]) / 2)
    assert "400 x 6 weights are averaged to 200 x 6" in str(found)
    assert "Each cell is one weight" in str(ob.layer_map(posterior, "bias"))
    with pytest.raises(ob.errors.InputError, match=r"\(conv.weight, bias\), found 'weight'"):
        ob.layer_map(posterior, "weight")


def test_many_tensors_are_cut_in_text_and_whole_in_the_data_frame() -> None:
    tensors = {f"t{number}": torch.randn(4, 1 + number % 7).double() for number in range(45)}
    found = ob.fit(ob.Population.from_stacked(tensors))
    assert "16 more rows: to_dataframe" in str(found) and len(found.to_dataframe("tensors")) == 46
    frame = found.to_dataframe("tensors").set_index("tensor")
    assert frame.loc["t5", "sigma median"] == pytest.approx(float(np.median(tensors["t5"].std(0).numpy())))
