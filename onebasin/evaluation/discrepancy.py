"""The discrepancy of two populations of networks: raw, without symmetries, and as functions.

A form "SCALE/ORDER" brings every network by itself into the normal form of `canonicalise`: it does not know which
population the network belongs to, so permutation tests stay exact. "aligned" moves all networks of both populations to
one reference that they agree on (`align`). The reference depends a little on the order in which they come, so they come
in a random one.

What is exchanged and drawn again are runs, because only runs are independent; see `onebasin.evaluation.runs`.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.alignment import FORM, FORM_SCALES, ORDERS, align, canonicalise
from onebasin.errors import InputError
from onebasin.evaluation.distances import Distances, tensor_distances, weight_names
from onebasin.evaluation.runs import Runs
from onebasin.functional import (
    AnyInputs,
    Inputs,
    OutputPart,
    answers,
    measured_of,
    pieces,
    select_output,
)
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
from onebasin.parallel import Executor, Progress, SerialExecutor, executor_for, progress_of
from onebasin.population import Population, check_population
from onebasin.posterior import Quantity, predict
from onebasin.reporting import (
    SHOWN,
    Axis,
    Cell,
    Column,
    Figure,
    Record,
    Result,
    Series,
    Table,
    as_number,
    finite,
    largest_first,
    one_panel,
    result_record,
    table,
)
from onebasin.state import shared_names, trained_parameters
from onebasin.symmetry import Symmetry


@dataclass(frozen=True)
class Kernel:
    """One kernel at one bandwidth; fields as in `MMDResult`."""

    kernel: str
    bandwidth: float
    squared: float
    explained: float
    p_value: float = math.nan


@dataclass(frozen=True, repr=False)
class MMDResult(Result):
    """The squared MMD of two populations in one space, mean over all kernels and bandwidths of the preset.

    Attributes:
        squared: unbiased estimate of the squared MMD, all members taken as independent.
        explained: the part of it that comes from members sharing a run, see `Runs`; 0 where each is its own run.
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

    def record(self) -> Record:
        """A table of the whole and of each kernel, and the squared MMD by bandwidth."""
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (own.kernel, *map(as_number, (own.bandwidth, own.squared, own.explained, own.p_value)))
            for own in self.kernels
        )
        lines = tuple(_line(kind, self.kernels) for kind in dict.fromkeys(own.kernel for own in self.kernels))
        title = f"The squared MMD is {_short(self.squared)}, with p = {_p(self.p_value)}."
        return result_record(
            "mmd",
            "Squared MMD of two populations in one space",
            title,
            (
                Table("mmd", "All kernels together", _COLUMNS, (("all kernels", *_numbers(self)),)),
                Table("kernels", "Each kernel by itself", _KERNELS, rows),
                one_panel("bandwidths", "At which distance do they differ?", title, "points",
                       Axis("bandwidth of the kernel", scale="log"), "squared MMD", series=lines),
            ),
            values=_plain(asdict(self)),
        )  # fmt: skip


_COLUMNS = (
    Column(""),
    Column("MMD^2", "unbiased estimate of the squared MMD, all members taken as independent", "lower", 4),
    Column("from runs", "the part of it that comes from members sharing a run", digits=4),
    Column("remainder", "the rest, with its bootstrap interval over runs", "lower", 4),
    Column("p", "of the hypothesis that runs of both follow one law", digits=3),
)
_KERNELS = (Column("kernel"), Column("bandwidth", digits=4), *_COLUMNS[1:3], _COLUMNS[4])


def _line(kind: str, kernels: Sequence[Kernel]) -> Series:
    points = sorted((own.bandwidth, own.squared) for own in kernels if own.kernel == kind)
    return Series(kind, tuple(width for width, _ in points), tuple(squared for _, squared in points))


def _numbers(result: MMDResult) -> tuple[Any, ...]:
    return (
        as_number(result.squared),
        as_number(result.explained),
        as_number(result.remainder, result.low, result.high),
        as_number(result.p_value),
    )


