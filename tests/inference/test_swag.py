import math
from typing import Any, cast

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from onebasin.errors import InputError
from onebasin.functional.call import batches
from onebasin.inference.averages import with_statistics
from onebasin.inference.kernel import Draws, StepIndex
from onebasin.inference.methods.swag import SWAG, Collected, SWAGKernel
from onebasin.inference.seeds import Streams
from onebasin.inference.start import first_networks
from onebasin.inference.target import Target, target_of
from onebasin.inference.training import Trained

Z = 4.5  # |z| of a normal exceeds this with probability 7e-6


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def target_for(model: nn.Module, examples: int = 24, **options: Any) -> Target:
    dtype = next(model.parameters()).dtype
    data = (numbers(examples, 3).to(dtype), numbers(examples, seed=1).to(dtype))
    return target_of(model, data, noise=0.5, **options)


def kernel_of(target: Target, **options: Any) -> SWAGKernel:
    return cast(SWAGKernel, SWAG(**options).plan(target).stages[-1].kernel)


def start_of(target: Target, model: nn.Module, chains: list[int]) -> Draws:
    return first_networks(model, target.layout, "fresh", chains, 0)


def walked(kernel: SWAG, start: Draws, chains: list[int], steps: int) -> tuple[Collected, list[Tensor]]:
    """The state after some steps, and every network on the way, by plain training."""
    streams, again = Streams(3, chains, 0), Streams(3, chains, 0)
    state = kernel.init(start, streams)
    plainly: Trained = kernel.walk.init(start, again)
    path = []
    for step in range(steps):
        state, _ = kernel.step(state, StepIndex(step, steps), streams)
        plainly, _ = kernel.walk.step(plainly, StepIndex(step, steps), again)
        path.append(plainly.position)
    return state, path


