"""Where a review found the comparison of populations, their diversity and their predictions wrong."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, OnebasinError
from onebasin.evaluation.discrepancy import discrepancy
from onebasin.evaluation.distances import pair_distances
from onebasin.evaluation.diversity import diversity
from onebasin.functional.call import global_seed
from onebasin.functional.population_pass import ALIVE, ROOM, portion
from onebasin.metrics.mmd import Pooled, mmd_test
from onebasin.metrics.pairs import pairwise_mutual_information
from onebasin.population.population import Population
from onebasin.posterior.predict import Predictive, predict

QUICK: dict[str, Any] = {"permutations": 99, "n_resamples": 0}
MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))

def example_input():
    return torch.zeros(2, 2)
"""

Run = Callable[..., tuple[int, str, str]]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp(seed: int) -> nn.Module:
    with global_seed(seed):
        return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def population(members: int, first: int = 0) -> Population:
    return Population.from_models([mlp(first + number) for number in range(members)])


def of(rows: Tensor, chain: list[int] | None = None) -> Population:
    return Population.from_stacked({"w": rows}, chain=None if chain is None else torch.tensor(chain))


@pytest.mark.parametrize(("dtype", "gap"), [(torch.bfloat16, 0.03), (torch.float16, 0.004)])
def test_half_precision_keeps_its_differences_in_a_form(dtype: torch.dtype, gap: float) -> None:
    generator, start = seeded(), mlp(0).state_dict()
    shift = {name: gap * value.abs() * torch.randn(value.shape, generator=generator) for name, value in start.items()}

    def around(side: int) -> Population:
        return Population.from_states(
            [
                {
                    name: (value + side * shift[name] + gap / 3 * value * torch.randn((), generator=generator)).to(
                        dtype
                    )
                    for name, value in start.items()
                }
                for _ in range(8)
            ]
        )

    symmetry = ob.discover(mlp(0), torch.zeros(2, 2))
    found = discrepancy(around(0), around(1), symmetry=symmetry, normal_forms="keep/keep", **QUICK)
    still = found.normal_forms["keep/keep"]  # the form that moves nothing
    assert still.across == pytest.approx(found.raw.across, rel=1e-6)
    for name, layer in found.raw.layers.items():
        assert still.layers[name].squared == pytest.approx(layer.squared, abs=1e-6), name