@dataclass(frozen=True)
class Compared:
    """Two populations as they are, or in one normal form.

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


@dataclass(frozen=True, repr=False)
class Discrepancy(Result):
    """The squared MMD of two populations of networks: raw, in normal forms, and of their functions.

    Attributes:
        members: networks of both populations.
        runs: independent runs of both populations.
        shares: share of pairs of members that come from one run, in both populations.
        preset: kernels and bandwidths.
        raw: as the weights are.
        normal_forms: normal form -> after symmetries were removed in this way; the first is `mmd_canonical`.
        function: on predictions, which need no normal form; None without a model and inputs.
        notes: what should be known when these numbers are read.
    """

    members: tuple[int, int]
    runs: tuple[int, int]
    shares: tuple[float, float]
    preset: str
    raw: Compared
    normal_forms: Mapping[str, Compared]
    function: MMDResult | None
    notes: tuple[str, ...]

    @property
    def mmd_canonical(self) -> MMDResult | None:
        """The MMD of all weights in the first normal form, without symmetries; None if no symmetry was given."""
        return next(iter(self.normal_forms.values())).total if self.normal_forms else None

    @property
    def sensitivity(self) -> dict[str, float]:
        """Normal form -> squared MMD, raw included: how much hangs on the choice of a form."""
        return {form: compared.total.squared for form, compared in {"raw": self.raw, **self.normal_forms}.items()}

    def record(self) -> Record:
        """Tables and bars of the squared MMD: raw, in normal forms, of functions, and of each tensor."""
        total = self._totals()
        runs = "" if self.runs == self.members else f" of {self.runs[0]:,} and {self.runs[1]:,} runs"
        said = [f"{_short(own.squared)} (p = {_p(own.p_value)}) {_WHERE.get(name, f'in the form {name}')}"
                for name, own in total.items()]  # fmt: skip
        answer = f"The squared MMD is {', '.join(said)}."
        forms = Table(
            "forms",
            "Squared MMD with and without symmetries",
            _COLUMNS,
            tuple((name, *_numbers(own)) for name, own in total.items()),
            "in brackets: bootstrap intervals over runs",
        )
        bars = _bars("", tuple(total.values()))
        figure = one_panel("forms-bars", "How far are they apart, and how much of it is symmetry?", answer, "bars",
                        Axis("", names=tuple(total)), "squared MMD beyond runs",
                        series=(bars,))  # fmt: skip
        layers = self._layers() if self.raw.layers else ()
        every = (self.raw, *self.normal_forms.values())
        notes = [*self.notes, *(note for compared in every for note in compared.notes)]
        title = f"Discrepancy of {self.members[0]:,} and {self.members[1]:,} networks{runs}"
        settings = {"preset": self.preset}
        return result_record("discrepancy", title, (answer, *notes), (forms, *layers[:1], figure, *layers[1:]),
                             values=self.to_dict(), settings=settings)  # fmt: skip

    def _totals(self) -> dict[str, MMDResult]:
        totals = {"raw": self.raw.total, **{form: found.total for form, found in self.normal_forms.items()}}
        return totals | ({} if self.function is None else {"function": self.function})

    def _layers(self) -> tuple[Table, Figure]:
        """The squared MMD of each tensor, raw and in the first form."""
        shown = list({"raw": self.raw, **self.normal_forms}.items())[:2]
        names = largest_first(self.raw.layers, lambda name: self.raw.layers[name].squared)
        columns = (Column("tensor"), *(Column(f"{what}, {form}", digits=4 if what == "MMD^2" else 3)
                                       for form, _ in shown for what in ("MMD^2", "p")))  # fmt: skip
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (name, *(as_number(value) for _, found in shown
                     for value in (found.layers[name].squared, found.layers[name].p_value)))
            for name in names
        )  # fmt: skip
        drawn = tuple(names[:SHOWN])
        series = tuple(_bars(form, [found.layers[name] for name in drawn])
                       for form, found in shown)  # fmt: skip
        more = "" if len(drawn) == len(names) else f" The {len(drawn)} largest of {len(names):,} tensors."
        figure = one_panel("layers-bars", "In which tensors do they differ?",
                        f"Without what members of one run share; p-values are not corrected for their number.{more}",
                        "bars", Axis("", names=drawn), "squared MMD beyond runs",
                        series=series)  # fmt: skip
        note = "p-values are not corrected for being many"
        return Table("layers", "Squared MMD of each tensor", columns, rows, note=note), figure

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers; what is not defined is None. Normal forms are under "forms", their older name."""
        numbers: dict[str, Any] = _plain(asdict(self))
        return {"forms" if name == "normal_forms" else name: value for name, value in numbers.items()}

    def to_json(self) -> str:
        """The same as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        """Tables for people: one row for each form, then one for each tensor, raw and in the first form."""
        runs = "" if self.runs == self.members else f" of {self.runs[0]:,} and {self.runs[1]:,} runs"
        rows = [("raw", self.raw.total), *((form, compared.total) for form, compared in self.normal_forms.items())]
        rows += [("function", self.function)] if self.function else []
        parts = [
            f"{self.members[0]:,} against {self.members[1]:,} networks{runs}, preset {self.preset}",
            _table("", rows),
        ]
        for form, compared in list({"raw": self.raw, **self.normal_forms}.items())[:2]:
            if compared.layers:
                layers = largest_first(compared.layers.items(), lambda item: item[1].squared)
                parts.append(_table(form, layers[:SHOWN]))
                if len(layers) > SHOWN:
                    parts.append(f"{len(layers) - SHOWN:,} more tensors are in to_dataframe('layers')")
        every = (self.raw, *self.normal_forms.values())
        notes = [*self.notes, *(note for compared in every for note in compared.notes)]
        return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


_WHERE = {"raw": "as the weights are", "function": "of the functions"}


def _p(value: float) -> str:
    return "unknown" if math.isnan(value) else f"{value:.3g}"


def _bars(name: str, results: Sequence[MMDResult]) -> Series:
    """Bars with heights and ends of errors; those without an interval have ends where they are."""
    heights = tuple(finite(own.squared if math.isnan(own.remainder) else own.remainder) for own in results)
    low, high = (
        tuple(height if math.isnan(getattr(own, side)) else getattr(own, side)
              for own, height in zip(results, heights, strict=True))
        for side in ("low", "high")
    )  # fmt: skip
    return Series(name, tuple(range(len(heights))), heights, low, high)


def _table(title: str, results: Iterable[tuple[str, MMDResult]]) -> str:
    head = (title, "MMD^2", "from runs", "remainder", "interval", "p")
    return table([head, *((name, *_cells(result)) for name, result in results)])


def _cells(result: MMDResult) -> tuple[str, str, str, str, str]:
    runs = (_short(result.explained), _short(result.remainder)) if result.explained else ("", "")
    interval = "" if math.isnan(result.low) else f"{_short(result.low)} to {_short(result.high)}"
    return _short(result.squared), *runs, interval, "-" if math.isnan(result.p_value) else f"{result.p_value:.3g}"


def _short(number: float) -> str:
    return "unknown" if math.isnan(number) else f"{number:.4f}" if abs(number) >= 1e-3 else f"{number:.1e}"


def _plain(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


ALIGNED = "aligned"
NORMAL_FORMS = (
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
def in_normal_form(
    a: Population,
    b: Population,
    symmetry: Symmetry,
    form: str,
    *,
    executor: Executor,
    scratch: PathLike | None = None,
    seed: int = 0,
) -> Iterator[PopulationPair]:
    """Both populations in a normal form, and notes on what has none.

    Networks in half precision are brought into a form in float32: to round them once more would cost them half a per
    cent of each weight, and differences with it.

    Populations above 1 GB are written to a folder in `scratch`, which is deleted at the end. The seed is that of the
    order in which networks are aligned.
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
        canonical = canonicalise(population, symmetry, scale=scale, order=order, path=path, executor=executor)
        assert canonical.population is not None
        moved.append(canonical.population)
        notes.update(dict.fromkeys(f"{form}: {note}" for note in canonical.notes))
        tied += sum(int(counts.sum()) for counts in canonical.ties.values())
    if tied:
        notes[f"{form}: {tied:,} units with equal keys, of all networks, kept their order"] = None
    return moved[0], moved[1], tuple(notes)


