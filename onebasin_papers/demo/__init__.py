"""The main job on embedded data, in three minutes: sample, discover, align, compact, evaluate, prune."""

from __future__ import annotations

from collections.abc import Sequence

import onebasin as ob
from onebasin_papers.demo import basin, compact, methods, pruning, symmetries
from onebasin_papers.demo.presets import DemoPlan
from onebasin_papers.study import Part, Study

__all__ = ["STUDY", "plan"]


def plan(preset: str = "quick", data_dir: str | None = None) -> DemoPlan:
    """The settings; there is one preset, and it needs no data."""
    return DemoPlan(preset, data_dir)


def summarise(sections: Sequence[ob.reporting.Section]) -> list[str]:
    """The first paragraph of every section: each opens with its answer."""
    return [section.text[0] for section in sections]


STUDY = Study(
    name="demo",
    title="One basin: what a population of networks looks like without its symmetries",
    parts=(
        Part("symmetries", symmetries.TITLE, symmetries.part),
        Part("methods", methods.TITLE, methods.part),
        Part("basin", basin.TITLE, basin.part),
        Part("compact", compact.TITLE, compact.part),
        Part("pruning", pruning.TITLE, pruning.part),
    ),
    summarise=summarise,
    terms={
        "HMC": "Hamiltonian Monte Carlo: Markov chains of draws from the posterior. The reference here.",
        "ensemble": "Networks trained independently, from different starts.",
        "VI": "Variational inference: one Gaussian with a mean and a deviation per weight, fitted to the posterior.",
        "SWAG": "A Gaussian through the late steps of stochastic gradient descent.",
        "aligned": "Moved into one basin: hidden units reordered and rescaled, so that no function changes.",
        "refined": "A mean and a deviation per weight, moved until its draws predict what the samples predict.",
        "barrier": "How far the loss rises on the straight line between two networks.",
    },
)
