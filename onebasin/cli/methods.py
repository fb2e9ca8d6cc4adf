"""The methods of ``sample`` as their dataclasses document them, and the method that a command line asks for."""

import inspect
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import click

from onebasin.cli.load import load_object
from onebasin.errors import InputError, check_options
from onebasin.inference import METHODS, Method, method_of, options_of
from onebasin.inference import sample as draw

_OF_THE_VERB = {"model", "data", "method", "path", "progress", "misplaced"}  # named otherwise on the command line
_ONLY_IN_PYTHON = {"log_density"}  # a function cannot be written on a command line
KEYWORDS = set(inspect.signature(draw).parameters) - _OF_THE_VERB  # of `sample`, whatever the method


class MethodName(click.ParamType):  # type: ignore[type-arg]  # generic in some versions only
    """The name of a method, or FILE:METHOD for an object of the user's file."""

    name = "method"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        if value not in METHODS and ":" not in value:
            self.fail(f"{value!r} is not one of {', '.join(METHODS)}, nor a FILE:METHOD.", param, ctx)
        return value


class WithMethods(click.Command):
    """A command whose help ends with the methods."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the methods, one sentence each."""
        with formatter.section("Methods"):
            formatter.write_dl([(name, _first_paragraph(method)) for name, method in METHODS.items()])


def chosen_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of this name, or of the user's file, with these options."""
    method: Any = method_of(name if name in METHODS else load_object(name))
    check_options(options, {*options_of(method), *KEYWORDS}, f"method {method.name}")
    if options and not is_dataclass(method):
        raise InputError(f"expected a dataclass to set {', '.join(options)} of, found {name}: set it in the file")
    changed: Method = replace(method, **options) if options else method
    return changed


def option_page(name: str) -> str:
    """Everything that can be set for a method, in groups: its own options, those of training, those of any method."""
    method = METHODS[name]
    parts = [f"{name}: {_first_paragraph(method)}"]
    for kind in method.__mro__:
        lines = _documented(kind, "Attributes")
        if lines:
            defaults = {one.name: one.default for one in fields(kind) if one.name in lines}
            title = f"Options of {name}." if kind is method else _first_paragraph(kind)
            parts.append(f"{title}\n\n{_definitions(lines, defaults)}")
    defaults = {key: one.default for key, one in inspect.signature(draw).parameters.items()}
    lines = {key: line for key, line in _documented(draw, "Args").items() if key in KEYWORDS - _ONLY_IN_PYTHON}
    return "\n\n".join([*parts, f"Options of every method.\n\n{_definitions(lines, defaults)}"])


def _first_paragraph(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _documented(documented: Any, section: str) -> dict[str, str]:
    """Name -> what a section of the docstring says about it."""
    text = inspect.cleandoc(documented.__doc__ or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {name: " ".join(line.split()) for name, line in found}


def _definitions(lines: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    formatter = click.HelpFormatter(width=100)
    with formatter.indentation():
        formatter.write_dl([(name, f"{line} Default: {_word(defaults[name])}.") for name, line in lines.items()])
    return formatter.getvalue().rstrip("\n")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | None) else f"{value:g}" if isinstance(value, float) else value