def _aligned(
    a: Population, b: Population, symmetry: Symmetry, folder: Path | None, seed: int, executor: Executor
) -> PopulationPair:
    both = Population.concatenate([a, b])
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(seed))
    path = None if folder is None else folder / "both"
    aligned = align(both[order], symmetry, path=path, executor=executor).population[order.argsort()]
    return aligned[: len(a)], aligned[len(a) :], ()


PRESETS = {
    "median": (("gaussian", "median"),),
    "pooled": (("laplace", "pooled"), ("gaussian", "pooled")),
    "paper": (("laplace", "paper"), ("gaussian", "paper")),
    "paper-floors": (("laplace", "paper-floors"), ("gaussian", "paper-floors")),
}


class MMDTest:
    """The MMD of distances, its permutation test and its interval, with the same random numbers in every form.

    What is exchanged and drawn again are runs, because only runs are independent. Where every run of both populations
    has equally many members, whole runs change sides, and the statistic is the one without pairs of one run. Where
    sizes differ, one member is drawn of each run and these change sides: fewer, but exchangeable if runs follow one
    law.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        preset: str = "median",
        permutations: int = 999,
        n_resamples: int = 1000,
        confidence_level: float = 0.95,
        seed: int = 0,
    ) -> None:
        if preset not in PRESETS:
            raise InputError(f'expected preset {", ".join(PRESETS)}, found {preset!r}: give "median"')
        if permutations < 0 or n_resamples < 0:
            raise InputError(
                f"expected 0 or more permutations and n_resamples, found {permutations} and {n_resamples}: 0 is for "
                "none"
            )
        self.runs, self.preset, self.confidence_level = runs, preset, confidence_level
        percentiles(torch.zeros(1), confidence_level)  # refuses what is no level, before anything is measured
        generator = torch.Generator().manual_seed(seed)
        self.chosen = runs.one_of_each(generator)
        count, split = len(runs.sizes), runs.split
        # Two runs can only change places, which the statistic does not notice: no p-value says anything.
        self.sides = random_sides(count, split, permutations, generator) if permutations and count > 2 else None
        enough = n_resamples and min(runs.counts) >= FEWEST
        self.counts = random_counts(count, split, n_resamples, generator) if enough else None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that the kernels need."""
        return tuple(dict.fromkeys(metric_of(kernel) for kernel, _ in PRESETS[self.preset]))

    def result(self, measured: Distances) -> MMDResult:
        """The MMD of two populations by their distances, which are used up."""
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
            low, high = percentiles(torch.stack(drawn).mean(0), self.confidence_level)
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


