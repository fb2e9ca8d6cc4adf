"""The three posteriors that are compared, and their compact forms: HMC, a deep ensemble, variational inference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onebasin.align import align
from onebasin.inference import approximate
from onebasin.population import Population
from onebasin.posterior import Posterior, fit, load_posterior
from onebasin.studies.compact.setting import Runs, Setting, setting

_START_EPOCHS = 20  # of the networks that chains start from
_TRAINING: dict[str, Any] = {"optimiser": "adam", "rate": 1e-3, "batch": 100}


@dataclass(frozen=True, eq=False)
class Forms:
    """A crowd and the paper's two compact forms of it.

    Attributes:
        samples: the networks as they came.
        aligned: the same, rebased to the first one by activations.
        raw: q_d, mean and standard deviation of every weight of the samples.
        rebased: q_r, the same of the aligned networks.
    """

    samples: Population
    aligned: Population
    raw: Posterior
    rebased: Posterior


def hmc(bench: Runs, run: int) -> Population:
    """Samples of one run of HMC, several chains of them."""
    plan, problem = bench.plan, setting(bench).problem
    options: dict[str, Any] = {
        "modes": plan.chains,
        "draws": plan.draws,
        "warmup": plan.warmup,
        "leapfrog": plan.leapfrog,
        "epochs": _START_EPOCHS,
        "prior": plan.prior,
        "lanes": -(-plan.chains // plan.workers),
        "threads": 1,
        "workers": plan.workers,
    }
    return bench.networks(f"hmc-{run}", problem.model, problem.train, "hmc", options)


def ensemble(bench: Runs, seed: int, units: int | None = None) -> Population:
    """Independently trained networks, maximum a posteriori; of another width than the plan's if `units` are given."""
    plan, here = bench.plan, setting(bench, units)
    options = {**_TRAINING, "modes": plan.members, "epochs": plan.ensemble_epochs, "prior": plan.prior}
    name, problem = f"ensemble-{here.units}-{seed}", here.problem
    return bench.networks(name, problem.model, problem.train, "ensemble", options)


def variational(bench: Runs, seed: int) -> Posterior:
    """The mean-field Gaussian; it is kept beside the networks of the run."""

    def made() -> Posterior:
        plan, problem = bench.plan, setting(bench).problem
        file = bench.folder / "networks" / f"vi-{seed}.safetensors"
        if not file.is_file():
            file.parent.mkdir(exist_ok=True)
            settings: dict[str, Any] = {
                "epochs": plan.vi_epochs,
                "batch": 100,
                "rate": plan.vi_rate,
                "prior": plan.prior,
            }
            drawn = bench.number("vi", seed)
            found = approximate(problem.model, problem.train, "vi", seed=drawn, progress=bench.show, **settings)
            found.save(file)
        return load_posterior(file)

    return bench.once(f"vi-{seed}", made)


def forms(bench: Runs, method: str, run: int, units: int | None = None) -> Forms:
    """The compact forms of "hmc" or "ensemble", made once; the latter also of another width."""
    samples = hmc(bench, run) if method == "hmc" else ensemble(bench, run, units)
    here = setting(bench, units)
    return bench.once(f"forms-{method}-{here.units}-{run}", lambda: _forms(bench, here, samples))


def _forms(bench: Runs, here: Setting, samples: Population) -> Forms:
    problem = here.problem
    aligned = align(
        samples,
        here.symmetry,
        reference="first",
        by="activations",
        model=problem.model,
        inputs=problem.train[0],
        kind="uncentred",
        progress=bench.show,
    ).population
    return Forms(samples, aligned, *(fit(crowd, model=problem.model) for crowd in (samples, aligned)))
