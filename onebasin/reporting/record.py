"""Records of what a study found: sections with text, tables, figures and claims, as plain data, and their JSON file.

Nothing here needs torch, so that a report can be built from a stored record anywhere, years later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from onebasin.errors import DiskError, InputError, StorageError
from onebasin.storage import write_text

VERDICTS = ("reproduced", "reproduced with a caveat", "not reproduced")


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        text: what is claimed, in one sentence.
        verdict: one of `VERDICTS`. It is computed from numbers, never typed in.
        found: our numbers, with their errors.
        published: theirs.
        caveat: what a reader must know; needed for the second verdict.
    """

    text: str
    verdict: str
    found: str
    published: str = ""
    caveat: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise InputError(f"a verdict is one of {VERDICTS}, found {self.verdict!r}: give '{VERDICTS[0]}'")
        if self.verdict == VERDICTS[1] and not self.caveat:
            raise InputError(f"a claim that is {VERDICTS[1]} needs it in words: give caveat=")


def tally(claims: Iterable[Claim]) -> str:
    """How many claims got which verdict, in words.

    >>> tally([Claim("a", "reproduced", "1"), Claim("b", "not reproduced", "2"), Claim("c", "reproduced", "3")])
    '2 reproduced, 1 not reproduced'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])


KINDS = ("lines", "points", "bars", "histogram", "heat")
AXIS_SCALES = ("linear", "log")
DIRECTIONS = ("horizontal", "vertical", "diagonal")


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: what it measures, with its unit.
        scale: "linear" or "log".
        low, high: its ends, None to fit the data.
        names: of the places 0, 1, 2, ..., for bars and for grids of named rows.
    """

    label: str
    scale: str = "linear"
    low: float | None = None
    high: float | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scale not in AXIS_SCALES:
            raise InputError(f"an axis is one of {AXIS_SCALES}, found {self.scale!r}: give 'linear'")


@dataclass(frozen=True)
class Series:
    """One named set of points.

    Attributes:
        name: in the legend; "" for none.
        x: places. Of bars: numbers of names. Of a histogram: the edges of its bins, one more than `y`.
        y: values, heights or counts; None leaves a gap.
        low, high: ends of error bars or of the band, as long as `y`, or empty.
        dashed: whether its line is dashed, as published values and baselines are.
        shade: which colour of the palette, by number; None takes the next one. Series of the same thing in several
            panels should have the same.
        labels: names of its points, as many as `y`, or none: shown on hover, and written beside few points.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    dashed: bool = False
    shade: int | None = None
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.labels) not in (0, len(self.y)):
            raise InputError(
                f"series {self.name!r} has {len(self.labels)} labels for {len(self.y)} points: give as many"
            )
        if not all(map(math.isfinite, self.x)):
            raise InputError(f"series {self.name!r} has a place that is NaN or infinite: leave it out")
        if len(self.x) not in (len(self.y), len(self.y) + 1):
            raise InputError(f"series {self.name!r} has {len(self.x)} places for {len(self.y)} values: give as many")
        if any(len(ends) not in (0, len(self.y)) for ends in (self.low, self.high)):
            raise InputError(f"series {self.name!r} should have one end of error per value, or none: give as many")


@dataclass(frozen=True)
class Rule:
    """A straight line across a panel: y = value ("horizontal"), x = value ("vertical"), or y = x ("diagonal")."""

    name: str
    value: float = 0.0
    direction: str = "horizontal"

    def __post_init__(self) -> None:
        if not math.isfinite(self.value) or self.direction not in DIRECTIONS:
            raise InputError(
                f"a rule has a finite value and one of the directions {DIRECTIONS}, found {self.value} and "
                f"{self.direction!r}: give others, or leave it out"
            )


@dataclass(frozen=True)
class Panel:
    """One coordinate system.

    Attributes:
        kind: "lines", "points", "bars", "histogram" or "heat".
        title: what tells it from the other panels of the figure; "" for a single one.
        x, y: axes.
        series: what is drawn. Of a heat map: points upon it.
        rules: straight lines for comparison.
        grid: values of a heat map, a row for each place of `rows` (y) with a value for each place of `columns` (x).
        columns, rows: places of a heat map, ascending.
        colour: what the colour of a heat map means.
    """

    kind: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    rules: tuple[Rule, ...] = ()
    grid: tuple[tuple[float | None, ...], ...] = ()
    columns: tuple[float, ...] = ()
    rows: tuple[float, ...] = ()
    colour: Axis | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"a panel is one of {KINDS}, found {self.kind!r}: give 'lines'")
        if self.kind == "heat" and (
            len(self.grid) != len(self.rows) or any(len(row) != len(self.columns) for row in self.grid)
        ):
            raise InputError(
                f"a heat map should have {len(self.rows)} rows of {len(self.columns)} values, found {len(self.grid)} "
                "rows or others: give one value per place"
            )
        if not all(map(math.isfinite, (*self.columns, *self.rows))):
            raise InputError("a heat map has a place that is NaN or infinite: leave it out")
        bins = 1 if self.kind == "histogram" else 0
        for series in self.series:
            if len(series.x) != len(series.y) + bins:
                raise InputError(f"series {series.name!r} of a {self.kind} has {len(series.x)} places: see `Series.x`")


@dataclass(frozen=True)
class Figure:
    """Panels side by side.

    Attributes:
        name: a word for addresses and files, lower case with hyphens; unique in its record.
        title: the question that it answers.
        caption: the answer, with numbers, and how it was measured.
        panels: at least one.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