FEW = 10  # runs; below, a bootstrap over runs is rough
LEVEL = 0.05  # p-values that cannot get below this are worth a word


def notes_on(runs: Runs, *, permutations: int, n_resamples: int) -> tuple[str, ...]:
    """Sentences about what runs of these numbers can show; 0 permutations or resamples are none."""
    notes, what, fewest = [], "networks" if runs.trivial else "runs", min(runs.counts)
    if runs.counts == (1, 1):
        notes.append(
            "one run against one run: nothing tells how far two runs of one law are apart, so there is no p-value, no "
            "part of runs and no interval"
        )
    elif fewest == 1:
        notes.append(
            "a population of one run: what runs explain is judged by the other population, and there is no interval"
        )
    elif n_resamples and fewest < FEWEST:
        notes.append(f"{fewest} {what} on one side: too few to be drawn again, so there is no interval")
    elif n_resamples and fewest < FEW:
        notes.append(f"{fewest} {what} on one side: intervals from so few are rough, and often too narrow")
    least = smallest_p(runs, permutations)
    if permutations and sum(runs.counts) > 2 and least > LEVEL:
        notes.append(f"{runs.counts[0]} against {runs.counts[1]} {what}: p cannot be much below {least:.2g}")
    if len(runs.sizes.unique()) > 1:
        notes.append("runs of unequal size: the test compares one network of each run")
    if runs.shared:
        notes.append(
            "both populations hold networks of one run: they are not independent, and p-values are not to be used"
        )
    return tuple(notes)


