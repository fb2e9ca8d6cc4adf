"""`sample`: from a model and data to a Population of draws from the posterior."""

from __future__ import annotations

import inspect
import os
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Never

import torch
from torch import nn

from onebasin.errors import InputError
from onebasin.functional import Data, OutputPart
from onebasin.inference.diagnostics import summary
from onebasin.inference.driver import ProgressSum, Report, Runner, run_in_workers
from onebasin.inference.job import ChainBatch, Job, check_misplaced, job_of
from onebasin.inference.journal import (
    RUN,
    Disk,
    Memory,
    agreed,
    alone,
    join_info,
    read_definition,
    read_info,
    stack_info,
)
from onebasin.inference.kernel import Method, check_counts
from onebasin.inference.likelihood import LogLikelihood, Noise
from onebasin.inference.start import Start
from onebasin.inference.target import PIECE, LogDensity, Scale
from onebasin.parallel import Executor, Progress, SerialExecutor, executor_for, progress_of
from onebasin.population import Population
from onebasin.state import as_spec


def sample(
    model: nn.Module,
    data: Data = None,
    method: str | Method = "hmc",
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
    path: str | os.PathLike[str] | None = None,
    compile: bool | None = None,
    piece: int = PIECE,
    chains_per_batch: int | None = None,
    chunk: int | None = None,
    threads: int | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
    progress: Progress | bool | None = None,
    **misplaced: Never,
) -> Population:
    """Draw networks from the posterior over a model's weights.

    >>> from onebasin import HMC
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = HMC(draws=5, warmup=20, epochs=1, leapfrog=5)
    >>> population = sample(nn.Linear(1, 1), (x, 2 * x), method, noise=0.1)
    >>> len(population), population.provenance["method"]
    (5, 'hmc')

    Args:
        model: any module. Sampled are its parameters that require a gradient; the module itself is left as it is.
            Chains run in one pass where `torch.func.vmap` can, else one after the other, with a SlowWarning.
        data: (inputs, targets), tensors or arrays, inputs a tensor, a tuple of positional or a dict of keyword inputs;
            a Dataset, a DataLoader (read once, its order kept) or rows of a Hugging Face data set, as in `evaluate`;
            None for the prior alone.
        method: HMC, SGHMC (also SGLD, cyclical), MCLMC, Ensemble, VI, SWAG, Laplace, Dropout, BatchEnsemble, LPBNN,
            Masksembles or MIMO with their options, as in `HMC(draws=100)`; or its name in small letters for the
            defaults; or any object that follows the protocol `onebasin.inference.Method`.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        chains: independent chains, trainings or fits that are pooled; that of each draw is in `population.chain`.
        prior: standard deviation of the Gaussian prior; a dict of them by tensor name or pattern; None for a flat one.
        likelihood: "categorical", "bernoulli", "gaussian", "laplace", "student_t", "mixture", a loss that is none
            ("focal", "label_smoothing", "evidential_classes", "evidential_values", "beta_nll"; `onebasin.LIKELIHOODS`
            says which is what, and holds objects with options) or a function (outputs, targets) -> (examples,); None
            for what the targets suggest.
        noise: standard deviation of gaussian targets, or "learned".
        ignore_index: a class number whose targets do not count, such as 255 for pixels without a label. Of values with
            pixels, targets (examples, ..., height, width), those that are NaN do not count.
        log_density: a function of one network's parameters that replaces prior and likelihood; then there are no data.
        start: "fresh" networks, the "model" itself, or a Population whose member c mod n is the start of chain c.
        seed: all random numbers derive from it. The same seed gives the same draws, whatever `workers` and `chunk` are.
        path: stream draws into this folder; every finished shard survives whatever happens to the process. Called again
            with the same path, `sample` goes on with a run that was interrupted, bit for bit as if it had not been,
            returns one that is finished, and makes more draws if the method asks for more.
        compile: compile gradients; None where a C++ compiler is found and the run is long.
        piece: examples in one pass over the whole data.
        chains_per_batch: chains that are computed together, which decides about rounding; None for at most 8.
        chunk: chains that a worker takes at once; draws do not depend on it. None for all that are computed together.
        threads: of torch in each process, which may decide about rounding too; None for 1 with small networks.
        workers: processes, 1 by default; draws do not depend on their number. On a cluster, batches worked on at once.
        executor: "local" to start Ray on this machine, the address of a Ray cluster to join, or an open `Executor`.
            All its machines must see the folder of the run.
        progress: True for a line on stderr with the time left, or a function that is called with (gradients done,
            gradients in all, a sentence).
        **misplaced: none; options of the method belong to the method.

    Returns:
        The draws; `provenance` holds the settings and, under "diagnostics", how the sampler fared.
    """
    check_misplaced("sample", misplaced, set(inspect.signature(sample).parameters) - {"misplaced"}, method)
    density = {
        "prior": prior, "likelihood": likelihood, "noise": noise, "ignore_index": ignore_index,
        "log_density": log_density, "piece": piece,
    }  # fmt: skip
    job = job_of(
        model, data, method, output=output, density=density, chains=chains, seed=seed, start=start, compile=compile,
        chains_per_batch=chains_per_batch, threads=threads,
    )  # fmt: skip
    check_counts(1, workers=workers, chunk=chunk)
    place = _Execution(chunk, workers, executor, progress_of(progress))
    if path is not None:
        return _on_disk(job, place, Path(path))
    if (executor is None and (workers or 1) == 1) or isinstance(executor, SerialExecutor):
        return _in_memory(job, place)
    with tempfile.TemporaryDirectory(prefix="onebasin-") as folder:  # workers need one to write to
        return _on_disk(job, place, Path(folder) / "run").to("cpu")  # out of the folder, which goes


