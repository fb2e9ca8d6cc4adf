"""A data set of checkpoints in the published layout: written, read back, and what half precision costs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import torch

import onebasin as ob
from onebasin_papers.numbers import mean_error, mean_number
from onebasin_papers.study import Workspace, file_name
from onebasin_papers.symmetry.networks import problem, reference
from onebasin_papers.symmetry.settings import SymmetrySettings
from onebasin_papers.verdicts import graded

report = ob.reporting

TITLE = "Can the networks be published, and does half precision hurt?"
HARMLESS, TOLERABLE = 0.1, 1.0  # per cent of predicted classes that change
_OPTUNET = 6.73e6 / 8192  # bytes per network of the published mnist-optunet archive, of 392 weights


@dataclass(frozen=True, eq=False)
class Cost:
    """What half precision does to predictions.

    Attributes:
        logits: largest change of an output, over the deviation of all outputs, for each network.
        classes: share of predicted classes that change, in per cent, for each network.
        before: accuracy of each network in its own precision.
        after: from the archive.
    """

    logits: tuple[float, ...]
    classes: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


def part(workspace: Workspace[SymmetrySettings]) -> report.Section:
    """Write the reference networks as archives, read them again, and compare what they predict."""
    settings, task, networks = workspace.settings, problem(workspace), reference(workspace)
    name = file_name(f"{task.name}-{settings.architecture}")
    folder = workspace.folder / "checkpoints"
    workspace.progress(0, 3, "writing archives")
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, which may have had more networks
    paths = ob.write_archives(networks, folder, name, per_archive=settings.archive_networks)
    workspace.progress(1, 3, "reading archives")
    stored = ob.Population.open(folder / "models" / name, spec=networks[:1].to(dtype=torch.float16).spec)
    exact = same_bits(stored, networks.to(dtype=torch.float16))
    workspace.progress(2, 3, "comparing predictions")
    cost = _cost(workspace, networks, stored.to(dtype=torch.float32))
    changed, error = mean_error(cost.classes)
    lost = mean_error([100 * (after - before) for before, after in zip(cost.before, cost.after, strict=True)])[0]
    packed = sum(path.stat().st_size for path in paths)
    text = (
        f"{len(stored):,} networks take {packed / 1e6:.2f} MB in {len(paths)} archives, and come back "
        f"{'bit for bit as they were stored' if exact else 'changed, which must not happen'}. Half precision changes "
        f"{changed:.3f} ± {error or 0:.3f} % of predicted classes and the mean accuracy by {lost:+.4f} percentage "
        "points.",
        f"The layout is that of the data set torch-uncertainty/Checkpoints: {paths[0].relative_to(folder)} and so on, "
        "one safetensors file per network, in half precision. The same networks always give the same bytes. Archives "
        "are read without being unpacked to disk; links, devices, pickles, names that lead out of the folder and "
        "archives that unpack to far too much are refused.",
        f"They are in {folder.name}/ beside this report. Any archive of the published data set opens the same way, "
        "with Population.open(path).",
    )
    claim = report.Claim(
        "Networks can be kept in half precision.",
        half_verdict(changed, exact),
        f"{changed:.3f} ± {error or 0:.3f} % of predicted classes change; largest change of an output "
        f"{max(cost.logits):.4f} deviations",
        "all published checkpoints are in half precision",
        f"more than {HARMLESS:g} % of predicted classes change"
        if half_verdict(changed, exact).endswith("caveat")
        else "",
    )
    return report.Section("checkpoints", TITLE, text, (_sizes(networks, packed, len(paths)), _table(cost)), (claim,))


def half_verdict(changed: float, exact: bool) -> str:
    """Reproduced if archives return what was stored and at most 0.1 % of predicted classes change; caveat up to 1 %.

    >>> half_verdict(0.02, True), half_verdict(0.5, True), half_verdict(3.0, True), half_verdict(0.0, False)
    ('reproduced', 'reproduced with a caveat', 'not reproduced', 'not reproduced')
    """
    return graded(exact and changed <= HARMLESS, exact and changed <= TOLERABLE)


def same_bits(first: ob.Population, second: ob.Population) -> bool:
    """Whether two populations hold exactly the same numbers."""
    return len(first) == len(second) and all(
        torch.equal(first.tensor(name), second.tensor(name)) for name in first.names
    )


def _cost(workspace: Workspace[SymmetrySettings], networks: ob.Population, stored: ob.Population) -> Cost:
    task = problem(workspace)
    classes = task.test[1]
    logits: list[float] = []
    guesses: list[float] = []
    before: list[float] = []
    after: list[float] = []
    step = 64  # networks at a time: outputs of all would not fit for large data
    for start in range(0, len(networks), step):
        rows = slice(start, start + step)
        one, two = (
            ob.predict(task.model, population[rows], task.test[0], quantity="logits")
            for population in (networks, stored)
        )
        logits += ((one - two).abs().amax((1, 2)) / one.std((1, 2))).tolist()
        guesses += (100 * (one.argmax(-1) != two.argmax(-1)).double().mean(1)).tolist()
        for table, accuracies in ((one, before), (two, after)):
            accuracies += [float(ob.metrics.accuracy(row.softmax(-1), classes)) for row in table]
    return Cost(tuple(logits), tuple(guesses), tuple(before), tuple(after))


def _sizes(networks: ob.Population, packed: int, archives: int) -> report.Table:
    weights = sum(tensor.size for tensor in networks.spec.values())
    each = packed / len(networks)
    return report.Table(
        "checkpoints-sizes",
        "How large is the data set?",
        (
            report.Column("networks", digits=0),
            report.Column("weights", "of one network", digits=0),
            report.Column("archives", digits=0),
            report.Column("packed", "all archives together", digits=2, unit="MB"),
            report.Column("each", "bytes of a network in its archive", digits=0),
            report.Column(
                "per weight", "bytes of a weight in its archive; 2 without any packing or overhead", digits=2
            ),
        ),
        (
            (
                report.Number(len(networks), published=8192.0),
                report.Number(weights, published=392.0),
                report.Number(archives, published=1.0),
                report.Number(packed / 1e6, published=6.73),
                report.Number(each, published=round(_OPTUNET)),
                report.Number(each / weights, published=round(_OPTUNET / 392, 2)),
            ),
        ),
        note="Published: mnist-optunet.",
    )


def _table(cost: Cost) -> report.Table:
    change = [after - before for before, after in zip(cost.before, cost.after, strict=True)]
    return report.Table(
        "checkpoints-precision",
        "What does half precision cost?",
        (
            report.Column("precision"),
            report.Column("accuracy", "on test data", "higher", 3, "%"),
            report.Column("change", "of the accuracy of each network", "", 4, "%"),
            report.Column("classes changed", "predicted classes that differ", "lower", 4, "%"),
            report.Column("largest change", "of an output, over the deviation of all outputs", "lower", 5),
        ),
        (
            ("as trained", mean_number(cost.before, scale=100), None, None, None),
            (
                "half",
                mean_number(cost.after, scale=100),
                mean_number(change, scale=100),
                mean_number(cost.classes),
                report.Number(max(cost.logits)),
            ),
        ),
        errors=f"± one standard error over {len(change)} networks",
    )
