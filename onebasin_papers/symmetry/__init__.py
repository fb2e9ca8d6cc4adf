"""Paper 2: symmetries of networks, and what approximate posteriors are worth once they are known."""

from __future__ import annotations

from onebasin_papers.study import Part, Study
from onebasin_papers.symmetry import checkpoints, collapse, implicit, marginals, mass, order, table, two_neurons
from onebasin_papers.symmetry.networks import own_settings, perceptron, preset_problem
from onebasin_papers.symmetry.settings import LEAST, ROWS, TERMS, SymmetrySettings, preset_settings, summarise

__all__ = [
    "LEAST",
    "ROWS",
    "STUDY",
    "SymmetrySettings",
    "own_settings",
    "perceptron",
    "preset_problem",
    "preset_settings",
]

_DATA = ("examples", "test_examples")
_NETWORKS = (*_DATA, "prior", "epochs", "batch", "rate", "workers", "lanes")
_TRAINED = (*_NETWORKS, "reference_networks")
_HMC = ("chains", "chain_draws", "warmup", "leapfrog", "thin")
_RUNS = ("groups", "runs", "draws", "swag_collect", "swag_rate", "sghmc_rate", "sghmc_thin", "sghmc_warmup")
_IMPLICIT = ("groups", "runs", "draws", "members", "mask_scale", "packed_share")
_ALL = (
    *_RUNS,
    *_IMPLICIT[3:],
    "singles",
    "dropout_rate",
    "vi_epochs",
    "vi_rate",
    "laplace_layers",
    "laplace_structure",
)

STUDY = Study(
    "symmetry",
    "Posteriors of neural networks and their symmetries",
    (
        Part(
            "two-neurons",
            two_neurons.TITLE,
            two_neurons.part,
            ("toy_networks", "toy_epochs", "workers"),
            lambda workspace: "its network has two hidden units, so that it can be drawn, and data of its own",
        ),
        Part("marginals", marginals.TITLE, marginals.part, (*_TRAINED, *_HMC, *_RUNS)),
        Part("table", table.TITLE, table.part, (*_TRAINED, *_HMC, *_ALL, "permutations")),
        Part("implicit", implicit.TITLE, implicit.part, (*_NETWORKS, *_IMPLICIT, "rank_one", "refine_steps")),
        Part("collapse", collapse.TITLE, collapse.part, _TRAINED),
        Part(
            "mass",
            mass.TITLE,
            mass.part,
            (*_DATA, "epochs", "batch", "rate", "workers", "lanes", "mass_decays", "mass_networks", "mass_epochs"),
            mass.obstacle,
        ),
        Part(
            "order",
            order.TITLE,
            order.part,
            (*_DATA, "prior", "batch", "lanes", "order_networks", "order_rates", "order_epochs"),
        ),
        Part("checkpoints", checkpoints.TITLE, checkpoints.part, (*_TRAINED, "archive_networks")),
    ),
    summarise,
    TERMS,
)
