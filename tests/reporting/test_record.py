"""Records: what is written comes back, and what is damaged is refused with its place."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebasin.errors import InputError, StorageError
from onebasin.reporting.record import (
    KINDS,
    VERDICTS,
    Axis,
    Claim,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Rule,
    Section,
    Series,
    Table,
    decode,
    encode,
    read_record,
    write_record,
)
from tests.sample_record import hostile_record, sample_record

texts = st.text(max_size=8)
floats = st.floats(allow_nan=False, allow_infinity=False)
maybe = st.none() | floats
numbers = st.builds(Number, maybe, maybe, maybe, texts)
columns = st.builds(Column, texts, texts, st.sampled_from(["higher", "lower", ""]), st.integers(0, 6), texts)
axes = st.builds(Axis, texts, st.sampled_from(["linear", "log"]), maybe, maybe, st.lists(texts, max_size=2).map(tuple))
rules = st.builds(Rule, texts, floats, st.sampled_from(["horizontal", "vertical", "diagonal"]))
claims = st.builds(Claim, texts, st.sampled_from(VERDICTS), texts, texts, st.text(min_size=1, max_size=5))


@st.composite
def tables(draw: st.DrawFn, name: str) -> Table:
    heads = draw(st.lists(columns, max_size=3))
    row = st.tuples(*(numbers | texts | st.none() for _ in heads))
    return Table(name, draw(texts), tuple(heads), tuple(draw(st.lists(row, max_size=3))), draw(texts), draw(texts))


@st.composite
def series(draw: st.DrawFn, extra: int) -> Series:
    length = draw(st.integers(0, 4))
    values = st.lists(maybe, min_size=length, max_size=length).map(tuple)
    ends = st.just(()) | values
    places = st.lists(floats, min_size=length + extra, max_size=length + extra).map(tuple)
    shade = st.none() | st.integers(0, 9)
    return Series(draw(texts), draw(places), draw(values), draw(ends), draw(ends), draw(st.booleans()), draw(shade))


@st.composite
def panels(draw: st.DrawFn) -> Panel:
    kind = draw(st.sampled_from(KINDS))
    drawn = tuple(draw(st.lists(series(int(kind == "histogram")), max_size=2))) if kind != "heat" else ()
    high, wide = (draw(st.integers(0, 3)), draw(st.integers(0, 3))) if kind == "heat" else (0, 0)
    row = st.lists(maybe, min_size=wide, max_size=wide).map(tuple)
    grid = tuple(draw(st.lists(row, min_size=high, max_size=high)))
    places = [tuple(float(place) for place in range(count)) for count in (wide, high)]
    crossing = tuple(draw(st.lists(rules, max_size=2)))
    return Panel(kind, draw(texts), draw(axes), draw(axes), drawn, crossing, grid, *places, draw(st.none() | axes))


@st.composite
def records(draw: st.DrawFn) -> Record:
    sections = []
    for number in range(draw(st.integers(0, 2))):
        items: list[Table | Figure] = [draw(tables(f"table-{number}"))] if draw(st.booleans()) else []
        if draw(st.booleans()):
            drawn = tuple(draw(st.lists(panels(), max_size=2)))
            items.append(Figure(f"figure-{number}", draw(texts), draw(texts), drawn))
        told = tuple(draw(st.lists(texts, max_size=2)))
        found = tuple(draw(st.lists(claims, max_size=2)))
        seconds = draw(floats)
        sections.append(Section(f"part-{number}", draw(texts), told, tuple(items), found, draw(texts), seconds))
    plain = texts | st.integers() | floats | st.booleans() | st.none()
    words = st.dictionaries(texts, texts, max_size=2)
    return Record(
        draw(texts),
        draw(texts),
        tuple(draw(st.lists(texts, max_size=2))),
        tuple(sections),
        draw(texts),
        draw(st.dictionaries(texts, plain, max_size=3)),
        draw(words),
        draw(words),
        draw(floats),
    )


@settings(deadline=None, max_examples=150)
@given(records())
def test_what_is_encoded_comes_back(record: Record) -> None:
    text = json.dumps(encode(record), allow_nan=False)
    back = decode(json.loads(text))
    assert back == record
    kinds = {name: type(value) for name, value in record.settings.items()}
    assert {name: type(value) for name, value in back.settings.items()} == kinds  # True is not 1, and 1 is not 1.0


@pytest.mark.parametrize("make", [sample_record, hostile_record])
def test_what_is_written_is_read(make: Any, tmp_path: Path) -> None:
    write_record(make(), tmp_path / "record.json")
    assert read_record(tmp_path) == read_record(tmp_path / "record.json") == make()
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_json_does_not_know_is_missing(value: float) -> None:
    number = Number(value, error=value, published=value)
    assert decode(encode(number), Number) == Number(None)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values below."""
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in below for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    inner = copy.copy(value)
    inner[path[0]] = replaced(value[path[0]], path[1:], new) if path[1:] else new
    return inner


