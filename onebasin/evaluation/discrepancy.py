"""How far two populations of networks are apart: raw, without symmetries, and as functions."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from onebasin.alignment import FORM, FORM_SCALES, ORDERS, align, canonicalise
from onebasin.errors import InputError, check_options
from onebasin.evaluation.distances import BLOCK_BYTES, MEMBERS, Distances, tensor_distances, weight_names
from onebasin.evaluation.runs import Runs
from onebasin.functional import Inputs, answers, pieces
from onebasin.metrics import (
    FEWEST,
    bandwidths,
    kernel_matrix,
    metric_of,
    percentiles,
    permutation_p,
    random_counts,
    random_sides,
    rounding,
    side_statistics,
    unbiased,
    weighted_statistics,
)
from onebasin.parallel import ExecutionOptions, Executor, MemoryNeeds, SerialExecutor, executor_for
from onebasin.population import Population
from onebasin.posterior import Output, predict
from onebasin.reporting import table
from onebasin.state import shared_names, trained_parameters
from onebasin.symmetry import Symmetry

# ----------------------------------------------------------------------
# What `discrepancy` found, as numbers, as JSON and as a table.


@dataclass(frozen=True)
class Kernel:
    """One kernel at one bandwidth; fields as in `MMDResult`."""

    kernel: str
    bandwidth: float
    squared: float
    explained: float
    p_value: float = math.nan


@dataclass(frozen=True)
class MMDResult:
    """How far two populations are apart in one space; means over all kernels and bandwidths of the preset.

    Attributes:
        squared: unbiased estimate of the squared MMD, all members taken as independent.
        explained: the part of it that comes from members sharing a run, see `runs`; 0 where each is its own run.
        remainder: squared - explained.
        low: lower end of the bootstrap interval of the remainder; NaN where a population has fewer than three runs.
        high: its upper end.
        p_value: of the hypothesis that runs of both populations follow one law, all kernels together; NaN for one run
            against one run, which no exchange tells apart.
        kernels: each by itself.
    """

    squared: float
    explained: float
    remainder: float
    low: float
    high: float
    p_value: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Compared:
    """Two populations in one form.

    Attributes:
        total: all weights together.
        layers: each tensor by itself; their p-values are not corrected for being many.
        within_first: mean squared Euclidean distance of two networks of the first population.
        within_second: of two networks of the second population.
        across: of one of the first and one of the second.
        notes: what has no normal form.
    """

    total: MMDResult
    layers: Mapping[str, MMDResult]
    within_first: float
    within_second: float
    across: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Discrepancy:
    """How far two populations of networks are apart.

    Attributes:
        members: networks of both populations.
        runs: independent runs of both populations.
        shares: share of pairs of members that come from one run, in both populations.
        preset: kernels and bandwidths.
        raw: as the weights are.
        forms: form -> after symmetries were removed in this way; the first is `ns`.
        function: on predictions, which need no form; None without a model and inputs.
        notes: what should be known when these numbers are read.
    """

    members: tuple[int, int]
    runs: tuple[int, int]
    shares: tuple[float, float]
    preset: str
    raw: Compared
    forms: Mapping[str, Compared]
    function: MMDResult | None
    notes: tuple[str, ...]

    @property
    def ns(self) -> MMDResult | None:
        """No symmetries: all weights in the first form, or None if no symmetry was given."""
        return next(iter(self.forms.values())).total if self.forms else None

    @property
    def sensitivity(self) -> dict[str, float]:
        """Form -> squared MMD, raw included: how much hangs on the choice of a form."""
        return {"raw": self.raw.total.squared, **{form: found.total.squared for form, found in self.forms.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; what is not defined is None."""
        found: dict[str, Any] = _plain(asdict(self))
        return found

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        """Tables for people: one row for each form, then one for each tensor, raw and in the first form."""
        runs = "" if self.runs == self.members else f" of {self.runs[0]:,} and {self.runs[1]:,} runs"
        rows = [("raw", self.raw.total), *((form, found.total) for form, found in self.forms.items())]
        rows += [("function", self.function)] if self.function else []
        parts = [
            f"{self.members[0]:,} against {self.members[1]:,} networks{runs}, preset {self.preset}",
            _table("", rows),
        ]
        for form, found in list({"raw": self.raw, **self.forms}.items())[:2]:
            if found.layers:
                parts.append(_table(form, found.layers.items()))
        notes = [*self.notes, *(note for found in (self.raw, *self.forms.values()) for note in found.notes)]
        return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _table(title: str, gaps: Iterable[tuple[str, MMDResult]]) -> str:
    head = (title, "MMD^2", "from runs", "remainder", "interval", "p")
    return table([head, *((name, *_cells(gap)) for name, gap in gaps)])


