"""Embedded data and their division."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebasin.data.dataset import split
from onebasin.data.load import digits
from onebasin.errors import InputError


def test_digits_are_the_known_ones() -> None:
    inputs, targets = digits()
    assert (inputs.shape, inputs.dtype, targets.shape, targets.dtype) == (
        (1797, 64),
        torch.float32,
        (1797,),
        torch.int64,
    )
    assert (float(inputs.min()), float(inputs.max())) == (0.0, 1.0)
    # Counts per class as the UCI page lists them for this test set of 1,797.
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(inputs * 16, (inputs * 16).round())


def test_a_linear_model_reads_the_digits() -> None:
    train, test = split(*digits(), seed=1)
    solved = torch.linalg.lstsq(train[0].double(), torch.eye(10, dtype=torch.float64)[train[1]], driver="gelsd")
    accuracy = ((test[0].double() @ solved.solution).argmax(1) == test[1]).double().mean()
    assert accuracy > 0.9  # inputs and targets belong together on both sides of the division


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=60),
    st.floats(0.05, 0.95),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_a_division_keeps_every_example_and_every_share(
    classes: list[int], share: float, seed: int, numbers: bool
) -> None:
    targets = torch.tensor(classes).double() if numbers else torch.tensor(classes)
    examples = torch.arange(len(classes))
    count = round(share * len(classes))
    if not 0 < count < len(classes):
        with pytest.raises(InputError, match="leaves examples on both sides"):
            split(examples, targets, test=share, seed=seed)
        return
    train, test = split(examples, targets, test=share, seed=seed)
    assert len(test[0]) == count
    assert sorted([*train[0].tolist(), *test[0].tolist()]) == examples.tolist()
    for inputs, goals in (train, test):
        assert torch.equal(goals, targets[inputs])
        assert torch.equal(inputs, inputs.sort().values)
    if not numbers:
        wanted = targets.bincount() * count / len(classes)
        assert ((test[1].bincount(minlength=len(wanted)) - wanted).abs() < 1).all()
    again = split(examples, targets, test=share, seed=seed)
    assert torch.equal(again[1][0], test[0])


@pytest.mark.parametrize("targets", [torch.zeros(400, dtype=torch.int64), torch.zeros(400)])
def test_every_example_is_as_likely_to_be_a_test_example(targets: torch.Tensor) -> None:
    seeds, share = 500, 0.25
    taken = torch.zeros(400)
    for seed in range(seeds):
        taken[split(torch.arange(400), targets, test=share, seed=seed)[1][0]] += 1
    # Their sum is fixed, so the squared z add up to 400 / 399 times a chi-square with 399 degrees of freedom.
    z = (taken - seeds * share) / (seeds * share * (1 - share)) ** 0.5
    chi = float(z.square().sum()) * 399 / 400
    assert abs(chi - 399) < 4 * (2 * 399) ** 0.5
    assert not torch.equal(*[split(torch.arange(400), targets, seed=seed)[1][0] for seed in (0, 1)])


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="3 inputs, 4 targets"):
        split(torch.zeros(3), torch.zeros(4))