def brute_force(path: list[Tensor], rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of one chain by the formulas of the paper, from all collected networks (n, D)."""
    rows = torch.stack(path)
    mean, square = rows.mean(0), rows.square().mean(0)
    means = rows.cumsum(0) / torch.arange(1, len(rows) + 1).double()[:, None]
    columns = (rows - means)[-rank:].T
    variance = torch.diag(square - mean.square())
    return mean, scale * 0.5 * (variance + columns @ columns.T / (columns.shape[1] - 1))


@pytest.mark.parametrize("walk", ["sgd", "adam"])
@pytest.mark.parametrize(("rank", "every", "steps"), [(5, 1, 12), (20, 2, 12), (3, 4, 27)])
def test_the_gaussian_is_that_of_the_paper(walk: str, rank: int, every: int, steps: int) -> None:
    model = plain()
    target = target_for(model)
    kernel = kernel_of(target, batch=6, rank=rank, every=every, walk=walk, step=0.02, scale=0.7)
    state, path = walked(kernel, start_of(target, model, [0, 1]), [0, 1], steps)
    for chain, gaussian in enumerate(kernel.components(state)):
        mean, covariance = brute_force([place[chain] for place in path[every - 1 :: every]], rank, 0.7)
        torch.testing.assert_close(gaussian.centre, mean)
        made = gaussian.covariance.tensors()
        found = torch.diag(made["scale"] ** 2) + made["factor"] @ made["factor"].T
        torch.testing.assert_close(found, covariance, rtol=1e-8, atol=1e-14)
        assert made["factor"].shape[1] == min(rank, steps // every)


def test_rank_zero_is_the_diagonal_alone_and_counts_fully() -> None:
    model = plain()
    target = target_for(model)
    kernel = kernel_of(target, batch=6, rank=0, every=1)
    state, path = walked(kernel, start_of(target, model, [0]), [0], 9)
    variance = torch.stack(path)[:, 0].var(0, correction=0)
    torch.testing.assert_close(kernel.components(state)[0].covariance.std(), variance.sqrt())


def test_draws_have_the_covariance_of_the_formula() -> None:
    model = nn.Linear(3, 1).double()
    target = target_for(model)
    kernel = kernel_of(target, batch=6, rank=4, every=1, step=0.05)
    state, path = walked(kernel, start_of(target, model, [0]), [0], 20)
    mean, covariance = brute_force([place[0] for place in path], 4, 1.0)
    count = 40_000
    drawn = kernel.components(state)[0].draw_flat(count, torch.Generator().manual_seed(5))
    root = torch.linalg.cholesky(covariance)
    whitened = torch.linalg.solve_triangular(root, (drawn - mean).T, upper=False).T
    assert count * float(whitened.mean(0).square().sum()) < chi2.ppf(1 - 1e-4, 4)
    total = float(whitened.square().sum())
    assert chi2.ppf(1e-4, 4 * count) < total < chi2.ppf(1 - 1e-4, 4 * count)
    second = whitened.T @ whitened / count - torch.eye(4)
    assert bool((second.abs() < Z * (torch.ones(4, 4) + torch.eye(4)).sqrt() / math.sqrt(count)).all())


def test_small_spreads_survive_single_precision() -> None:
    # Weights near 100 with steps of 1e-3: in float32 the mean square minus the squared mean would be noise.
    rows = (100 + 1e-3 * numbers(50, 3)).float()
    target = target_for(nn.Linear(3, 1))
    kernel = kernel_of(target, rank=2)
    size = target.layout.size
    state = kernel.init(Draws(torch.zeros(1, size), {}, torch.zeros(1)), Streams(0, [0], 0))
    for row in rows:
        state = kernel.collected(state._replace(position=torch.cat([row, row[:1]])[None]))
    exact = rows.double().var(0, correction=0)
    found = (state.deviations / state.number[:, None])[0, :3].double()
    # Rounding of weights near 100 is 4e-6, against a spread of 1e-3.
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.two = nn.Linear(4, 5)
        self.other = nn.BatchNorm1d(5, affine=False, momentum=0.3)
        self.three = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.three(self.other(torch.tanh(self.two(torch.relu(self.norm(self.one(x)))))))
        return out


@pytest.mark.parametrize("piece", [24, 8, 5])
def test_refreshed_statistics_are_those_of_torch(piece: int) -> None:
    model = Normed().double()
    target = target_for(model, piece=piece)
    start = start_of(target, model, [0, 1, 2])
    found = with_statistics(target, start.position, start.buffers)
    x = target.leaves[0]
    n = len(x)
    pieces = [x[rows] for rows, _ in batches(x, piece)]
    for chain in range(3):
        own = Normed().double()
        own.load_state_dict({k: v[chain] for k, v in target.layout.networks(start.position, start.buffers).items()})
        hidden = own.one(x).detach()
        update_bn(pieces, own)
        expected = own.state_dict()
        weights = torch.tensor([len(part) for part in pieces]) / n
        means = torch.stack([own.one(part).detach().mean(0) for part in pieces])
        # torch averages the batches equally, whatever their size, and leaves out how far they are apart
        torch.testing.assert_close(expected["norm.running_mean"], means.mean(0))
        torch.testing.assert_close(found["norm.running_mean"][chain], weights.double() @ means)
        torch.testing.assert_close(found["norm.running_var"][chain], hidden.var(0))
        if piece == n:  # one batch: torch normalises by the biased variance, and shows what follows smaller by this
            torch.testing.assert_close(found["norm.running_var"][chain], expected["norm.running_var"])
            for name in ("other.running_mean", "other.running_var"):
                torch.testing.assert_close(found[name][chain], expected[name], rtol=3 / n, atol=3 / n)


def test_frozen_norms_keep_their_statistics() -> None:
    model = Normed().double()
    for value in model.norm.parameters():
        value.requires_grad_(False)
    target = target_for(model)
    start = start_of(target, model, [0, 1])
    found = with_statistics(target, start.position, start.buffers)
    assert torch.equal(found["norm.running_mean"], start.buffers["norm.running_mean"])
    assert not torch.allclose(found["other.running_mean"], start.buffers["other.running_mean"])


def test_draws_have_statistics_of_their_own() -> None:
    model = Normed()
    target = target_for(model)
    kernel = kernel_of(target, batch=8, rank=3, every=1)
    state, _ = walked(kernel, start_of(target, model, [0, 1]), [0, 1], 6)
    drawn = kernel.draw(state, Streams(0, [0, 1], "draw 0"))
    expected = with_statistics(target, drawn.position, state.buffers)
    for name, value in expected.items():
        torch.testing.assert_close(drawn.buffers[name], value)
    assert not torch.allclose(drawn.buffers["norm.running_mean"], state.buffers["norm.running_mean"])
    assert torch.equal(drawn.log_density, -target(drawn.position, drawn.buffers).potential)
    centres = kernel.centres(state)
    assert torch.equal(centres.position, state.mean)
    torch.testing.assert_close(centres.buffers, with_statistics(target, state.mean, state.buffers))


def test_without_batch_norm_nothing_is_refreshed() -> None:
    target = target_for(plain())
    buffers = target.buffers_for(2)
    assert with_statistics(target, torch.zeros(2, target.layout.size).double(), buffers) is buffers


def test_draws_are_those_of_the_components_and_chains_are_apart() -> None:
    model = plain()
    target = target_for(model)
    kernel = kernel_of(target, batch=6, rank=3, every=2)
    start = start_of(target, model, [0, 1])
    state, _ = walked(kernel, start, [0, 1], 8)
    drawn = kernel.draw(state, Streams(0, [0, 1], "draw 0"))
    for chain, stream in enumerate(Streams(0, [0, 1], "draw 0").each("draw")):
        assert torch.equal(drawn.position[chain], kernel.components(state)[chain].draw_flat(1, stream)[0])
    alone, _ = walked(kernel, Draws(start.position[1:], {}, start.log_density[1:]), [1], 8)
    torch.testing.assert_close(alone.columns[0], state.columns[1])
    torch.testing.assert_close(kernel.draw(alone, Streams(0, [1], "draw 0")).position[0], drawn.position[1])


def test_the_plan_trains_and_then_collects_once_per_epoch() -> None:
    plan = SWAG(epochs=3, batch=6, collect=5, draws=7, step=0.5, lr=0.1).plan(target_for(plain()))
    training, collecting = plan.stages
    assert (training.steps, collecting.steps, plan.draws, plan.thin) == (12, 20, 7, (0,))
    kernel = cast(SWAGKernel, collecting.kernel)
    assert (kernel.every, kernel.walk.optimizer.lr, kernel.walk.optimizer.schedule) == (4, 0.5, "constant")


def test_bad_options_are_told_in_a_sentence() -> None:
    target = target_for(plain())
    with pytest.raises(InputError, match="rank 0 or from 2 on"):
        SWAG(rank=1).plan(target)
    with pytest.raises(InputError, match="scale"):
        SWAG(scale=-1.0).plan(target)
    with pytest.raises(InputError, match="collect"):
        SWAG(collect=1).plan(target)
    kernel = kernel_of(target)
    state = kernel.init(start_of(target, plain(), [0]), Streams(0, [0], 0))
    with pytest.raises(InputError, match="at least 2 collected"):
        kernel.components(state)
