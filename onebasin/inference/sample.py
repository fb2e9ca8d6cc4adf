"""`sample`: from a model and data to a Population of draws from the posterior."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onebasin.errors import InputError
from onebasin.inference.diagnostics import summary
from onebasin.inference.driver import Execution, Job, Show, job_of, kept_bytes, teller, unit_bytes
from onebasin.inference.journal import (
    ChainBatch,
    Disk,
    Memory,
    agreed,
    alone,
    check_run,
    join_info,
    read_definition,
    read_info,
    stack_info,
)
from onebasin.inference.target import Data
from onebasin.inference.workers import run_apart, run_here
from onebasin.parallel import Executor, SerialExecutor, executor_for
from onebasin.population import Population
from onebasin.state import as_spec


def sample(
    model: nn.Module,
    data: Data = None,
    method: str = "hmc",
    *,
    modes: int = 1,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    resume: bool = False,
    **options: Any,
) -> Population:
    """Draw networks from the posterior over a model's weights.

    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> population = sample(nn.Linear(1, 1), (x, 2 * x), "hmc", noise=0.1, draws=5, warmup=20, epochs=1, leapfrog=5)
    >>> len(population), population.provenance["method"]
    (5, 'hmc')

    Args:
        model: any module that works under `torch.func.functional_call` and `vmap`. Sampled are its parameters that
            require a gradient; the module itself is left as it is.
        data: (inputs, targets), inputs being a tensor, a tuple of positional or a dict of keyword inputs; None for the
            prior alone.
        method: "hmc", "sghmc" (also SGLD, cyclical), "mclmc", "ensemble", "vi", "swag", "laplace" or "dropout".
        modes: independent runs that are pooled; the chain of each draw is in `population.chain`.
        seed: of everything random. The same seed gives the same draws, whatever `workers` and `chunk` are.
        path: stream draws into this folder; every finished shard survives whatever happens to the process.
        resume: go on with the run under `path`, bit for bit as if it had not been interrupted.
        **options: of the posterior (`prior`, `likelihood`, `noise`, `log_density`, ...: see `Density`), of the
            execution (`start`, `workers`, `executor`, `memory`, `chunk`, `threads`, `progress`: see `Execution`), and
            of the method (see `Options` in the method's file, or `onebasin sample --help`).

    Returns:
        The draws; `provenance` holds the settings and, under "diagnostics", how the sampler fared.
    """
    show: Show | None = options.pop("progress", None)
    job, execution = job_of(model, data, method, options, modes=modes, seed=seed)
    if path is not None:
        return _on_disk(job, execution, Path(path), resume, show)
    if resume:
        raise InputError("expected the folder of the run to be resumed, found no path: give path=")
    if _elsewhere(execution):
        with tempfile.TemporaryDirectory(prefix="onebasin-") as folder:
            found = _on_disk(job, execution, Path(folder) / "run", False, show, kept=True)
            return found.to("cpu")  # out of the folder, which goes
    return _in_memory(job, execution, show)


def _elsewhere(execution: Execution) -> bool:
    """Whether other processes may be at work, which need a folder to write to."""
    executor = execution.get("executor")
    return execution.get("workers", 1) > 1 if executor is None else not isinstance(executor, SerialExecutor)


def _in_memory(job: Job, execution: Execution, show: Show | None) -> Population:
    memory, units = Memory(), job.units(execution.get("chunk"))
    with _cluster(job, execution, units, kept=True):
        run_here(job, units, memory, teller(units, show))
    shards = [shard for unit in units for shard in memory.shards[unit.name]]
    info = stack_info([join_info([shard.info for shard in memory.shards[unit.name]]) for unit in units])
    population = Population.from_stacked(
        {name: torch.cat([shard.tensors[name] for shard in shards]) for name in shards[0].tensors},
        chain=torch.cat([shard.chain for shard in shards]),
        log_density=torch.cat([shard.log_density for shard in shards]),
        provenance={**job.definition(), "diagnostics": summary(info)},
    )
    return by_chain(population)


def _on_disk(
    job: Job, execution: Execution, path: Path, resume: bool, show: Show | None, *, kept: bool = False
) -> Population:
    """Run into a folder; `kept` says that the draws will be held in memory too."""
    stored = read_definition(path)
    if stored is not None and resume:
        job = replace(job, **{name: stored[name] for name in job.open})
    check_run(path, stored, resume)
    with alone(path):
        definition = agreed(path, {**job.definition(), "chunk": execution.get("chunk")}, stored)
        units = job.units(definition["chunk"])
        disk = Disk(path, as_spec(job.model), definition)
        with _cluster(job, execution, units, kept=kept) as executor:
            if isinstance(executor, SerialExecutor):
                run_here(job, units, disk, teller(units, show))
            else:
                run_apart(job, units, disk, teller(units, show), executor)
    population = by_chain(Population.open(path))
    diagnostics: Mapping[str, Any] = summary(read_info(path))
    return replace(population, provenance={**population.provenance, "diagnostics": diagnostics})


def _cluster(
    job: Job, execution: Execution, units: list[ChainBatch], *, kept: bool
) -> AbstractContextManager[Executor]:
    """Who runs the units: of the workers that were asked for, no more than find work."""
    places, workers = dict(execution), execution.get("workers")
    if workers is not None:
        places["workers"] = min(workers, len(units))
    if execution.get("memory") is None:
        return executor_for(places)
    return executor_for(places, each=unit_bytes(job), here=kept_bytes(job) if kept else 0)


def by_chain(population: Population) -> Population:
    """The members ordered by chain, and in the order of drawing within each; shards are in the order of writing."""
    if population.chain is None:
        return population
    return population[torch.argsort(population.chain, stable=True)]
