"""`approximate`: from a model and data to a Posterior, for methods that fit a density."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.inference.diagnostics import summary
from onebasin.inference.driver import Show, job_of, teller
from onebasin.inference.journal import Memory, stack_info
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Data
from onebasin.inference.workers import Runner
from onebasin.posterior import Gaussian, Posterior
from onebasin.state import State


def approximate(
    model: nn.Module, data: Data = None, method: str = "vi", *, modes: int = 1, seed: int = 0, **options: Any
) -> Posterior:
    """Fit a Gaussian to the posterior around each of `modes` networks, and return their mixture.

    The same settings in `sample` draw from the same Gaussians.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> posterior = approximate(nn.Linear(1, 1), (x, 2 * x), "laplace", noise=0.1, epochs=1)
    >>> posterior.std["weight"].shape
    torch.Size([1, 1])

    Args:
        model: as in `sample`.
        data: as in `sample`.
        method: "vi", "swag" or "laplace".
        modes: independent fits, all of the same weight.
        seed: of everything random.
        **options: those of `sample` for this method.

    Returns:
        The mixture; `provenance` holds the settings and, under "diagnostics", how the trainings ended, as in `sample`.
    """
    show: Show | None = options.pop("progress", None)
    job, execution = job_of(model, data, method, options, modes=modes, seed=seed)
    units = job.units(execution.get("chunk"))
    runner, tell = Runner(job), teller(units, show)
    runner.plan = replace(runner.plan, draws=0)
    kernel = runner.plan.stages[-1].kernel
    fitted = getattr(kernel, "components", None)
    if fitted is None:
        raise InputError(
            f"expected a method that fits a density (vi, swag, laplace), found {method!r}, which draws networks: "
            "use sample, and fit a posterior to its draws"
        )
    gaussians: list[Gaussian] = []
    rests: list[State] = []
    trained: list[dict[str, Tensor]] = []
    for unit in units:
        place = runner(unit, Memory(), tell)
        state = place.state
        trained.append({name: value[unit.rows, None] for name, value in place.ended.items()})
        centres = getattr(kernel, "centres", None)  # where statistics at the mean are other than those of a draw
        drawn = centres(state) if centres else kernel.draw(state, Streams(seed, unit.window, "rest"))
        gaussians += fitted(state)[unit.rows]
        rows = range(unit.rows.start, unit.rows.stop)
        rests += [{name: value[row] for name, value in drawn.rest.items()} for row in rows]
    return Posterior.equal(
        gaussians,
        runner.target.layout,
        rests,
        provenance={**job.definition(), "diagnostics": summary(stack_info(trained))},
    )