@pytest.mark.parametrize("certainty", [10.0, 12.0, 15.0])
def test_pairs_of_confident_networks(certainty: float) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(200, 10))

        def forward(self, rows: Tensor) -> Tensor:
            return self.w[rows]

    logits = torch.randn(2, 200, 10, generator=seeded())
    logits[:, :, 0] += certainty
    found = diversity(Table(), of(logits), torch.arange(200))
    # Two networks are one pair. 1e-2 is fifty times what the docstring claims for ten classes.
    assert found.in_distribution.pairs.mean == pytest.approx(found.in_distribution.population, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_copies_of_a_network_do_not_move_bandwidths(dtype: torch.dtype) -> None:
    # A chain that rejects a proposal repeats its member; distances of 0 "are passed over by every rule".
    generator = seeded()
    for half in (3, 4, 5, 11, 13, 15):
        for columns in (7, 33, 500, 2500):
            order = torch.randint(2 * half, (2 * half,), generator=generator)
            rows = torch.randn(2 * half, columns, generator=generator, dtype=dtype)[order]
            copies = order[:, None] == order
            real = (rows[:, None].double() - rows).norm(dim=2)[~copies].min()
            measured = pair_distances(of(rows[:half]), of(rows[half:])).pooled("l2").distances
            for distances in (measured, Pooled.of(rows[:half], rows[half:]).distances):
                assert float(distances[copies].max()) == 0, (half, columns)
            report = discrepancy(of(rows[:half]), of(rows[half:]), preset="pooled", permutations=0, n_resamples=0)
            smallest = min(row.bandwidth for row in report.raw.total.kernels if row.kernel == "gaussian")
            assert smallest > float(real) / 2 * 0.999


def test_a_test_of_nothing_but_rounding_rejects_nothing() -> None:
    # All members are equally far apart, so all permutations tie and U is 0.
    rejected = 0
    for seed in range(20):
        rows = torch.eye(30)[torch.randperm(30, generator=seeded(seed))]
        found = mmd_test(rows[:15], rows[15:], kernel="laplace", bandwidth="pooled", generator=seeded(seed))
        rejected += found.p_value <= 0.05
    assert rejected <= 6  # at most 5 % expected: P(more than 6 of 20) < 1e-4


@pytest.mark.parametrize("scale", [1e160, 1e-170])
def test_scale_does_not_decide_a_test(scale: float) -> None:
    x = torch.randn(8, 3, generator=seeded(), dtype=torch.float64)
    try:
        found = mmd_test(scale * x, scale * (x + 5))
    except InputError:
        return
    assert found.p_value == mmd_test(x, x + 5).p_value and math.isfinite(float(found.squared[0]))


def test_distances_that_are_no_numbers_are_refused() -> None:
    block = torch.full((3, 3), math.nan)
    with pytest.raises(InputError):
        mmd_test(Pooled.from_blocks(block, block, block))


def test_tiny_weights_are_weights() -> None:
    x = torch.randn(8, 3, generator=seeded())
    large, tiny = (discrepancy(of(s * x), of(s * (x + 5)), **QUICK).raw.total for s in (1.0, 1e-25))
    assert tiny.squared == pytest.approx(large.squared, abs=1e-4) and tiny.p_value == large.p_value


def test_distances_within_two_far_narrow_populations() -> None:
    generator = seeded()
    rows = [
        0.05 * torch.randn(3000, generator=generator) + 1e-6 * torch.randn(10, 3000, generator=generator)
        for _ in range(2)
    ]
    found = pair_distances(of(rows[0]), of(rows[1])).means
    for number, own in zip(found[:2], rows, strict=True):
        exact = (own[:, None].double() - own).square().sum() / 90
        assert number == pytest.approx(float(exact), rel=0.1)


def test_two_networks_on_a_side_have_no_interval() -> None:
    # Every resample with two different members is the sample itself: coverage of this "95 %" interval is 0.
    gap = discrepancy(of(torch.randn(2, 5, generator=seeded())), of(torch.randn(2, 5, generator=seeded(1)))).raw.total
    assert math.isnan(gap.low) or gap.low < gap.high


def test_few_members_are_said_to_have_rough_intervals() -> None:
    rows = torch.randn(6, 5, generator=seeded())  # each its own run; three runs on a side do get the note
    found = discrepancy(of(rows[:3]), of(rows[3:]), permutations=0, n_resamples=50)
    assert any("rough" in note for note in found.notes)


def test_two_single_runs_are_not_judged_by_each_other() -> None:
    rows = torch.randn(6, 5, generator=seeded())
    found = discrepancy(of(rows[:3], [0, 0, 0]), of(rows[3:], [0, 0, 0]), **QUICK)
    assert math.isnan(found.raw.total.explained)
    assert not any("is judged by the other population" in note for note in found.notes)


def test_one_run_against_one_run_is_no_test() -> None:
    # Two runs can only change places, and the statistic does not notice: p is 1 whatever they are.
    rows = torch.randn(8, 5, generator=seeded())
    found = discrepancy(of(rows[:4], [0] * 4), of(rows[4:] + 100, [0] * 4), **QUICK)
    assert math.isnan(found.raw.total.p_value)


def test_a_scratch_folder_that_is_absent(tmp_path: Path) -> None:
    symmetry = ob.discover(mlp(0), torch.zeros(2, 2))
    with pytest.raises(OnebasinError):
        discrepancy(population(2), population(2, 9), symmetry=symmetry, scratch=tmp_path / "absent", **QUICK)


class Odd(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(2, 3), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.inner(x))


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "one number": lambda x: x.mean(),
    "one row for all examples": lambda x: x.mean(0, keepdim=True),
    "whole numbers": lambda x: x.long(),
}


