"""ARFF, the text format of OpenML: a list of attributes, then one line of values per example.

Numeric attributes become one column, nominal ones one column per level. Values may be quoted. Sparse rows, dates and
texts are refused, and so are missing values: what to put in their place is not for a reader to decide.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onebasin.data.images import check_columns
from onebasin.errors import InputError, StorageError

_NUMERIC = ("numeric", "real", "integer")
_WORD = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,{}]+"""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_WORD})\s+(\{{.*\}}|\w+)", re.IGNORECASE)
# No two parts of it could share a run of spaces in many ways: a damaged line must not take minutes.
_VALUE = re.compile(r"""\s*((?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*(?=,|$)|[^,]*)(?:,|$)""")
_ESCAPE = re.compile(r"\\(.)")


@dataclass(frozen=True)
class Attribute:
    """A column: its name, and its levels where it is nominal; `kind` is numeric, nominal, or what it says."""

    name: str
    kind: str
    levels: tuple[str, ...] = ()


def read_table(
    lines: Iterable[str], target: str, where: str, skipped: Collection[str] = ()
) -> tuple[Tensor, Tensor, int | None]:
    """Inputs, targets and the number of classes.

    >>> lines = ["@relation r", "@attribute a numeric", "@attribute b {no, yes}", "@data", "1.5, yes", "2,no"]
    >>> read_table(lines, "b", "here")
    (tensor([[1.5000], [2.0000]]), tensor([1, 0]), 2)

    Args:
        lines: of the file.
        target: name of the attribute to predict. Several, separated by commas, must all be numeric.
        where: the file, for messages.
        skipped: names of attributes to leave out.

    Returns:
        Inputs float32 (n, columns); class numbers int64 (n,) in the order of the levels, or values float32
        (n, targets).

    Raises:
        InputError: there is no such target, a value is missing, or an attribute is no number and no category.
        StorageError: a line does not fit the attributes.
    """
    remaining = iter(lines)
    attributes = _attributes(remaining, where)
    names = [attribute.name for attribute in attributes]
    goals = [target] if target in names else [goal.strip() for goal in target.split(",")]
    if len(set(names)) < len(names):
        raise StorageError(
            f"expected a name of its own for every attribute of {where}, found one twice: fetch it again"
        )
    if unknown := [goal for goal in goals if goal not in names]:
        raise InputError(f"expected {unknown[0]!r} among the attributes of {where}, found {', '.join(names[:8])}")
    used = [place for place, name in enumerate(names) if name not in skipped or name in goals]
    for place in used:
        if attributes[place].kind not in ("numeric", "nominal"):
            raise InputError(
                f"expected numbers or categories in {where}, found {attributes[place].kind} in {names[place]!r}: "
                "convert the table and give it as .npz"
            )
    values = _values(remaining, attributes, used, where)
    columns = {names[place]: (attributes[place], values[:, number]) for number, place in enumerate(used)}
    shown = [columns[name] for name in columns if name not in goals]
    check_columns(len(values), sum(max(1, len(attribute.levels)) for attribute, _ in shown), where)
    inputs = [_input(*column) for column in shown]
    if not inputs:
        raise InputError(f"expected attributes beside the target in {where}, found none: choose another target")
    outputs, classes = _targets([columns[goal] for goal in goals], where)
    return torch.cat(inputs, 1), outputs, classes


def _attributes(lines: Iterator[str], where: str) -> list[Attribute]:
    """The head of the file, up to and with @data."""
    found: list[Attribute] = []
    for line in lines:
        text = line.strip()
        if text.lower().startswith("@data"):
            if not found:
                break
            return found
        if text.lower().startswith("@attribute"):
            match = _ATTRIBUTE.match(text)
            if match is None:
                raise StorageError(f"expected @attribute NAME KIND in {where}, found {text[:80]!r}: fetch it again")
            found.append(_attribute(_plain(match[1]), match[2]))
    raise StorageError(f"expected attributes and @data in {where}, found its end: fetch it again")


def _attribute(name: str, kind: str) -> Attribute:
    if kind.startswith("{"):
        return Attribute(name, "nominal", tuple(_fields(kind[1:-1])))
    return Attribute(name, "numeric" if kind.lower() in _NUMERIC else kind.lower())


def _plain(text: str) -> str:
    """A value without its quotes."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return _ESCAPE.sub(r"\1", text[1:-1])
    return text


def _fields(line: str) -> list[str]:
    """The values of one line."""
    if "'" not in line and '"' not in line:
        return [text.strip() for text in line.split(",")]
    found, place = [], 0
    while place <= len(line):
        match = _VALUE.match(line, place)
        if match is None:
            return []
        found.append(_plain(match[1].strip()))
        if match.end() == len(line) and not match[0].endswith(","):
            break
        place = match.end()
    return found


def _values(lines: Iterable[str], attributes: list[Attribute], used: list[int], where: str) -> Tensor:
    """(n, used attributes), float64: numbers, and places of levels."""
    codes = [{level: float(place) for place, level in enumerate(attributes[number].levels)} for number in used]
    values, rows = array("d"), 0
    for line in lines:
        text = line.strip()
        if not text or text.startswith("%"):
            continue
        if text.startswith("{"):
            raise InputError(f"expected all values in every row of {where}, found sparse rows: convert it to .npz")
        fields = _fields(text)
        rows += 1
        if len(fields) != len(attributes):
            raise StorageError(
                f"expected {len(attributes)} values in row {rows} of {where}, found {len(fields)}: fetch it again"
            )
        try:
            values.extend(
                code[fields[place]] if code else float(fields[place]) for place, code in zip(used, codes, strict=True)
            )
        except (ValueError, KeyError) as error:
            raise _unreadable(fields, attributes, used, rows, where) from error
    if not rows:
        raise StorageError(f"expected rows after @data in {where}, found none: fetch it again")
    return torch.frombuffer(values, dtype=torch.float64).reshape(rows, len(used)).clone()


def _unreadable(fields: list[str], attributes: list[Attribute], used: list[int], row: int, where: str) -> Exception:
    missing = [attributes[place].name for place in used if fields[place] == "?"]
    if missing:
        return InputError(
            f"expected a value everywhere in {where}, found {', '.join(missing[:3])} missing in row {row}: fill the "
            "gaps or leave such rows out, and give the table as .npz"
        )
    return StorageError(f"expected numbers and declared levels in {where}, found others in row {row}: fetch it again")


def _input(attribute: Attribute, values: Tensor) -> Tensor:
    if attribute.kind == "numeric":
        return values.float()[:, None]
    return torch.nn.functional.one_hot(values.long(), len(attribute.levels)).float()


def _targets(columns: list[tuple[Attribute, Tensor]], where: str) -> tuple[Tensor, int | None]:
    kinds = {attribute.kind for attribute, _ in columns}
    if kinds == {"numeric"}:
        return torch.stack([values for _, values in columns], 1).float(), None
    if len(columns) > 1:
        raise InputError(
            f"expected one category or several numbers to predict in {where}, found {len(columns)} targets"
        )
    attribute, values = columns[0]
    return values.long(), len(attribute.levels)