def smallest_p(runs: Runs, permutations: int) -> float:
    """The p-value of populations that could not be further apart: one division of runs out of all."""
    first, second = runs.counts
    return max((2 if first == second else 1) / comb(first + second, first), 1 / (1 + permutations))


HELD = 1 << 30  # bytes of predictions in memory: inputs are cut into pieces that give as many


def compare_functions(
    test: MMDTest,
    model: nn.Module,
    a: Population,
    b: Population,
    inputs: Inputs,
    quantity: Quantity | None = None,
    *,
    executor: Executor | None = None,
) -> MMDResult:
    """Compare predictions as if they were weights.

    Distances add up over pieces of the inputs. The output is, by default, probabilities where there are several
    outputs for an example, else values.

    Raises:
        InputError: the networks do not give numbers that could be close to each other.
    """
    answer = answers(model, a.member(0), inputs)
    if not answer.is_floating_point():
        raise InputError(
            f"expected networks that give floating-point numbers to compare their functions, found {answer.dtype}: "
            "wrap the model so that it returns its scores, not class numbers"
        )
    quantity = quantity or ("probabilities" if answer.dim() > 1 and answer.shape[1] > 1 else "values")
    total: Distances | None = None
    where = executor or SerialExecutor()
    for piece in pieces(answer, len(a) + len(b), inputs, HELD):
        first, second = (
            Population.from_stacked(
                {"predictions": predict(model, population, piece, quantity=quantity, executor=where)}
            )
            for population in (a, b)
        )
        ((_, distances),) = tensor_distances(first, second, test.metrics, where)
        total = distances.added_to(total)
    assert total is not None  # there is at least one example
    return test.result(total)


ROUNDING = 8  # units of rounding that bringing a network into a form may cost each weight


def discrepancy(
    a: Population,
    b: Population,
    *,
    symmetry: Symmetry | None = None,
    normal_forms: str | Sequence[str] | None = None,
    model: nn.Module | None = None,
    inputs: AnyInputs = None,
    quantity: Quantity | None = None,
    output: OutputPart = None,
    preset: str = "median",
    permutations: int = 999,
    n_resamples: int = 1000,
    confidence_level: float = 0.95,
    layers: bool = True,
    seed: int = 0,
    scratch: PathLike | None = None,
    progress: Progress | bool | None = None,
    workers: int | None = None,
    executor: str | Executor | None = None,
) -> Discrepancy:
    """Measure how far two populations are apart by the squared MMD of their weights and of their functions.

    Populations are read in blocks; neither is ever held in memory as a whole, but a few numbers for each pair of
    members are: 0.5 GB for each of three matrices of 8,192 networks. `chain` of a population tells which members share
    a run; without it every member counts as independent.

    >>> import torch
    >>> population = Population.from_stacked({"w": torch.arange(12.0).view(6, 2)})
    >>> round(discrepancy(population[:3], population[3:], permutations=19, n_resamples=0).raw.total.squared, 3)
    0.868

    Args:
        a: networks, in memory or on disk.
        b: networks of the same architecture to compare with, such as a reference.
        symmetry: of their model; without it only raw weights are compared.
        normal_forms: one or several ways to remove symmetries, "SCALE/ORDER" or "aligned"; "balanced/max" by default,
            "unit-norm/max" as in paper 2, `NORMAL_FORMS` for a table of how much hangs on it.
        model: with `inputs`, also compare what the networks compute.
        inputs: as the model takes them.
        quantity: what is compared as the function, "probabilities" or "values", as in `predict`; by default
            probabilities where the networks give several outputs for an example, which are then taken for classes.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a number.
        preset: "median" (a Gaussian kernel at the median distance), "pooled" (Laplace and Gaussian kernels at ten
            bandwidths each), "paper" or "paper-floors" (those of paper 2). All but the first need l1 distances, which
            take many times as long. Bandwidths are taken anew in every normal form.
        permutations: permutations of the test; 0 for none.
        n_resamples: resamples of the bootstrap interval; 0 for none.
        confidence_level: confidence level of the interval.
        layers: also compare every tensor by itself.
        seed: seed of permutations and resamples.
        scratch: folder for populations in a normal form when they exceed 1 GB; the system's temporary folder by
            default.
        progress: True for a line on stderr with the time left, or a function that is called with (steps done, steps,
            text) when a step begins.
        workers: processes; the result does not depend on their number.
        executor: "local" or the address of a Ray cluster, or an open Executor.

    Raises:
        InputError: an option cannot be used, or a population has fewer than 2 networks.
        SpecError: the networks do not fit together, or hold NaN.
    """
    for each in (a, b):
        check_population(each)
    if model is not None:
        model, inputs = select_output(model, output), measured_of(inputs, model)
    forms = _normal_forms(normal_forms, symmetry)
    names = weight_names(a, b, _frozen(symmetry, model))
    if min(len(a), len(b)) < 2:
        raise InputError(f"expected at least 2 networks on each side, found {len(a)} and {len(b)}: add members")
    if (model is None) != (inputs is None):
        raise InputError("model and inputs go together, found one of them: give both to compare functions")
    runs = Runs.of(a, b)
    test = MMDTest(
        runs,
        preset=preset,
        permutations=permutations,
        n_resamples=n_resamples,
        confidence_level=confidence_level,
        seed=seed,
    )
    steps = ["comparing raw weights", *(f"comparing in the form {form}" for form in forms), "comparing functions"]
    total = len(steps) - (model is None)

    listener = progress_of(progress)

    def show(step: int) -> None:
        if listener is not None:
            listener(step, total, steps[step])

    compared: dict[str, Compared] = {}
    function = None
    with executor_for(workers, executor) as opened:
        show(0)
        raw, spreads = _compare(a, b, test, layers, opened, names)
        for step, form in enumerate(forms, 1):
            assert symmetry is not None  # _normal_forms has seen to it
            show(step)
            with in_normal_form(a, b, symmetry, form, executor=opened, scratch=scratch, seed=seed) as pair:
                here, there, notes = pair
                compared[form] = replace(_compare(here, there, test, layers, opened, names, spreads)[0], notes=notes)
        if model is not None and inputs is not None:
            show(total - 1)
            function = compare_functions(test, model, a, b, inputs, quantity, executor=opened)
    notes = notes_on(runs, permutations=permutations, n_resamples=n_resamples)
    return Discrepancy((len(a), len(b)), runs.counts, runs.shares, preset, raw, compared, function, notes)


