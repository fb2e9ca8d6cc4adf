"""`approximate`: from a model and data to a Posterior, for methods that fit a density."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Never

from torch import Tensor, nn

from onebasin.errors import InputError
from onebasin.functional import Data, OutputPart
from onebasin.inference.diagnostics import summary
from onebasin.inference.driver import ProgressSum, Runner
from onebasin.inference.job import check_misplaced, job_of
from onebasin.inference.journal import Memory, stack_info
from onebasin.inference.kernel import Method
from onebasin.inference.likelihood import LogLikelihood, Noise
from onebasin.inference.seeds import Streams
from onebasin.inference.start import Start
from onebasin.inference.target import PIECE, LogDensity, Scale
from onebasin.parallel import Progress, progress_of
from onebasin.posterior import Gaussian, Posterior
from onebasin.state import State


def approximate(
    model: nn.Module,
    data: Data = None,
    method: str | Method = "vi",
    *,
    output: OutputPart = None,
    chains: int = 1,
    prior: Scale = 1.0,
    likelihood: str | LogLikelihood | None = None,
    noise: Noise = None,
    ignore_index: int | None = None,
    log_density: LogDensity | None = None,
    start: Start = "fresh",
    seed: int = 0,
    compile: bool | None = None,
    piece: int = PIECE,
    chains_per_batch: int | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    progress: Progress | bool | None = None,
    **misplaced: Never,
) -> Posterior:
    """Fit a Gaussian to the posterior around each of several networks, and return their mixture.

    The same settings in `sample` draw from the same Gaussians; keywords that are not listed here are as there.

    >>> import torch
    >>> from onebasin import Laplace
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> posterior = approximate(nn.Linear(1, 1), (x, 2 * x), Laplace(epochs=1), noise=0.1)
    >>> posterior.std["weight"].shape
    torch.Size([1, 1])

    Args:
        model: as in `sample`.
        data: as in `sample`.
        method: VI, SWAG or Laplace with their options, or "vi", "swag" or "laplace" for the defaults.
        output: as in `sample`.
        chains: independent fits, all of the same weight.
        prior: as in `sample`, like all others that follow.
        likelihood: as there.
        noise: as there.
        ignore_index: as there.
        log_density: as there.
        start: as there.
        seed: as there.
        compile: as there.
        piece: as there.
        chains_per_batch: as there.
        chunk: as there.
        threads: as there.
        progress: as there.
        **misplaced: none; options of the method belong to the method.

    Returns:
        The mixture; `provenance` holds the settings and, under "diagnostics", how the trainings ended, as in `sample`.
    """
    known = set(inspect.signature(approximate).parameters) - {"misplaced"}
    check_misplaced("approximate", misplaced, known, method)
    density = {
        "prior": prior, "likelihood": likelihood, "noise": noise, "ignore_index": ignore_index,
        "log_density": log_density, "piece": piece,
    }  # fmt: skip
    job = job_of(
        model, data, method, output=output, density=density, chains=chains, seed=seed, start=start, compile=compile,
        chains_per_batch=chains_per_batch, threads=threads,
    )  # fmt: skip
    batches, runner = job.batches(chunk), Runner(job)
    listener = progress_of(progress)
    report = None if listener is None else ProgressSum(listener, len(batches))
    runner.plan = replace(runner.plan, draws=0)
    kernel = runner.plan.stages[-1].kernel
    components = getattr(kernel, "components", None)
    if components is None:
        raise InputError(
            f"expected a method that fits a density (VI, SWAG, Laplace), found {job.method.name!r}, which draws "
            "networks: use sample, and fit a posterior to its draws"
        )
    gaussians: list[Gaussian] = []
    buffers: list[State] = []
    trained: list[dict[str, Tensor]] = []
    for batch in batches:
        place = runner(batch, Memory(), report)
        trained.append({name: value[batch.rows, None] for name, value in place.ended.items()})
        centres = getattr(kernel, "centres", None)  # where statistics at the mean are other than those of a draw
        streams = Streams(seed, batch.window, "rest")
        networks = centres(place.state) if centres else kernel.draw(place.state, streams)
        gaussians += components(place.state)[batch.rows]
        rows = range(batch.rows.start, batch.rows.stop)
        buffers += [{name: value[row] for name, value in networks.buffers.items()} for row in rows]
    return Posterior.equal(
        gaussians,
        runner.target.layout,
        buffers,
        provenance={**job.definition(), "diagnostics": summary(stack_info(trained))},
    )