def spoken(path: tuple[Any, ...]) -> str:
    return "record" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


SMALL = encode(
    Record(
        "name",
        "title",
        ("one",),
        (Section("a", "A?", ("text",), (Table("t", "T", (Column("c"),), ((Number(1.0),),)),)),),
        "command",
    )
)


@pytest.mark.parametrize("path", places(SMALL), ids=spoken)
def test_a_value_of_the_wrong_kind_is_refused_with_its_place(path: tuple[Any, ...]) -> None:
    wrong = replaced(SMALL, path, [[["such thing"]]])
    with pytest.raises(StorageError) as found:
        decode(wrong)
    assert spoken(path) in str(found.value)
    assert "such thing" in str(found.value)


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [((), "colour", "red"), (("sections", 0), "colour", "red"), (("sections", 0, "items", 0), "is", "Record")],
)
def test_unknown_fields_and_classes_are_refused(path: tuple[Any, ...], key: str, value: str) -> None:
    wrong = replaced(SMALL, (*path, key), value)
    with pytest.raises(StorageError) as found:
        decode(wrong)
    assert spoken(path) in str(found.value)


@pytest.mark.parametrize("field", ["name", "title", "sections", "command"])
def test_missing_fields_are_refused(field: str) -> None:
    with pytest.raises(StorageError, match=field):
        decode({key: value for key, value in SMALL.items() if key != field})


def test_true_is_no_number() -> None:
    with pytest.raises(StorageError, match=r"record\.seconds should be number, found True"):
        decode({**SMALL, "seconds": True})


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"format": "onebasin record", "version": 2, "record": SMALL}, "'version': 2"),
        ({"format": "other", "version": 1, "record": SMALL}, "'format': 'other'"),
        ([], "something else"),
        ({"format": "onebasin record", "version": 1}, "should be dict, found None"),
    ],
)
def test_another_format_or_version_is_refused(content: Any, told: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(content))
    with pytest.raises(StorageError) as found:
        read_record(tmp_path)
    assert told in str(found.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(StorageError, match=r"record\.json cannot be read as JSON"):
        read_record(tmp_path)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no record"):
        read_record(tmp_path)


def test_a_record_that_contradicts_itself_is_refused_as_damage(tmp_path: Path) -> None:
    wrong = replaced(SMALL, ("sections", 0, "items", 0, "rows", 0), [None, None])
    (tmp_path / "record.json").write_text(json.dumps({"format": "onebasin record", "version": 1, "record": wrong}))
    with pytest.raises(StorageError, match="should have 1 cells"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Claim("a", "perhaps", "b"),
        lambda: Claim("a", VERDICTS[1], "b"),
        lambda: Axis("a", "cubic"),
        lambda: Column("a", better="bigger"),
        lambda: Series("a", (1.0, 2.0), ()),
        lambda: Series("a", (1.0,), (1.0,), (1.0, 2.0)),
        lambda: Table("t", "T", (Column("c"),), ((None, None),)),
        lambda: Panel("pie", "", Axis(""), Axis("")),
        lambda: Panel("lines", "", Axis(""), Axis(""), (Series("a", (1.0,), ()),)),
        lambda: Panel("heat", "", Axis(""), Axis(""), grid=((1.0,),), columns=(1.0, 2.0), rows=(1.0,)),
        lambda: Record("r", "R", (), (Section("a", "A", ()), Section("a", "B", ())), ""),
    ],
)
def test_what_cannot_be_is_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()