def _frozen(symmetry: Symmetry | None, model: nn.Module | None) -> Collection[str]:
    """The constants that the symmetry tells, or else the model: its frozen parameters."""
    if symmetry is not None or model is None:
        return () if symmetry is None else symmetry.frozen
    first, trained = shared_names(model), trained_parameters(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name for name in parameters if first.get(name, name) not in trained}


def _normal_forms(forms: str | Sequence[str] | None, symmetry: Symmetry | None) -> list[str]:
    if forms is None:
        return [] if symmetry is None else [FORM]
    chosen = [forms] if isinstance(forms, str) else list(forms)
    for form in chosen:
        check_form(form)
    if chosen and symmetry is None:
        raise InputError(f"expected a symmetry for the form {chosen[0]}, found none: give symmetry= too")
    return chosen


def _compare(
    a: Population,
    b: Population,
    test: MMDTest,
    layers: bool,
    executor: Executor,
    names: Sequence[str],
    before: Mapping[str, float] | None = None,
) -> tuple[Compared, dict[str, float]]:
    """Both populations compared, and `Distances.spread` of each tensor.

    The distances of a tensor are dropped as soon as it has been compared. `before` are the spreads before networks were
    brought into a normal form, which may give all of them the same tensor (batch norms of weight 1) but for rounding;
    that is then taken off.
    """
    total: Distances | None = None
    results: dict[str, MMDResult] = {}
    spreads: dict[str, float] = {}
    for name, distances in tensor_distances(a, b, test.metrics, executor, names):
        spreads[name] = distances.spread
        if before is not None and distances.spread <= ROUNDING < before[name]:
            distances = distances.none()
        total = distances.added_to(total)
        if layers:
            results[name] = test.result(distances)
        del distances  # before the next is measured
    assert total is not None  # there are weights: weight_names has seen to it
    means = total.means
    return Compared(test.result(total), results, *means), spreads
