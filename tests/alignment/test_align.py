"""Aligning populations: one frame, one function each, nothing lost."""

import itertools
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.alignment import consensus as consensus_room
from onebasin.alignment.align import Alignment, align
from onebasin.alignment.balance import balance
from onebasin.alignment.match import match
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.parallel import open_executor
from onebasin.population import population as parting
from onebasin.symmetry.space import Element
from tests.alignment.test_layout import random_state
from tests.models import BATTERY
from tests.symmetry.test_discover import prepared

WIDTHS = (6, 9, 8, 3)


def mlp(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [nn.Linear(n, m) for n, m in itertools.pairwise(WIDTHS)]
    return nn.Sequential(layers[0], activation(), layers[1], activation(), layers[2])


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return mlp().double()


@pytest.fixture(scope="module")
def symmetry(model: nn.Sequential) -> ob.Symmetry:
    return ob.discover(model, torch.zeros(2, 6, dtype=torch.float64))


def networks(symmetry: ob.Symmetry, members: int, seed: int = 0) -> ob.Population:
    return ob.Population.from_states([random_state(symmetry, seed + n) for n in range(members)])


def family(symmetry: ob.Symmetry, members: int, noise: float) -> tuple[ob.Population, Element]:
    """Noisy copies of one network, each moved by a random element of the whole group."""
    base = random_state(symmetry, 0)
    generator = torch.Generator().manual_seed(7)
    planted = symmetry.random(generator, members=members)
    stacked = {
        name: value + noise * torch.randn(members, *value.shape, generator=generator, dtype=torch.float64)
        for name, value in base.items()
    }
    return symmetry.apply(planted, ob.Population.from_stacked(stacked)), planted


def pairwise(population: ob.Population) -> float:
    """Mean <w_i, w_j> over pairs, by brute force."""
    flat = torch.cat([population.tensor(name).flatten(1) for name in population.names], 1)
    gram = flat @ flat.T
    members = len(population)
    return float((gram.sum() - gram.trace()) / (members * (members - 1)))


def same_functions(model: nn.Module, before: ob.Population, after: ob.Population) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for n in range(len(before)):
        one, other = (torch.func.functional_call(model, pop.member(n), (x,)) for pop in (before, after))
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reference", ["consensus", "first", "medoid", "state"])
@pytest.mark.parametrize("scale", ["balanced", "keep"])
def test_functions_are_kept_and_numbers_are_true(
    model: nn.Module, symmetry: ob.Symmetry, reference: str, scale: str
) -> None:
    population = networks(symmetry, 6)
    copy = {name: population.tensor(name).clone() for name in population.names}
    target = random_state(symmetry, 99) if reference == "state" else reference
    found = align(population, symmetry, reference=target, scale=scale)
    same_functions(model, population, found.population)
    moved = symmetry.apply(found.elements, population)
    for name in population.names:
        assert torch.equal(population.tensor(name), copy[name])
        torch.testing.assert_close(moved.tensor(name), found.population.tensor(name))
    assert found.objective == pytest.approx(pairwise(found.population))
    start = population if scale == "keep" else balance(population, symmetry).population
    assert found.before == pytest.approx(pairwise(start), rel=1e-6)
    apart = [
        sum(float((found.population.member(n)[k] - v).square().sum()) for k, v in found.reference.items())
        for n in range(6)
    ]
    torch.testing.assert_close(found.residual, torch.tensor(apart, dtype=torch.float64))
    assert found.transpositions.total.shape == (6,)
    if reference == "consensus":
        mean = found.population.tensor("0.weight").mean(0)
        torch.testing.assert_close(found.reference["0.weight"], mean)


@pytest.mark.parametrize(
    "name", ["mlp_relu", "mlp_tanh", "resnet_bn", "lstm", "encoder_prenorm_relu", "grouped", "conv_flatten"]
)
def test_a_scattered_family_comes_together(name: str) -> None:
    """Copies of one network, moved by random elements of the whole group: all members become one network again."""
    case = next(case for case in BATTERY if case.name == name)
    symmetry = prepared(case)[2]
    population, _ = family(symmetry, 5, noise=0.0)
    found = align(population, symmetry)
    for tensor in population.names:
        stacked = found.population.tensor(tensor)
        torch.testing.assert_close(stacked, stacked[:1].expand_as(stacked), rtol=1e-6, atol=1e-6)


def test_the_scale_of_the_reference(symmetry: ob.Symmetry) -> None:
    """With a network as reference, members come back onto it with its own scales."""
    population, _ = family(symmetry, 4, noise=0.0)
    base = random_state(symmetry, 0)
    for target in (base, "first"):
        found = align(population, symmetry, reference=target, scale="reference")
        goal = base if target is base else population.member(0)
        for name in population.names:
            stacked = found.population.tensor(name)
            torch.testing.assert_close(stacked, goal[name].expand_as(stacked), rtol=1e-6, atol=1e-6)


def test_consensus_is_monotone_and_beats_the_first() -> None:
    """Every sweep gains, chunk or no chunk; the end beats matching everybody to the first member."""
    symmetry = ob.discover(mlp(nn.Tanh), torch.zeros(2, 6))
    for seed in range(2):
        population = networks(symmetry, 40, seed=1000 * seed)
        found = align(population, symmetry, tolerance=0.0)
        assert all(b >= a - 1e-9 for a, b in itertools.pairwise(found.history))
        assert found.objective > align(population, symmetry, reference="first").objective


def best_of_three(symmetry: ob.Symmetry, population: ob.Population) -> float:
    """The best mean overlap of three members over all permutations of one hidden layer."""

    def moved(member: int, order: tuple[int, ...]) -> Tensor:
        state = symmetry.apply(Element({"0": torch.tensor(order)}, {}), population.member(member))
        return torch.cat([state[name].flatten() for name in population.names])

    orders = list(itertools.permutations(range(4)))
    first, second, third = ([moved(member, order) for order in orders] for member in range(3))
    return max(float(first[0] @ b + first[0] @ c + b @ c) / 3 for b, c in itertools.product(second, third))


def test_three_networks_against_brute_force() -> None:
    """All (4!)^2 relative orders of three small networks: the optimum is never exceeded, and mostly reached."""
    symmetry = ob.discover(nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.zeros(1, 3))
    reached = 0
    for seed in range(20):
        population = networks(symmetry, 3, seed=10 * seed)
        best, found = best_of_three(symmetry, population), align(population, symmetry, tolerance=0.0).objective
        assert found <= best + 1e-9
        reached += found >= best - 1e-9
    assert reached >= 12


def test_elements_are_consistent_around_cycles(symmetry: ob.Symmetry) -> None:
    """i -> j -> k is i -> k: all elements lead into one frame."""
    population = networks(symmetry, 4)
    elements = align(population, symmetry).elements
    step = [
        [symmetry.compose(symmetry.invert(elements.member(j)), elements.member(i)) for j in range(4)] for i in range(4)
    ]
    for i, j, k in itertools.permutations(range(4), 3):
        through = symmetry.compose(step[j][k], step[i][j])
        assert all(torch.equal(through.orders[s], step[i][k].orders[s]) for s in through.orders)


def test_companions_go_along(symmetry: ob.Symmetry) -> None:
    population = networks(symmetry, 3)
    found = align(population, symmetry)
    std = ob.Population.from_stacked({name: population.tensor(name).abs() for name in population.names})
    moved = found.carry(std, "std")
    for name in population.names:
        torch.testing.assert_close(moved.tensor(name), found.population.tensor(name).abs())


def test_one_member_is_its_own_consensus(model: nn.Module, symmetry: ob.Symmetry) -> None:
    population = networks(symmetry, 1)
    for reference in ("consensus", "first", "medoid"):
        found = align(population, symmetry, reference=reference, scale="keep")
        assert float(found.residual.max()) == 0 and int(found.transpositions.total) == 0
        same_functions(model, population, found.population)


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("reference", ["consensus", "first"])
def test_an_interrupted_run_goes_on(
    symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str
) -> None:
    """Killed at any chunk, the second run ends where an uninterrupted one does, bit for bit, and cleans up."""
    networks(symmetry, 20).save(tmp_path / "raw")
    population = ob.Population.open(tmp_path / "raw")
    whole = align(population, symmetry, reference=reference, path=tmp_path / "whole")
    monkeypatch.setattr(import_module("onebasin.alignment.align"), "_SECONDS", -1.0)

    def dies_after(chunks: int) -> Callable[[int, int, str], None]:
        left = itertools.count(1)

        def progress(done: int, members: int, text: str) -> None:
            if next(left) == chunks:
                raise StoppedError

        return progress

    for chunks in (1, 2):
        target = tmp_path / f"resumed-{chunks}"
        with pytest.raises(StoppedError):
            align(population, symmetry, reference=reference, path=target, progress=dies_after(chunks))
        assert not target.exists() and target.with_name(target.name + ".journal").exists()
        with pytest.raises(InputError, match="interrupted alignment"):
            align(population, symmetry, reference=reference, path=target, scale="keep")
        found = align(population, symmetry, reference=reference, path=target)
        assert not list(tmp_path.glob("*.journal"))
        for name in population.names:
            assert torch.equal(found.population.tensor(name), whole.population.tensor(name))
    again = align(population, symmetry, reference=reference, path=tmp_path / "whole")  # a finished one is returned
    assert again.history == whole.history and torch.equal(again.residual, whole.residual)
    with pytest.raises(InputError, match="what this alignment has written"):
        align(population, symmetry, reference=reference, path=tmp_path / "whole", scale="keep")


def test_a_damaged_journal_is_named(symmetry: ob.Symmetry, tmp_path: Path) -> None:
    (tmp_path / "out.journal").write_bytes(b"nonsense")
    with pytest.raises(StorageError, match="journal"):
        align(networks(symmetry, 2), symmetry, path=tmp_path / "out")


def test_workers_change_nothing(symmetry: ob.Symmetry) -> None:
    population = networks(symmetry, 33)
    one, two = (align(population, symmetry, workers=workers, sweeps=3) for workers in (1, 2))
    for name in population.names:
        assert torch.equal(one.population.tensor(name), two.population.tensor(name))


def test_a_population_on_disk_is_read_in_blocks(
    symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Larger than memory: no more than one block of members is ever joined, and the result is written."""
    monkeypatch.setattr(parting, "block_members", lambda spec, nbytes=0: 16)  # here they are small
    networks(symmetry, 64).save(tmp_path / "raw")
    population = ob.Population.open(tmp_path / "raw")
    expected = align(population, symmetry, sweeps=2)
    stacked, sizes = ob.Population.stacked, []

    def spy(self: ob.Population) -> dict[str, Tensor]:
        sizes.append(len(self))
        return stacked(self)

    monkeypatch.setattr(ob.Population, "stacked", spy)
    found = align(population, symmetry, sweeps=2, path=tmp_path / "out")
    assert max(sizes) <= 16
    assert found.objective == pytest.approx(expected.objective)
    assert ob.Population.open(tmp_path / "out").check() == []


def test_activations(model: nn.Module, symmetry: ob.Symmetry) -> None:
    """A family scattered by permutations comes together by what its units do."""
    base = random_state(symmetry, 0)
    planted = symmetry.random(3, members=4, freedoms=("permutation",))
    population = symmetry.apply(planted, ob.Population.from_states([base] * 4))
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for reference, kind in (("first", "uncentred"), ("consensus", "centred"), (base, "correlation")):
        found = align(
            population,
            symmetry,
            reference=reference,
            by="activations",
            model=model,
            inputs=inputs,
            kind=kind,
            scale="keep",
        )
        for name in population.names:
            stacked = found.population.tensor(name)
            torch.testing.assert_close(stacked, stacked[:1].expand_as(stacked))


@pytest.mark.parametrize("name", ["mixer", "decoder_gqa"])
def test_units_that_show_only_later_get_a_second_round(name: str) -> None:
    """Activations of a token mixer, and of grouped queries, can be read once the other spaces are in place."""
    case = next(case for case in BATTERY if case.name == name)
    _, inputs, symmetry = prepared(case)
    model = case.build().double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    a = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    b = symmetry.apply(symmetry.random(3, freedoms=("permutation",)), a)
    data = {"model": model, "inputs": inputs}
    for reference in ("first", "consensus"):
        population = ob.Population.from_states([a, b])
        found = align(population, symmetry, reference=reference, by="activations", scale="keep", **data)
        assert not found.missing
        first, second = found.population.member(0), found.population.member(1)
        x = ob.match_activations(model, first, second, symmetry, inputs)
        assert x.after == pytest.approx(x.before, rel=1e-8)


def test_a_journal_of_anything_else_is_refused(
    symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another reference of equal norm, one changed member, other options: each has another key."""
    monkeypatch.setattr(import_module("onebasin.alignment.align"), "_SECONDS", -1.0)
    base, target = random_state(symmetry, 50), tmp_path / "out"
    states = [random_state(symmetry, n) for n in range(20)]

    def stop(done: int, members: int, text: str) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        align(ob.Population.from_states(states), symmetry, reference=base, path=target, progress=stop)
    other = {name: -value for name, value in base.items()}
    changed = [*states[:5], random_state(symmetry, 77), *states[6:]]
    for members, reference in ((states, other), (changed, base), (states, "first")):
        with pytest.raises(InputError, match="other networks or with other settings"):
            align(ob.Population.from_states(members), symmetry, reference=reference, path=target)
    journal = tmp_path / "out.journal"
    raw = bytearray(journal.read_bytes())
    raw[-5] ^= 1
    journal.write_bytes(raw)
    with pytest.raises(StorageError, match="damaged"):
        align(ob.Population.from_states(states), symmetry, reference=base, path=target)


def test_refusals(symmetry: ob.Symmetry, tmp_path: Path) -> None:
    population = networks(symmetry, 3)
    with pytest.raises(TypeError, match="tolerence"):
        align(population, symmetry, tolerence=0.1)
    for wrong in ({"workers": 0}, {"sweeps": 0}, {"tolerance": -1.0}, {"tolerance": float("nan")}):
        with pytest.raises(InputError, match=r"at least 1 (worker|sweep)"):
            align(population, symmetry, **wrong)
    with pytest.raises(InputError, match='belong to by="activations"'):
        align(population, symmetry, kind="centred")
    with pytest.raises(InputError, match="expected a Population, found list"):
        align([random_state(symmetry, 0)], symmetry)
    other = prepared(next(case for case in BATTERY if case.name == "lstm"))[2]
    with pytest.raises(SpecError, match="the population has no tensor"):
        align(population, other)
    broken = {name: population.tensor(name).clone() for name in population.names}
    broken["2.weight"][1, 0, 0] = torch.nan
    with pytest.raises(SpecError, match=r"member 1 is not finite: tensor 2\.weight"):
        align(ob.Population.from_stacked(broken), symmetry)
    with pytest.raises(InputError, match="reference must be one of"):
        align(population, symmetry, reference="best")
    with pytest.raises(InputError, match="model= and inputs="):
        align(population, symmetry, by="activations")
    with pytest.raises(InputError, match="consensus has no reference scale"):
        align(population, symmetry, scale="reference")
    with pytest.raises(SpecError, match="the reference has no tensor"):
        align(population, symmetry, reference={})
    with pytest.raises(InputError, match="empty population"):
        align(population[:0], symmetry)


def test_progress_is_told(symmetry: ob.Symmetry) -> None:
    told: list[tuple[int, int, str]] = []
    align(networks(symmetry, 20), symmetry, progress=lambda *news: told.append(news))
    assert told[0][1] == 20 and told[-1][0] == 20 and "sweep 1" in told[0][2] and "overlap" in told[-1][2]


def test_two_members_agree_with_match(symmetry: ob.Symmetry) -> None:
    """For two members the first sweep is one match of their lightest forms."""
    population = networks(symmetry, 2)
    found = align(population, symmetry, reference="first")
    pair = match(*(symmetry.apply(found.elements.member(0), population.member(0)), population.member(1)), symmetry)
    moved = symmetry.apply(pair.element, population.member(1))
    for name in population.names:
        torch.testing.assert_close(moved[name], found.population.member(1)[name], rtol=1e-6, atol=1e-6)


def test_a_chunk_that_loses_is_repeated_one_by_one(symmetry: ob.Symmetry, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks as large as the population, stale references may overshoot: the sum still grows with every sweep."""
    monkeypatch.setattr(consensus_room, "_CHUNKS", 1)
    found = align(networks(symmetry, 12), symmetry, tolerance=0.0)
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(found.history))


def die_before_the_end(population: ob.Population, symmetry: ob.Symmetry, path: Path) -> None:
    """The networks are written, what `finish` should write is not."""

    def die(found: Alignment) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        align(population, symmetry, path=path, finish=die)


def test_a_run_that_dies_behind_its_last_network_is_finished(symmetry: ob.Symmetry, tmp_path: Path) -> None:
    """The same call finishes, and moves nothing again."""
    population, path = networks(symmetry, 5), tmp_path / "out"
    die_before_the_end(population, symmetry, path)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    told: list[Alignment] = []
    found = align(population, symmetry, path=path, finish=told.append)
    assert told == [found] and not (tmp_path / "out.journal").exists()
    assert before == {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    undisturbed = align(population, symmetry, path=tmp_path / "other")
    for name in population.names:
        assert torch.equal(found.population.tensor(name), undisturbed.population.tensor(name))


def test_other_networks_are_not_taken_for_those_of_an_interrupted_run(symmetry: ob.Symmetry, tmp_path: Path) -> None:
    population, path = networks(symmetry, 5), tmp_path / "out"
    die_before_the_end(population, symmetry, path)
    shutil.rmtree(path)
    population.save(path)
    with pytest.raises(InputError, match="expected a new or empty folder"):
        align(population, symmetry, path=path)


@pytest.mark.parametrize(("workers", "finished"), [(1, True), (1, False), (2, True)])
def test_a_lost_shard_of_the_result_is_made_again_by_the_same_call(
    symmetry: ob.Symmetry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, finished: bool
) -> None:
    """Bit for bit, whichever shards are lost; those that are there stay, and others are not taken for them.

    The first call has come to its end, or has left its journal.
    """
    monkeypatch.setattr("onebasin.population.population.block_members", lambda spec: 3)
    population, path = networks(symmetry, 8), tmp_path / "out"
    with open_executor(workers) as executor:
        if finished:
            align(population, symmetry, path=path, executor=executor)
        else:
            die_before_the_end(population, symmetry, path)
        shards = sorted(path.glob("shard-*"))
        assert len(shards) == 3
        content = {file.name: file.read_bytes() for file in shards}
        for lost in ([1], [0, 1, 2]):
            kept = {file.name: file.stat().st_mtime_ns for number, file in enumerate(shards) if number not in lost}
            for number in lost:
                shards[number].unlink()
            align(population, symmetry, path=path, executor=executor)
            assert {file.name: file.read_bytes() for file in sorted(path.glob("shard-*"))} == content
            assert all((path / name).stat().st_mtime_ns == moment for name, moment in kept.items())
            assert not (tmp_path / "out.journal").exists()
        again = align(population, symmetry, path=path, executor=executor)  # nothing is missing: it is returned
        assert len(again.population) == 8
        assert {file.name: file.read_bytes() for file in sorted(path.glob("shard-*"))} == content
        with pytest.raises(InputError, match="what this alignment has written"):
            align(networks(symmetry, 8, seed=5), symmetry, path=path, executor=executor)
        shards[1].unlink()
        with pytest.raises(InputError, match="what this alignment has written"):
            align(networks(symmetry, 8, seed=5), symmetry, path=path, executor=executor)
        assert not shards[1].exists()