def _cells(gap: MMDResult) -> tuple[str, str, str, str, str]:
    runs = (_short(gap.explained), _short(gap.remainder)) if gap.explained else ("", "")
    interval = "" if math.isnan(gap.low) else f"{_short(gap.low)} to {_short(gap.high)}"
    return _short(gap.squared), *runs, interval, "-" if math.isnan(gap.p_value) else f"{gap.p_value:.3g}"


def _short(number: float) -> str:
    return "unknown" if math.isnan(number) else f"{number:.4f}" if abs(number) >= 1e-3 else f"{number:.1e}"


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


# ----------------------------------------------------------------------
# Both populations without their symmetries: the forms in which they can be compared.


ALIGNED = "aligned"
FORMS = (
    "balanced/max",
    "balanced/norm",
    "unit-norm/max",
    "unit-norm/first",
    "unit-norm/norm",
    "unit-norm/mean",
    "keep/max",
    "unit-norm/keep",
    ALIGNED,
)
LARGE = 1 << 30  # bytes; larger populations are written to a scratch folder in the meantime

PopulationPair = tuple[Population, Population, tuple[str, ...]]
PathLike = str | os.PathLike[str]


def check_form(form: str) -> None:
    """Raise `InputError` unless the form is one."""
    scale, _, order = form.partition("/")
    if form != ALIGNED and not (scale in FORM_SCALES and order in (*ORDERS, "keep")):
        raise InputError(
            f'expected a form "SCALE/ORDER" with SCALE out of {", ".join(FORM_SCALES)} and ORDER out of '
            f'{", ".join(ORDERS)}, keep, or {ALIGNED!r}; found {form!r}: as in "balanced/max"'
        )


@contextmanager
def in_form(
    a: Population,
    b: Population,
    symmetry: Symmetry,
    form: str,
    *,
    executor: Executor,
    scratch: PathLike | None = None,
    seed: int = 0,
) -> Iterator[PopulationPair]:
    """Both populations in a form, and what there is to say about it.

    Args:
        a: one population.
        b: the other.
        symmetry: of their model.
        form: see above.
        executor: who moves the networks.
        scratch: where a folder is made for populations above 1 GB, and deleted at the end; the system's temporary
            folder by default.
        seed: of the order in which networks are aligned.
    """
    check_form(form)
    if scratch is not None and not Path(scratch).is_dir():
        raise InputError(f"expected a folder as scratch=, found nothing of this kind at {scratch}: create it first")
    with tempfile.TemporaryDirectory(prefix="onebasin-", dir=scratch) as name:
        folder = Path(name) if a.nbytes + b.nbytes > LARGE else None
        a, b = (
            _wide(population, None if folder is None else folder / f"wide-{side}")
            for side, population in (("a", a), ("b", b))
        )
        if form == ALIGNED:
            yield _aligned(a, b, symmetry, folder, seed, executor)
        else:
            yield _canonical(a, b, symmetry, form, folder, executor)


