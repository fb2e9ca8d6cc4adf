"""Population as a value: building, slicing, mapping, and the round trip through the disk."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from onebasin.errors import InputError, SpecError
from onebasin.population.population import Population
from onebasin.state import TensorSpec, flatten, spec_of, state_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.int32, torch.complex64, torch.float8_e4m3fn]
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
names = st.text(st.characters(categories=("L", "N"), include_characters="._/"), min_size=1, max_size=9)
names = names.filter(lambda name: name != "__metadata__" and not name.startswith("onebasin."))  # reserved
specs = st.dictionaries(names, st.builds(TensorSpec, shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5)
quiet = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def draw(spec, members, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(members, *t.shape, generator=generator).mul(9).to(t.dtype) for n, t in spec.items()}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def same(a, b):
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(raw(a[n]), raw(b[n])) for n in a
    )


def networks(members=10, **facts):
    return Population.from_stacked(
        {"w": torch.arange(members * 6.0).view(members, 3, 2), "n": torch.arange(members)}, **facts
    )


@quiet
@given(spec=specs, members=st.integers(1, 7), seed=st.integers(0, 99))
def test_round_trip_keeps_every_bit(tmp_path_factory, spec, members, seed):
    folder = tmp_path_factory.mktemp("trip")
    tensors = draw(spec, members, seed)
    population = Population.from_stacked(tensors, chain=range(members), log_density=torch.rand(members))
    population.save(folder / "a")
    with Population.writer(folder / "b", spec, shard_members=2) as writer:
        writer.extend(population)
    population.save(folder / "c.safetensors")
    for name in ("a", "b", "c.safetensors"):
        again = Population.open(folder / name)
        assert same(again.stacked(), tensors)
        assert again.spec == spec
        assert again.check() == []
        assert torch.equal(again.chain, population.chain)
        assert torch.equal(again.log_density, population.log_density)


indices = st.one_of(
    st.slices(10),
    st.lists(st.integers(-10, 9), max_size=12),
    st.lists(st.integers(-10, 9), min_size=1, max_size=12).map(torch.tensor),
    st.lists(st.booleans(), min_size=10, max_size=10).map(torch.tensor),
)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / "population"
    with Population.writer(path, networks().spec, shard_members=4) as writer:
        writer.extend(networks(chain=range(10)))
    return Population.open(path)


@quiet
@given(first=indices, second=st.slices(5))
def test_slicing_equals_list_semantics(on_disk, first, second):
    whole = list(range(10))
    if isinstance(first, slice):
        expected = whole[first]
    elif isinstance(first, torch.Tensor) and first.dtype == torch.bool:
        expected = [i for i in whole if first[i]]
    else:
        expected = [whole[int(i)] for i in first]
    memory = networks(chain=range(10))
    joined = Population.concatenate([memory[:3], on_disk[3:5], memory[5:]])
    for population in (memory, on_disk, joined):
        part = population[first][second]
        assert part.tensor("n").tolist() == part.chain.tolist() == expected[second]
        assert [int(state["n"]) for state in part] == expected[second]
        assert len(part) == len(expected[second])


def test_members_are_fresh_and_negative_indices_count_from_the_end():
    population = networks()
    member = population.member(-1)
    assert int(member["n"]) == 9
    member["w"].zero_()
    assert population.member(9)["w"].any()
    with pytest.raises(InputError, match="10 members, found index 10"):
        population.member(10)


@pytest.mark.parametrize("index", [10, [10], [0.5], torch.tensor([True]), [[1]]])
def test_a_bad_index_is_explained(index):
    with pytest.raises(InputError, match=r"member|mask"):
        networks()[index]


def test_models_go_in_and_come_out():
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(3)]
    before = copy.deepcopy([state_of(model) for model in models])
    population = Population.from_models(models)
    assert population.names == tuple(state_of(models[0]))
    for index, state in enumerate(before):
        assert same(population.member(index), state)
        models[index].load_state_dict(population.member(index))
    population.map(lambda block, start: {n: v * 0 for n, v in block.items()})
    assert all(same(state_of(model), state) for model, state in zip(models, before, strict=True))
    with pytest.raises(SpecError, match=r"member 1, compared with member 0, has other shapes.*architecture"):
        Population.from_models([nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(InputError, match="at least one network"):
        Population.from_models([])


def test_a_generator_of_live_weights_is_copied():
    weight = torch.zeros(2)

    def training():
        for step in range(3):
            weight.fill_(step)
            yield {"w": weight}

    assert Population.from_states(training()).tensor("w")[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", [lambda m: m, state_of, lambda m: spec_of(state_of(m))])
def test_flat_matrix(kind):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model(torch.zeros(2, 4))
    matrix = torch.stack([flatten(state_of(model)) * k for k in range(4)]).double()
    population = Population.from_flat(matrix.numpy(), kind(model), chain=[0, 0, 1, 1])
    assert population.spec == spec_of(state_of(model))
    torch.testing.assert_close(flatten(population.member(1)), flatten(state_of(model)))
    assert int(population.member(0)["1.num_batches_tracked"]) == (0 if kind(model) == spec_of(state_of(model)) else 1)
    with pytest.raises(SpecError, match=r"expected a vector \(\.\.\., 27\).*flatten"):
        Population.from_flat(matrix[:, :-1], model)
    with pytest.raises(SpecError, match=r"matrix.*reshape"):
        Population.from_flat(matrix[0], model)


def test_arrays_of_a_sampler_with_a_chain_axis():
    draws = np.arange(24.0).reshape(2, 3, 4)
    draws.flags.writeable = False
    population = Population.from_stacked({"w": draws}, by_chain=True)
    assert population.chain.tolist() == [0, 0, 0, 1, 1, 1]
    assert population.spec["w"] == TensorSpec((4,), torch.float64)
    with pytest.raises(SpecError, match="same chains"):
        Population.from_stacked({"w": np.zeros((2, 3)), "v": np.zeros((3, 2))}, by_chain=True)


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(2), "b": torch.zeros(3)}, {"a": torch.tensor(1.0)}])
def test_tensors_that_do_not_stack(tensors):
    with pytest.raises(SpecError, match="same members"):
        Population.from_stacked(tensors)


def test_values_per_member_must_count_the_members():
    with pytest.raises(InputError, match=r"chain of shape \(10,\).*one per member"):
        networks(chain=[1, 2])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_map_block_by_block(tmp_path, size):
    population = networks(chain=range(10), log_density=torch.arange(10.0), provenance={"from": "here"})

    def double(block, start):
        assert block["n"][0] == start
        return {"n": block["n"] * 2, "w": block["w"].double() * 2}

    for result in (population.map(double, size=size), population.map(double, size=size, path=tmp_path / "mapped")):
        assert result.tensor("n").tolist() == list(range(0, 20, 2))
        assert torch.equal(result.tensor("w"), population.tensor("w").double() * 2)
        assert result.chain.tolist() == list(range(10))
        assert result.log_density.tolist() == list(range(10))
        assert result.provenance == {"from": "here"}
        assert result.names == population.names
    assert torch.equal(population.tensor("n"), torch.arange(10))


@pytest.mark.parametrize("result", [{"w": torch.zeros(10, 3, 2)}, {"w": torch.zeros(9), "n": torch.zeros(9)}])
def test_map_refuses_other_names_and_counts(result):
    with pytest.raises(SpecError, match="correct the function"):
        networks().map(lambda block, start: result)


def test_blocks_cover_all_members_in_order():
    starts = [(start, block["n"].tolist()) for start, block in networks().blocks(4)]
    assert starts == [(0, [0, 1, 2, 3]), (4, [4, 5, 6, 7]), (8, [8, 9])]
    with pytest.raises(InputError, match="at least 1 member"):
        next(networks().blocks(0))


def test_concatenate_fills_what_is_unknown():
    both = Population.concatenate([networks(2, chain=[4, 5]), networks(1, log_density=[0.5])])
    assert both.chain.tolist() == [4, 5, -1]
    assert both.log_density.isnan().tolist() == [True, True, False]
    assert both.tensor("n").tolist() == [0, 1, 0]
    with pytest.raises(SpecError, match="population 1, compared with the first, is missing n"):
        Population.concatenate([networks(), Population.from_stacked({"w": torch.zeros(1, 3, 2)})])
    with pytest.raises(InputError, match="at least one population"):
        Population.concatenate([])


def test_an_empty_selection_is_a_population(tmp_path):
    none = networks()[[]]
    assert len(none) == 0
    assert none.stacked()["w"].shape == (0, 3, 2)
    assert len(none.map(lambda block, start: block)) == 0
    assert len(Population.open(none.save(tmp_path / "none"))) == 0
    none.save(tmp_path / "none.safetensors")
    assert len(Population.open(tmp_path / "none.safetensors")) == 0


def test_repr_tells_a_person(tmp_path):
    networks().save(tmp_path / "p")
    assert networks(1).title == "Population of 1 network: 2 tensors, 7 weights each, float32/int64, 0.0 MB in memory"
    assert Population.open(tmp_path / "p").title.endswith(f"0.0 MB at {tmp_path / 'p'}")


def test_unknown_tensor_is_named():
    with pytest.raises(InputError, match=r"found 'q': see population.names"):
        networks().tensor("q")


def test_to_changes_only_floating_point():
    moved = networks().to(dtype=torch.float16)
    assert {n: t.dtype for n, t in moved.spec.items()} == {"w": torch.float16, "n": torch.int64}


def test_not_finite_names_member_and_tensor(tmp_path):
    tensors = {"w": torch.zeros(5, 2), "b": torch.zeros(5)}
    tensors["b"][3] = float("nan")
    population = Population.from_stacked(tensors)
    assert population.check() == []
    assert "member 3 is not finite: tensor b" in population.check(finite=True)[0]
    population.save(tmp_path / "p")
    Population.open(tmp_path / "p")
    with pytest.raises(SpecError, match=r"member 3 of .* tensor b .* leave this network out"):
        Population.open(tmp_path / "p", finite=True)


def test_reserved_names_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"reserved.*rename"):
        Population.from_stacked({"onebasin.chain": torch.zeros(2)}).save(tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_save_does_not_write_over_anything(tmp_path):
    networks().save(tmp_path / "p")
    with pytest.raises(InputError, match=r"not empty.*Population\.writer"):
        networks(3).save(tmp_path / "p")
    assert len(Population.open(tmp_path / "p")) == 10
    (tmp_path / "empty").mkdir()
    networks().save(tmp_path / "empty")
    assert len(Population.open(tmp_path / "empty")) == 10


def test_an_index_is_a_network_and_a_slice_a_population():
    population = networks(chain=[0] * 5 + [1] * 5)
    assert same(population[3], population.member(3))
    assert same(population[-1], population.member(9))
    assert same(population[np.int64(2)], population.member(2))
    assert isinstance(population[2:5], Population)
    assert len(population[2:5]) == 3
    assert population[::-1].chain.tolist() == [1] * 5 + [0] * 5
    assert len(population[7:3]) == 0
    with pytest.raises(InputError, match="10 members, found index 10"):
        population[10]


def test_a_matrix_of_all_members():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    population = Population.from_models([model, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))])
    matrix = population.to_flat()
    assert torch.equal(matrix, torch.stack([flatten(state) for state in population]))
    assert same(Population.from_flat(matrix, model).stacked(), population.stacked())
    assert population[:0].to_flat().shape == (0, matrix.shape[1])


def test_facts_about_where_members_are(tmp_path):
    population = networks()
    population.save(tmp_path / "p")
    stored = Population.open(tmp_path / "p")
    assert population.in_memory and not stored.in_memory
    assert population.device == stored.device == torch.device("cpu")
    mixed = Population.concatenate([population, stored])
    assert not mixed.in_memory
    assert mixed.overlaps(stored) and not population.overlaps(stored)
    assert mixed.select("w", "n").names == ("w", "n")
    assert mixed.select("n").part(8, 12).tensor("n").tolist() == [8, 9, 0, 1]
    constant = Population.from_stacked({"a": torch.zeros(3, 2), "b": torch.arange(3.0)})
    assert constant.constant_tensors(["a", "b"]) == {"a"}