@dataclass(frozen=True, eq=False)
class _Execution:
    """How a run is carried out, which its draws do not depend on."""

    chunk: int | None
    workers: int | None
    executor: str | Executor | None
    progress: Progress | None

    def opened(self, batches: list[ChainBatch]) -> AbstractContextManager[Executor]:
        """The executor, with no more workers than find work."""
        workers = None if self.workers is None else min(self.workers, len(batches))
        return executor_for(workers, self.executor)

    def report(self, batches: list[ChainBatch]) -> Report | None:
        """What adds up the progress of batches; None without `progress`."""
        return None if self.progress is None else ProgressSum(self.progress, len(batches))


def _in_memory(job: Job, execution: _Execution) -> Population:
    memory, batches, runner = Memory(), job.batches(execution.chunk), Runner(job)
    report = execution.report(batches)
    for batch in batches:
        runner(batch, memory, report)
    shards = [shard for batch in batches for shard in memory.shards[batch.name]]
    info = stack_info([join_info([shard.info for shard in memory.shards[batch.name]]) for batch in batches])
    population = Population.from_stacked(
        {name: torch.cat([shard.tensors[name] for shard in shards]) for name in shards[0].tensors},
        chain=torch.cat([shard.chain for shard in shards]),
        log_density=torch.cat([shard.log_density for shard in shards]),
        provenance={**job.definition(), "diagnostics": summary(info)},
    )
    return by_chain(population)


def _on_disk(job: Job, execution: _Execution, path: Path) -> Population:
    stored = read_definition(path)
    if stored is not None:
        job = replace(job, **{name: stored[name] for name in job.open})
    elif path.is_dir() and {entry.name for entry in path.iterdir()} - {RUN}:
        raise InputError(f"expected a new or empty folder, but {path} is not empty: choose another path")
    with alone(path):
        definition = agreed(path, {**job.definition(), "chunk": execution.chunk}, stored, job.defaults())
        batches = job.batches(definition["chunk"])
        disk, report = Disk(path, as_spec(job.model), definition), execution.report(batches)
        with execution.opened(batches) as executor:
            if isinstance(executor, SerialExecutor):
                runner = Runner(job)
                for batch in batches:
                    runner(batch, disk, report)
            else:
                run_in_workers(job, batches, disk, report, executor)
    population = by_chain(Population.open(path))
    return replace(population, provenance={**population.provenance, "diagnostics": summary(read_info(path))})


def by_chain(population: Population) -> Population:
    """The members ordered by chain, and in the order of drawing within each; shards are in the order of writing."""
    if population.chain is None:
        return population
    return population[torch.argsort(population.chain, stable=True)]