BETTER = ("higher", "lower", "")
DIGITS = 15  # a float has no more


@dataclass(frozen=True)
class Number:
    """One measured number.

    Attributes:
        value: None where nothing can be measured; then `note` says why.
        error: its standard error, None where there is one run only. What it was taken over stands in `Table.errors`.
        published: what the paper reports in this place.
        note: a remark that is shown with the number.
        low, high: ends of its interval, shown instead of the error; both or none.
    """

    value: float | None
    error: float | None = None
    published: float | None = None
    note: str = ""
    low: float | None = None
    high: float | None = None


Cell = Number | str | None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: its head, short.
        help: what it means: a definition, shown on hover and in the glossary.
        better: "higher", "lower", or "" where neither is.
        digits: digits after the point.
        unit: of all its numbers, as "%", "s", "nats".
    """

    name: str
    help: str = ""
    better: str = ""
    digits: int = 3
    unit: str = ""

    def __post_init__(self) -> None:
        if self.better not in BETTER:
            raise InputError(f"a column is better when one of {BETTER}, found {self.better!r}: give ''")
        if not 0 <= self.digits <= DIGITS:
            raise InputError(f"a column shows 0 to {DIGITS} digits after the point, found {self.digits}: give 3")


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the first column names the rows.

    Attributes:
        name: a word for addresses and files, lower case with hyphens; unique in its record.
        title: what the table tells, as a sentence or question.
        columns: the heads.
        rows: each as long as `columns`.
        errors: what the errors of its numbers are, as "± one standard error over 5 seeds".
        note: what a reader must know beside it.
        rivals: whether rows compete, so that the best of each column is marked; False where each row measures
            something else, as other inputs do.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    errors: str = ""
    note: str = ""
    rivals: bool = True

    def __post_init__(self) -> None:
        wrong = [number for number, row in enumerate(self.rows) if len(row) != len(self.columns)]
        if wrong:
            raise InputError(
                f"each row of table {self.name} should have {len(self.columns)} cells, row {wrong[0]} has "
                f"{len(self.rows[wrong[0]])}: give one cell per column"
            )


@dataclass(frozen=True)
class Section:
    """One part of a study.

    Attributes:
        name: a word for addresses, lower case with hyphens; unique in its record.
        title: the question.
        text: paragraphs: the answer first.
        items: tables and figures, in order.
        claims: what was to be checked here.
        command: what makes this section again.
        seconds: how long it took.
    """

    name: str
    title: str
    text: tuple[str, ...]
    items: tuple[Table | Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    command: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """A whole study.

    Attributes:
        name: a word, as "demo", "compact" or "symmetry".
        title: of the page.
        summary: about ten sentences that can be understood without the sections.
        sections: in the order of reading.
        command: what makes the whole record again.
        settings: what was run: preset, seed, sizes, budgets; plain values.
        versions: of the packages.
        terms: word -> definition, for the glossary of the page.
        seconds: how long it took, all parts together.
        values: the numbers of a result for programs, under the names of its attributes; anything that JSON holds.
    """

    name: str
    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...]
    command: str
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [[section.name for section in self.sections], [item.name for item in self.items]]
        twice = sorted({name for kind in names for name in kind if kind.count(name) > 1})
        if twice:
            raise InputError(
                f"sections of a record should have different names, and so should its tables and figures, found "
                f"{', '.join(twice)} twice: rename one"
            )

    @property
    def items(self) -> Iterator[Table | Figure]:
        """All tables and figures."""
        return (item for section in self.sections for item in section.items)

    @property
    def claims(self) -> Iterator[Claim]:
        """All claims."""
        return (claim for section in self.sections for claim in section.claims)


# Between dataclasses of a record and plain JSON values; what comes in is checked against their types.

_CLASSES = {
    kind.__name__: kind for kind in (Axis, Claim, Column, Figure, Number, Panel, Record, Rule, Section, Series, Table)
}
_KIND = "is"  # the key that names the class of an object


def encode(value: Any) -> Any:
    """JSON values for a record or a part of it; NaN and infinity, which JSON does not know, become null.

    >>> encode(Number(0.5, error=float("nan")))
    {'is': 'Number', 'value': 0.5}

    Raises:
        InputError: something in it is neither text nor number.
    """
    if dataclasses.is_dataclass(value):
        changed = [field.name for field in dataclasses.fields(value) if _differs(value, field)]
        fields = {name: encode(getattr(value, name)) for name in changed}
        given = {name: item for name, item in fields.items() if item is not None or name == "value"}
        return {_KIND: type(value).__name__, **given}
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Real):  # also those of numpy, which JSON does not know
        return int(value) if isinstance(value, Integral) else float(value) if math.isfinite(value) else None
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {str(name): encode(item) for name, item in value.items()}
    raise InputError(f"a record holds texts and numbers, found a {type(value).__name__}: convert it to one of these")


def decode(value: Any, expected: Any = Record, where: str = "record") -> Any:
    """The dataclass for JSON values.

    Args:
        value: what `json.loads` gave.
        expected: the class, or another type of a field.
        where: the place, for messages.

    Raises:
        StorageError: the value is not of the expected type; the message names the place.
    """
    if expected is Any:
        return value
    origin = get_origin(expected)
    if origin in (Union, types.UnionType):
        return _one_of(value, get_args(expected), where)
    if origin is tuple:
        kind = get_args(expected)[0]
        return tuple(decode(item, kind, f"{where}[{place}]") for place, item in enumerate(_checked(value, list, where)))
    if origin is dict:
        kind = get_args(expected)[1]
        return {name: decode(item, kind, f"{where}.{name}") for name, item in _checked(value, dict, where).items()}
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        return _object(value, where, expected.__name__)
    if expected is float:
        number = _checked(value, int | float, where)
        if isinstance(number, bool) or not abs(number) < math.inf or abs(number) > sys.float_info.max:
            return _refuse(value, "number", where)
        return float(number)
    return _checked(value, expected, where)


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether a field differs from its default: a reader fills in the others."""
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(getattr(value, field.name) != default)


