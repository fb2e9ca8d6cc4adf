"""How far two crowds of networks are apart: raw, without symmetries, and as functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Unpack

from torch import nn

from onebasin.align.form.canonical import FORM
from onebasin.calling import Inputs
from onebasin.cluster import Cluster, Places, cluster_for
from onebasin.discrepancy.bounds import compare_bytes
from onebasin.discrepancy.distances import Distances, tensor_distances, weight_names
from onebasin.discrepancy.forms import PathLike, check_form, in_form
from onebasin.discrepancy.functions import HELD, compare_functions
from onebasin.discrepancy.judge import Judge
from onebasin.discrepancy.notes import notes_on
from onebasin.discrepancy.report import Compared, Discrepancy, Gap
from onebasin.discrepancy.runs import Runs
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.predict.portions import answers
from onebasin.predict.predicting import Output
from onebasin.state import shared_names, trained_parameters
from onebasin.symmetry import Symmetry

ROUNDING = 8  # units of rounding that bringing a network into a form may cost each weight


class Options(Places, total=False):
    """The finer points of `discrepancy`, all optional; where it runs is said as in `Places`.

    Attributes:
        preset: "median" (a Gaussian kernel at the median distance), "pooled" (Laplace and Gaussian kernels at ten
            bandwidths each), "paper" or "paper-floors" (those of paper 2). All but the first need l1 distances, which
            take many times as long. Bandwidths are taken anew in every form.
        permutations: of the test (999); 0 for none.
        resamples: of the bootstrap interval (1000); 0 for none.
        confidence: of the interval (0.95).
        seed: of both (0).
        layers: also judge every tensor by itself (True).
        output: what is compared as the function, "probabilities" or "values", as in `predict`; by default
            probabilities where the networks give several outputs for an example, which are then taken for classes.
        scratch: folder for crowds in a form when they exceed 1 GB; the system's temporary folder by default.
        progress: called with a sentence when a new step begins.
    """

    preset: str
    permutations: int
    resamples: int
    confidence: float
    seed: int
    layers: bool
    output: Output
    scratch: PathLike
    progress: Callable[[str], None]


def discrepancy(
    a: Population,
    b: Population,
    *,
    symmetry: Symmetry | None = None,
    forms: str | Sequence[str] | None = None,
    model: nn.Module | None = None,
    inputs: Inputs | None = None,
    **options: Unpack[Options],
) -> Discrepancy:
    """Measure how far two crowds are apart by the squared MMD of their weights and of their functions.

    Crowds are read in blocks; neither is ever held in memory as a whole, but a few numbers for each pair of members
    are: 0.5 GB for each of three matrices of 8,192 networks. `chain` of a population tells which members share a run;
    without it every member counts as independent.

    Args:
        a: networks, in memory or on disk.
        b: networks of the same architecture to compare with, such as a reference.
        symmetry: of their model; without it only raw weights are compared.
        forms: one or several ways to remove symmetries, see `forms`; "balanced/max" by default, "unit-norm/max" as in
            paper 2, `FORMS` for a table of how much hangs on it.
        model: with `inputs`, also compare what the networks compute.
        inputs: as the model takes them.
        **options: see `Options`.

    Raises:
        InputError: an option cannot be used, or a crowd has fewer than 2 networks.
        SpecError: the networks do not fit together, or hold NaN.

    >>> import torch
    >>> crowd = Population.from_stacked({"w": torch.arange(12.0).view(6, 2)})
    >>> round(discrepancy(crowd[:3], crowd[3:], permutations=19, resamples=0).raw.total.squared, 3)
    0.868
    """
    refuse_unknown(options, Options.__annotations__, "discrepancy")
    chosen = _forms(forms, symmetry)
    names = weight_names(a, b, _frozen(symmetry, model))
    if min(len(a), len(b)) < 2:
        raise InputError(f"expected at least 2 networks on each side, found {len(a)} and {len(b)}: add members")
    if (model is None) != (inputs is None):
        raise InputError("model and inputs go together, found one of them: give both to compare functions")
    runs = Runs.of(a, b)
    judge = _judge(runs, options)
    tell = options.get("progress") or _silent
    layers, scratch, seed = options.get("layers", True), options.get("scratch"), options.get("seed", 0)
    compared: dict[str, Compared] = {}
    function = None
    with cluster_for(options, **compare_bytes(a, b, judge, _held(a, b, model, inputs, options))) as cluster:
        tell("comparing raw weights")
        raw, spreads = _compare(a, b, judge, layers, cluster, names)
        for form in chosen:
            assert symmetry is not None  # _forms has seen to it
            tell(f"comparing in the form {form}")
            with in_form(a, b, symmetry, form, cluster=cluster, scratch=scratch, seed=seed) as (here, there, notes):
                compared[form] = replace(_compare(here, there, judge, layers, cluster, names, spreads)[0], notes=notes)
        if model is not None and inputs is not None:
            tell("comparing functions")
            function = compare_functions(judge, model, a, b, inputs, options.get("output"), cluster=cluster)
    notes = notes_on(runs, permutations=options.get("permutations", 999), resamples=options.get("resamples", 1000))
    return Discrepancy((len(a), len(b)), runs.counts, runs.shares, judge.preset, raw, compared, function, notes)


def _frozen(symmetry: Symmetry | None, model: nn.Module | None) -> Collection[str]:
    """The constants that the symmetry tells, or else the model: its frozen parameters."""
    if symmetry is not None or model is None:
        return () if symmetry is None else symmetry.frozen
    first, trained = shared_names(model), trained_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name for name in parameters if first.get(name, name) not in trained}


def _held(a: Population, b: Population, model: nn.Module | None, inputs: Inputs | None, options: Options) -> int:
    """Bytes of predictions that are in memory at once; looked at only where somebody counts."""
    if model is None or inputs is None or options.get("memory") is None:
        return 0
    return min(HELD, answers(model, a.member(0), inputs).nbytes * (len(a) + len(b)))


def _forms(forms: str | Sequence[str] | None, symmetry: Symmetry | None) -> list[str]:
    if forms is None:
        return [] if symmetry is None else [FORM]
    chosen = [forms] if isinstance(forms, str) else list(forms)
    for form in chosen:
        check_form(form)
    if chosen and symmetry is None:
        raise InputError(f"expected a symmetry for the form {chosen[0]}, found none: give symmetry= too")
    return chosen


def _judge(runs: Runs, options: Options) -> Judge:
    return Judge(
        runs,
        preset=options.get("preset", "median"),
        permutations=options.get("permutations", 999),
        resamples=options.get("resamples", 1000),
        confidence=options.get("confidence", 0.95),
        seed=options.get("seed", 0),
    )


def _compare(
    a: Population,
    b: Population,
    judge: Judge,
    layers: bool,
    cluster: Cluster,
    names: Sequence[str],
    before: Mapping[str, float] | None = None,
) -> tuple[Compared, dict[str, float]]:
    """One pass over both crowds; the distances of a tensor are dropped as soon as it has been judged.

    Args:
        a: one crowd.
        b: the other.
        judge: of distances.
        layers: whether tensors are judged by themselves.
        cluster: who measures.
        names: the tensors that are compared.
        before: `Distances.spread` of each tensor before networks were brought into a form. A form may give all of them
            the same tensor (batch norms of weight 1) but for rounding, which is then taken off.

    Returns:
        What was found, and the spread of each tensor.
    """
    total: Distances | None = None
    gaps: dict[str, Gap] = {}
    spreads: dict[str, float] = {}
    for name, found in tensor_distances(a, b, judge.metrics, cluster, names):
        spreads[name] = found.spread
        if before is not None and found.spread <= ROUNDING < before[name]:
            found = found.none()
        total = found.added_to(total)
        if layers:
            gaps[name] = judge.gap(found)
        del found  # before the next is measured
    assert total is not None  # there are weights: weight_names has seen to it
    means = total.means
    return Compared(judge.gap(total), gaps, *means), spreads


def _silent(text: str) -> None:
    """Tell nobody."""