@pytest.mark.parametrize("case", list(ODD))
def test_outputs_that_are_not_one_row_of_scores_per_example(case: str) -> None:
    model = Odd(ODD[case])
    networks = Population.from_models([Odd(ODD[case]) for _ in range(3)])
    with pytest.raises(InputError):
        predict(model, networks, torch.randn(7, 2, generator=seeded()), batch=3)


def test_functions_of_whole_numbers_are_not_called_weights() -> None:
    model, inputs = Odd(lambda x: x.argmax(1)), torch.randn(7, 2, generator=seeded())
    networks = Population.from_models([Odd(lambda x: x.argmax(1)) for _ in range(4)])
    said = ""
    try:
        discrepancy(networks[:2], networks[2:], model=model, inputs=inputs, **QUICK)
    except OnebasinError as error:
        said = str(error)
    assert "give networks" not in said


def test_a_summary_and_an_average_say_the_same_of_infinity() -> None:
    networks = Population.from_stacked({"weight": torch.tensor([[[1.0], [math.inf]], [[1.0], [math.inf]]])})
    layer, inputs = nn.Linear(1, 2, bias=False), torch.ones(1, 1)
    average = predict(layer, networks, inputs, quantity="values", average=True)
    try:
        found = Predictive.of(layer, networks, inputs, quantity="values")
    except InputError:
        return
    assert torch.equal(found.mean, average)


def test_weights_are_no_activations() -> None:
    layer = nn.Linear(2048, 2048)  # 16 KB of activations for two examples
    assert portion(layer, layer.state_dict(), torch.zeros(1000, 2048)).batch == 1000


def test_a_chosen_chunk_leaves_less_room_for_examples() -> None:
    layer = nn.Conv2d(1, 64, 3, padding=1)
    found = portion(layer, layer.state_dict(), torch.zeros(100, 1, 64, 64), chunk=64)
    each = ALIVE * 64 * 64 * 64 * 4
    assert found.batch == 1 or found.chunk * found.batch * each <= 2 * ROOM


def test_a_number_is_no_probabilities() -> None:
    with pytest.raises(InputError):
        pairwise_mutual_information(torch.tensor(0.5))


@pytest.fixture
def files(tmp_path: Path, restored_imports: None) -> Path:
    (tmp_path / "reviewed_net.py").write_text(MODEL)
    population(3).save(tmp_path / "a")
    population(3, 9).save(tmp_path / "b")
    np.savez(tmp_path / "x.npz", inputs=np.zeros((4, 2), dtype=np.float32), targets=np.zeros(4, dtype=np.int64))
    return tmp_path


def compared(run: Run, files: Path, a: str, b: str, *options: Any) -> tuple[int, str, str]:
    return run("compare", files / a, files / b, "--model", f"{files / 'reviewed_net.py'}:net", *options)


def test_a_path_that_is_absent_is_named(files: Path, run: Run) -> None:
    code, _, error = compared(run, files, "a", "nowhere")
    assert code and "nowhere" in error


@pytest.mark.parametrize(
    "options", [("--test", "absent.npz"), ("--restarts", 5), ("--scale", "keep"), ("--points", 4), ("--limit", 3)]
)
def test_options_of_pairs_are_not_swallowed_by_populations(files: Path, run: Run, options: tuple[Any, ...]) -> None:
    data = () if options[0] == "--limit" else ("--data", files / "x.npz")
    code, out, error = compared(run, files, "a", "b", *data, *options)
    assert code or options[0] in out + error


@pytest.mark.parametrize("options", [("--normal-form", "bogus"), ("--preset", "paper")])
def test_options_of_populations_are_not_swallowed_by_pairs(files: Path, run: Run, options: tuple[str, str]) -> None:
    code, out, error = compared(run, files, "a#0", "b#0", *options)
    assert code or options[0] in out + error