def _one_of(value: Any, kinds: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, dict):
        names = [kind.__name__ for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
        return _object(value, where, *names)
    plain = [kind for kind in kinds if kind in (str, float, bool, int)]
    for kind in plain:
        if isinstance(value, bool) != (kind is bool):
            continue
        if isinstance(value, int | float if kind is float else kind):
            return decode(value, float, where) if kind is float else value
    return _refuse(value, " or ".join(kind.__name__ for kind in kinds), where)


def _object(value: Any, where: str, *names: str) -> Any:
    entries = _checked(value, dict, where)
    name = entries.get(_KIND)
    if name not in names:
        _refuse(name, " or ".join(names), f"{where}.{_KIND}")
    kind = _CLASSES[name]
    hints = get_type_hints(kind)
    given = {key: item for key, item in entries.items() if key != _KIND}
    required = {field.name for field in dataclasses.fields(kind) if _needed(field)}
    if unknown := sorted(set(given) - set(hints)):
        _refuse(unknown[0], f"a field of {name}", where)
    if missing := sorted(required - set(given)):
        _refuse(f"no {missing[0]}", f"{missing[0]} in {name}", where)
    return kind(**{key: decode(item, hints[key], f"{where}.{key}") for key, item in given.items()})


def _needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _checked(value: Any, kind: Any, where: str) -> Any:
    return value if isinstance(value, kind) else _refuse(value, getattr(kind, "__name__", str(kind)), where)


def _refuse(value: Any, expected: str, where: str) -> Any:
    shown = repr(value)[:60]
    raise StorageError(f"{where} should be {expected}, found {shown}: the record is damaged or of another version")


FORMAT = "onebasin record"
VERSION = 1
_LARGEST = 256 << 20  # bytes of a record
FILE = "record.json"  # inside the folder of a run


def write_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Write a record; it appears whole or not at all.

    Raises:
        DiskError: the folder cannot be written.
    """
    file = Path(path)
    text = json.dumps({"format": FORMAT, "version": VERSION, "record": encode(record)}, indent=1, allow_nan=False)
    try:
        write_text(file, text + "\n")
    except OSError as error:
        raise DiskError(f"{file} cannot be written ({error.strerror or error}): choose another folder") from error


def read_record(path: str | os.PathLike[str]) -> Record:
    """Read a record from its file, or from the folder of a run.

    Raises:
        StorageError: there is none, or the file is damaged or of another version; the message names the place.
    """
    file = Path(path)
    file = file / FILE if file.is_dir() else file
    if file.exists() and (not file.is_file() or file.stat().st_size > _LARGEST):
        raise StorageError(f"expected a record, but {file} is a device, a folder or endless: give another one")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StorageError(f"there is no record {file}: give the folder of a finished run, or its {FILE}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{file} cannot be read as JSON ({error}): run the command that makes it again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        header = (
            {key: content.get(key) for key in ("format", "version")} if isinstance(content, dict) else "something else"
        )
        raise StorageError(
            f"{file} should be a {FORMAT} of version {VERSION}, found {header}: make it again with this version"
        )
    try:
        record: Record = decode(content.get("record"))
    except InputError as error:  # of the right types, and still no table or figure
        raise StorageError(f"{file} holds what no record can ({error})") from error
    return record
