"""Records of what verbs found, for ``onebasin report``: results of the library, and numbers for people and programs."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click
from click.core import ParameterSource

from onebasin.cli.tables import short
from onebasin.reporting import Column, Names, Record, Result, Table, encode, result_record

_MOST, _DEEP = 60, 3  # rows of the table of numbers, and how deep they lie


def record_of(name: str, title: str, text: str | list[str], values: Mapping[str, Any], *results: object) -> Record:
    """The record of what a verb found.

    Args:
        name: a word, as "alignment".
        title: what was measured on what.
        text: paragraphs before those of the results; the first of all is the answer.
        values: the numbers, for programs; single ones become rows of a table.
        *results: of the library; those that are `Result`s add their tables and figures.
    """
    shown = [result.record() for result in results if isinstance(result, Result)]
    sections = [section for record in shown for section in record.sections]
    names = Names()
    items = [replace(item, name=names.fresh(item.name)) for section in sections for item in section.items]
    if not items:
        rows = tuple(_leaves(values, 0))[:_MOST]
        items = [Table("numbers", f"Numbers of this {name}", (Column("quantity"), Column("value")), rows)]
    paragraphs = [text] if isinstance(text, str) else text
    paragraphs = list(dict.fromkeys([*paragraphs, *(line for section in sections for line in section.text)]))
    record = result_record(
        name,
        title,
        paragraphs,
        items,
        values=dict(values),
        terms={word: meaning for record in shown for word, meaning in record.terms.items()},
    )
    return replace(record, command=command_line(click.get_current_context()))


def as_json(values: Mapping[str, Any]) -> str:
    """The numbers as JSON text; null where one is not finite."""
    return json.dumps(encode(dict(values)), indent=1, allow_nan=False)


def command_line(context: click.Context) -> str:
    """The command that was given."""
    words = [context.command_path]
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name)
        if value is True:
            words.append(parameter.opts[-1])
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [str(one)] if isinstance(parameter, click.Argument) else [parameter.opts[-1], str(one)]
    return f"{words[0]} {shlex.join(words[1:])}"


def _leaves(values: Mapping[str, Any], depth: int) -> Iterator[tuple[str, str]]:
    """Names and texts of single values; lists are left out."""
    for name, value in values.items():
        label = str(name).replace("_", " ")
        if isinstance(value, Mapping):
            if depth < _DEEP:
                yield from ((f"{label}: {below}", text) for below, text in _leaves(value, depth + 1))
        elif isinstance(value, bool | str) and value != "":
            yield label, str(value).lower() if isinstance(value, bool) else value
        elif isinstance(value, int | float):
            yield label, short(value)
