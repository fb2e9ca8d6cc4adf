"""Posterior samples and approximations of a network on data."""

from onebasin.inference.approximate import approximate
from onebasin.inference.diagnostics import MIXED, Diagnosis, Mixing, chain_rows, diagnose, mixing
from onebasin.inference.driver import METHODS, Execution, module_of
from onebasin.inference.journal import inspect_run, is_run, read_definition
from onebasin.inference.kernel import ChainPlan, Draws, Stage
from onebasin.inference.laplace_torch import from_laplace
from onebasin.inference.likelihood import LearnedNoise, bernoulli, categorical, choose, learned_gaussian
from onebasin.inference.methods.ensemble import TrainingOptions
from onebasin.inference.sample import sample
from onebasin.inference.seeds import derived, generator
from onebasin.inference.start import fresh
from onebasin.inference.target import Density, Target

__all__ = [
    "METHODS",
    "MIXED",
    "ChainPlan",
    "Density",
    "Diagnosis",
    "Draws",
    "Execution",
    "LearnedNoise",
    "Mixing",
    "Stage",
    "Target",
    "TrainingOptions",
    "approximate",
    "bernoulli",
    "categorical",
    "chain_rows",
    "choose",
    "derived",
    "diagnose",
    "fresh",
    "from_laplace",
    "generator",
    "inspect_run",
    "is_run",
    "learned_gaussian",
    "mixing",
    "module_of",
    "read_definition",
    "sample",
]