def _wide(population: Population, path: Path | None) -> Population:
    """The population in float32 at least."""

    def widened(value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value

    if not any(spec.dtype.is_floating_point and spec.dtype.itemsize < 4 for spec in population.spec.values()):
        return population
    return population.map(lambda block, _: {name: widened(value) for name, value in block.items()}, path=path)


def _canonical(
    a: Population, b: Population, symmetry: Symmetry, form: str, folder: Path | None, executor: Executor
) -> PopulationPair:
    scale, order = form.split("/")
    moved, notes, tied = [], dict[str, None](), 0
    for name, population in (("a", a), ("b", b)):
        path = None if folder is None else folder / name
        found = canonicalise(population, symmetry, scale=scale, order=order, path=path, executor=executor)
        assert found.population is not None
        moved.append(found.population)
        notes.update(dict.fromkeys(f"{form}: {note}" for note in found.notes))
        tied += sum(int(counts.sum()) for counts in found.ties.values())
    if tied:
        notes[f"{form}: {tied:,} units with equal keys, of all networks, kept their order"] = None
    return moved[0], moved[1], tuple(notes)


def _aligned(
    a: Population, b: Population, symmetry: Symmetry, folder: Path | None, seed: int, executor: Executor
) -> PopulationPair:
    both = Population.concatenate([a, b])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    path = None if folder is None else folder / "both"
    found = align(both[order], symmetry, path=path, executor=executor).population[order.argsort()]
    return found[: len(a)], found[len(a) :], ()


# ----------------------------------------------------------------------
# From distances to a `MMDResult`: kernels at their bandwidths, the part of runs, a test and an interval.


PRESETS = {
    "median": (("gaussian", "median"),),
    "pooled": (("laplace", "pooled"), ("gaussian", "pooled")),
    "paper": (("laplace", "paper"), ("gaussian", "paper")),
    "paper-floors": (("laplace", "paper-floors"), ("gaussian", "paper-floors")),
}


class MMDTest:
    """Kernels and random draws shared by every pair of populations in every form.

    Args:
        runs: of both populations.
        preset: a key of `PRESETS`.
        permutations: of the test; 0 for none.
        resamples: of the interval; 0 for none.
        confidence: of the interval.
        seed: of both.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        preset: str = "median",
        permutations: int = 999,
        resamples: int = 1000,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> None:
        if preset not in PRESETS:
            raise InputError(f"expected preset {', '.join(PRESETS)}, found {preset!r}: choose one of them")
        if permutations < 0 or resamples < 0:
            raise InputError(
                f"expected 0 or more permutations and resamples, found {permutations} and {resamples}: 0 is for none"
            )
        self.runs, self.preset, self.confidence = runs, preset, confidence
        percentiles(torch.zeros(1), confidence)  # refuses what is no confidence, before anything is measured
        generator = torch.Generator().manual_seed(seed)
        self.chosen = runs.one_of_each(generator)
        count, split = len(runs.sizes), runs.split
        # Two runs can only change places, which the statistic does not notice: no p-value says anything.
        self.sides = random_sides(count, split, permutations, generator) if permutations and count > 2 else None
        enough = resamples and min(runs.counts) >= FEWEST
        self.counts = random_counts(count, split, resamples, generator) if enough else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the kernels need."""
        return tuple(dict.fromkeys(metric_of(kernel) for kernel, _ in PRESETS[self.preset]))

    @property
    def nbytes(self) -> int:
        """Bytes of the draws."""
        return sum(draws.nbytes for draws in (self.sides, self.counts) if draws is not None)

    def gap(self, measured: Distances) -> MMDResult:
        """Judge the distances of two populations, which are not to be used any more."""
        device = self._settle(measured)
        kernels: list[Kernel] = []
        exchanged: list[tuple[Tensor, Tensor]] = []
        drawn: list[Tensor] = []
        for kernel, rule in PRESETS[self.preset]:
            pooled = measured.pooled(metric_of(kernel), spend=True)
            for width in bandwidths(rule, pooled.distances, pooled.split).tolist():
                matrix = kernel_matrix(pooled, width, kernel)
                sums = self.runs.sums(matrix)
                squared = float(unbiased(matrix, pooled.split))
                kernels.append(Kernel(kernel, width, squared, self.runs.explained(sums)))
                if self.sides is not None:
                    ours = self._exchangeable(matrix, sums)
                    exchanged.append((side_statistics(ours, self.sides), rounding(ours, self.runs.split)))
                if self.counts is not None:
                    sizes = self.runs.sizes.to(device)
                    drawn.append(weighted_statistics(sums, sizes, self.runs.split, self.counts))
        return self._gathered(kernels, exchanged, drawn)

    def _gathered(
        self, kernels: list[Kernel], exchanged: list[tuple[Tensor, Tensor]], drawn: list[Tensor]
    ) -> MMDResult:
        p_value, low, high = math.nan, math.nan, math.nan
        if exchanged:
            statistics, slack = (torch.stack(parts) for parts in zip(*exchanged, strict=True))
            each, p_value = permutation_p(statistics, slack)
            kernels = [replace(row, p_value=p) for row, p in zip(kernels, each.tolist(), strict=True)]
        if drawn:
            low, high = percentiles(torch.stack(drawn).mean(0), self.confidence)
        squared = sum(row.squared for row in kernels) / len(kernels)
        explained = sum(row.explained for row in kernels) / len(kernels)
        return MMDResult(squared, explained, squared - explained, low, high, p_value, tuple(kernels))

    def _exchangeable(self, matrix: Tensor, sums: Tensor) -> Tensor:
        """Kernel of all pairs of what changes sides (runs, runs), 0 on the diagonal."""
        size = float(self.runs.sizes[0])
        if bool((self.runs.sizes == size).all()):
            return sums if size == 1 else (sums / size**2).fill_diagonal_(0)
        chosen = self.chosen.to(matrix.device)
        return matrix[chosen][:, chosen]

    def _settle(self, measured: Distances) -> torch.device:
        """Move the draws to where the distances are."""
        matrix = measured.l2 if measured.l2 is not None else measured.l1
        assert matrix is not None
        self.sides = None if self.sides is None else self.sides.to(matrix.device)
        self.counts = None if self.counts is None else self.counts.to(matrix.device)
        return matrix.device


# ----------------------------------------------------------------------
# How much memory a comparison of two populations takes, at most: in this process, and for work on one shard.


_KERNELS = 2  # matrices beside distances: of a kernel, and of its sums over runs


def compare_bytes(a: Population, b: Population, judge: MMDTest, held: int) -> MemoryNeeds:
    """Upper estimates.

    Args:
        a: one population.
        b: the other.
        judge: of their distances: of one tensor and of all so far, for each metric, and of what follows from them.
        held: bytes of predictions.
    """
    members, populations = len(a) + len(b), a.nbytes + b.nbytes
    matrices = 8 * members**2 * (2 * len(judge.metrics) + _KERNELS)
    forms = 2 * min(LARGE, 2 * populations)  # in float32 at least, and moved
    tiles = 4 * BLOCK_BYTES + 8 * 8 * min(members, MEMBERS) ** 2
    return {
        "each": tiles,
        "here": matrices + judge.nbytes + max(forms, 2 * held),
    }


# ----------------------------------------------------------------------
# What should be known when the numbers of `discrepancy` are read.


FEW = 10  # runs; below, a bootstrap over runs is rough
LEVEL = 0.05  # p-values that cannot get below this are worth a word


def notes_on(runs: Runs, *, permutations: int, resamples: int) -> tuple[str, ...]:
    """Sentences about what runs of these numbers can show.

    Args:
        runs: of both populations.
        permutations: of the test; 0 for none.
        resamples: of the interval; 0 for none.
    """
    found, what, fewest = [], "networks" if runs.trivial else "runs", min(runs.counts)
    if runs.counts == (1, 1):
        found.append(
            "one run against one run: nothing tells how far two runs of one law are apart, so there is no p-value, no "
            "part of runs and no interval"
        )
    elif fewest == 1:
        found.append(
            "a population of one run: what runs explain is judged by the other population, and there is no interval"
        )
    elif resamples and fewest < FEWEST:
        found.append(f"{fewest} {what} on one side: too few to be drawn again, so there is no interval")
    elif resamples and fewest < FEW:
        found.append(f"{fewest} {what} on one side: intervals from so few are rough, and often too narrow")
    least = smallest_p(runs, permutations)
    if permutations and sum(runs.counts) > 2 and least > LEVEL:
        found.append(f"{runs.counts[0]} against {runs.counts[1]} {what}: p cannot be much below {least:.2g}")
    if len(runs.sizes.unique()) > 1:
        found.append("runs of unequal size: the test compares one network of each run")
    if runs.shared:
        found.append(
            "both populations hold networks of one run: they are not independent, and p-values are not to be used"
        )
    return tuple(found)


def smallest_p(runs: Runs, permutations: int) -> float:
    """The p-value of populations that could not be further apart: one division of runs out of all.

    Args:
        runs: of both populations.
        permutations: of the test.
    """
    first, second = runs.counts
    return max((2 if first == second else 1) / comb(first + second, first), 1 / (1 + permutations))


# ----------------------------------------------------------------------
# How far two populations are apart as functions: distances of their predictions, a few examples at a time.


HELD = 1 << 30  # bytes of predictions in memory: inputs are cut into pieces that give as many


def compare_functions(
    judge: MMDTest,
    model: nn.Module,
    a: Population,
    b: Population,
    inputs: Inputs,
    output: Output | None = None,
    *,
    executor: Executor | None = None,
) -> MMDResult:
    """Compare predictions as if they were weights.

    Args:
        judge: of the distances.
        model: the function.
        a: one population.
        b: the other.
        inputs: as the model takes them; distances add up over pieces of them.
        output: as in `predict`; by default probabilities where there are several outputs for an example, else values.
        executor: who runs the networks; this process if None.

    Raises:
        InputError: the networks do not give numbers that could be close to each other.
    """
    answer = answers(model, a.member(0), inputs)
    if not answer.is_floating_point():
        raise InputError(
            f"expected networks that give floating-point numbers to compare their functions, found {answer.dtype}: "
            "wrap the model so that it returns its scores, not class numbers"
        )
    output = output or ("probabilities" if answer.dim() > 1 and answer.shape[1] > 1 else "values")
    total: Distances | None = None
    where = executor or SerialExecutor()
    for piece in pieces(answer, len(a) + len(b), inputs, HELD):
        first, second = (
            Population.from_stacked({"predictions": predict(model, population, piece, output=output, executor=where)})
            for population in (a, b)
        )
        ((_, found),) = tensor_distances(first, second, judge.metrics, where)
        total = found.added_to(total)
    assert total is not None  # there is at least one example
    return judge.gap(total)


# ----------------------------------------------------------------------
# How far two populations of networks are apart: raw, without symmetries, and as functions.


ROUNDING = 8  # units of rounding that bringing a network into a form may cost each weight


class DiscrepancyOptions(ExecutionOptions, total=False):
    """The finer points of `discrepancy`, all optional; where it runs is said as in `ExecutionOptions`.

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
        scratch: folder for populations in a form when they exceed 1 GB; the system's temporary folder by default.
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
    **options: Unpack[DiscrepancyOptions],
) -> Discrepancy:
    """Measure how far two populations are apart by the squared MMD of their weights and of their functions.

    Populations are read in blocks; neither is ever held in memory as a whole, but a few numbers for each pair of
    members are: 0.5 GB for each of three matrices of 8,192 networks. `chain` of a population tells which members share
    a run; without it every member counts as independent.

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
        InputError: an option cannot be used, or a population has fewer than 2 networks.
        SpecError: the networks do not fit together, or hold NaN.

    >>> import torch
    >>> population = Population.from_stacked({"w": torch.arange(12.0).view(6, 2)})
    >>> round(discrepancy(population[:3], population[3:], permutations=19, resamples=0).raw.total.squared, 3)
    0.868
    """
    check_options(options, DiscrepancyOptions.__annotations__, "discrepancy")
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
    with executor_for(options, **compare_bytes(a, b, judge, _held(a, b, model, inputs, options))) as executor:
        tell("comparing raw weights")
        raw, spreads = _compare(a, b, judge, layers, executor, names)
        for form in chosen:
            assert symmetry is not None  # _forms has seen to it
            tell(f"comparing in the form {form}")
            with in_form(a, b, symmetry, form, executor=executor, scratch=scratch, seed=seed) as (here, there, notes):
                compared[form] = replace(_compare(here, there, judge, layers, executor, names, spreads)[0], notes=notes)
        if model is not None and inputs is not None:
            tell("comparing functions")
            function = compare_functions(judge, model, a, b, inputs, options.get("output"), executor=executor)
    notes = notes_on(runs, permutations=options.get("permutations", 999), resamples=options.get("resamples", 1000))
    return Discrepancy((len(a), len(b)), runs.counts, runs.shares, judge.preset, raw, compared, function, notes)


def _frozen(symmetry: Symmetry | None, model: nn.Module | None) -> Collection[str]:
    """The constants that the symmetry tells, or else the model: its frozen parameters."""
    if symmetry is not None or model is None:
        return () if symmetry is None else symmetry.frozen
    first, trained = shared_names(model), trained_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name for name in parameters if first.get(name, name) not in trained}


def _held(
    a: Population, b: Population, model: nn.Module | None, inputs: Inputs | None, options: DiscrepancyOptions
) -> int:
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


def _judge(runs: Runs, options: DiscrepancyOptions) -> MMDTest:
    return MMDTest(
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
    judge: MMDTest,
    layers: bool,
    executor: Executor,
    names: Sequence[str],
    before: Mapping[str, float] | None = None,
) -> tuple[Compared, dict[str, float]]:
    """One pass over both populations; the distances of a tensor are dropped as soon as it has been judged.

    Args:
        a: one population.
        b: the other.
        judge: of distances.
        layers: whether tensors are judged by themselves.
        executor: who measures.
        names: the tensors that are compared.
        before: `Distances.spread` of each tensor before networks were brought into a form. A form may give all of them
            the same tensor (batch norms of weight 1) but for rounding, which is then taken off.

    Returns:
        What was found, and the spread of each tensor.
    """
    total: Distances | None = None
    gaps: dict[str, MMDResult] = {}
    spreads: dict[str, float] = {}
    for name, found in tensor_distances(a, b, judge.metrics, executor, names):
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
