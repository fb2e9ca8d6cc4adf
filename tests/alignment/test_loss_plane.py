"""The loss on a plane: exact at the three networks, exactly quadratic where the loss is, exact after planted moves."""

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.errors import InputError, SpecError

INPUTS = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def states(model: nn.Module, number: int = 3) -> list[ob.State]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
            for name, value in model.state_dict().items()
        }
        for _ in range(number)
    ]


def test_a_quadratic_loss_is_a_quadratic_of_the_plane() -> None:
    model = nn.Linear(3, 2).double()
    targets = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    networks = states(model)
    told: list[int] = []
    plane = ob.loss_plane(
        model, *networks, (INPUTS, targets), loss="mse", points=7, progress=lambda done, all_, what: told.append(done)
    )
    assert told == list(range(1, 7 * 7 + 4))
    corners = [ob.losses(model, state, INPUTS, targets, loss="mse").loss for state in networks]
    assert plane.corner_loss.tolist() == corners
    rows, columns = torch.meshgrid(plane.y, plane.x, indexing="ij")

    def terms(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.ones_like(x), x, y, x * x, x * y, y * y], -1)

    design, values = terms(columns, rows).reshape(-1, 6), plane.loss.reshape(-1, 1)
    fitted = torch.linalg.lstsq(design, values).solution
    assert torch.allclose(design @ fitted, values, atol=1e-10)
    assert torch.allclose(terms(*plane.corners.T) @ fitted[:, 0], plane.corner_loss, atol=1e-10)


def test_the_axes_measure_distances_in_weight_space() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    networks = states(model)
    flat = torch.stack([torch.cat([value.flatten() for value in state.values()]) for state in networks])
    plane = ob.loss_plane(model, *networks, (INPUTS, torch.zeros(30).long()), points=2, margin=0.0)
    assert torch.allclose(torch.cdist(plane.corners, plane.corners), torch.cdist(flat, flat))
    assert plane.corners[0].tolist() == [0, 0] and float(plane.corners[1, 1]) == 0
    assert float(plane.x[0]) == float(plane.corners[:, 0].min()) and float(plane.y[-1]) == float(
        plane.corners[:, 1].max()
    )
    # The corner (0, 0) of the grid with margin 0, where the x of no network is below zero, is the first network.
    if float(plane.x[0]) == 0:
        assert float(plane.loss[0, 0]) == pytest.approx(float(plane.corner_loss[0]))


def test_planted_moves_are_taken_back() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    symmetry = ob.discover(model, INPUTS[:2])
    a, step, turn = states(model)
    near = [{name: a[name] + 0.02 * other[name] for name in a} for other in (step, turn)]
    moved = [symmetry.apply(symmetry.random(seed), state) for seed, state in enumerate(near)]
    data = (INPUTS, (INPUTS[:, 0] > 0).long())
    plane = ob.loss_plane(model, a, *moved, data, symmetry=symmetry, points=5)
    expected = ob.loss_plane(model, a, *near, data, points=5)
    assert plane.aligned is not None
    assert torch.allclose(plane.aligned.loss, expected.loss) and torch.allclose(plane.aligned.corners, expected.corners)
    assert float(plane.loss.max()) > float(expected.loss.max())


def test_points_without_a_finite_loss_are_gaps_and_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    networks = states(model)
    for state, variance in zip(networks, (0.1, 5.0, 5.0), strict=True):
        state["1.running_var"] = torch.full((2,), variance, dtype=torch.float64)  # below zero beyond the first network
        state["1.num_batches_tracked"] = torch.tensor(1)
    plane = ob.loss_plane(model, *networks, (INPUTS, torch.zeros(30).long()), points=5)
    gaps = int((~plane.loss.isfinite()).sum())
    assert 0 < gaps < 25 and f"At {gaps} points of the grid the loss is not finite" in str(plane)
    assert plane.plot().has_data()


def test_what_spans_no_plane_is_refused() -> None:
    model = nn.Linear(3, 2).double()
    a, b, _ = states(model)
    data = (INPUTS, torch.zeros(30).long())
    with pytest.raises(InputError, match="span a plane"):
        ob.loss_plane(model, a, b, ob.interpolate(a, b, 0.3), data)
    with pytest.raises(InputError, match="span a plane"):
        ob.loss_plane(model, a, a, b, data)
    with pytest.raises(InputError, match="points >= 2"):
        ob.loss_plane(model, a, b, b, data, points=1)
    with pytest.raises(SpecError):
        ob.loss_plane(model, a, b, nn.Linear(4, 2).double().state_dict(), data)
