"""Between dataclasses of a record and plain JSON values; what comes in is checked against their types."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

from onebasin.errors import InputError, StorageError
from onebasin.record.claim import Claim
from onebasin.record.figure import Axis, Figure, Panel, Rule, Series
from onebasin.record.record import Record, Section
from onebasin.record.table import Column, Number, Table

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
        fields = {
            field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value) if _told(value, field)
        }
        return {
            _KIND: type(value).__name__,
            **{name: item for name, item in fields.items() if item is not None or name == "value"},
        }
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


def _told(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether a field differs from its default: a reader fills in the others."""
    return not (field.default is not dataclasses.MISSING and getattr(value, field.name) == field.default)


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
