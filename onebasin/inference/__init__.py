"""Posterior samples and approximations of a network on data."""

from onebasin.inference.approximate import approximate
from onebasin.inference.augment import BatchTransform, MiniBatch, Mixup, RandomCrop, RandomFlip
from onebasin.inference.diagnostics import MIXED, Diagnosis, Mixing, chain_rows, diagnose, mixing
from onebasin.inference.job import method_of, options_of
from onebasin.inference.journal import inspect_run, is_run, read_definition
from onebasin.inference.kernel import ChainPlan, Draws, Info, Kernel, Method, Stage, StepIndex
from onebasin.inference.laplace_torch import from_laplace
from onebasin.inference.likelihood import LearnedNoise, bernoulli, categorical, choose, learned_gaussian
from onebasin.inference.methods import (
    EMA,
    HMC,
    LPBNN,
    MCLMC,
    METHODS,
    MIMO,
    SGHMC,
    SWA,
    SWAG,
    VI,
    BatchEnsemble,
    Dropout,
    Ensemble,
    Laplace,
    Masksembles,
    MCBatchNorm,
)
from onebasin.inference.recipes import RECIPES, Recipe, recipe
from onebasin.inference.sample import sample
from onebasin.inference.seeds import Streams, derived, generator
from onebasin.inference.start import fresh
from onebasin.inference.target import Target
from onebasin.inference.training import TrainedMethod
from onebasin.inference.unroll import NothingImplicitError, implicit_kind, unroll
from onebasin.inference.weight_diagnostics import WeightDiagnostics, weight_diagnostics

__all__ = [
    "EMA",
    "HMC",
    "LPBNN",
    "MCLMC",
    "METHODS",
    "MIMO",
    "MIXED",
    "RECIPES",
    "SGHMC",
    "SWA",
    "SWAG",
    "VI",
    "BatchEnsemble",
    "BatchTransform",
    "ChainPlan",
    "Diagnosis",
    "Draws",
    "Dropout",
    "Ensemble",
    "Info",
    "Kernel",
    "Laplace",
    "LearnedNoise",
    "MCBatchNorm",
    "Masksembles",
    "Method",
    "MiniBatch",
    "Mixing",
    "Mixup",
    "NothingImplicitError",
    "RandomCrop",
    "RandomFlip",
    "Recipe",
    "Stage",
    "StepIndex",
    "Streams",
    "Target",
    "TrainedMethod",
    "WeightDiagnostics",
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
    "implicit_kind",
    "inspect_run",
    "is_run",
    "learned_gaussian",
    "method_of",
    "mixing",
    "options_of",
    "read_definition",
    "recipe",
    "sample",
    "unroll",
    "weight_diagnostics",
]
