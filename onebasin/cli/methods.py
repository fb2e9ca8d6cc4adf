"""What ``sample`` can do, as the docstrings say it: a sentence about each method, and a line about each option."""

import inspect
import re
from types import NoneType
from typing import Any

import click

from onebasin.inference import METHODS, Density, Execution, TrainingOptions, module_of

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}
_ONLY_IN_PYTHON = {"log_density"}  # a function cannot be written on a command line


class WithMethods(click.Command):
    """A command whose help ends with the methods."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the methods, one sentence each."""
        with formatter.section("Methods"):
            formatter.write_dl([(method, _first(module_of(method))) for method in METHODS])


def option_page(method: str) -> str:
    """Everything that ``--set`` can set for a method, in groups."""
    own = module_of(method).Options
    undocumented = own.__annotations__.keys() - _lines(own).keys()  # inherited, where there are any
    groups = [own, *([TrainingOptions] if undocumented else []), Density, Execution]
    parts = [f"{method}: {_first(module_of(method))}"]
    parts += [f"{_first(group)}\n\n{_definitions(_lines(group))}" for group in groups]
    return "\n\n".join(parts)


def _first(documented: Any) -> str:
    """The first paragraph of a docstring."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _lines(options: Any) -> dict[str, str]:
    """Name -> what the docstring of the options says about it."""
    text = (inspect.getdoc(options) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {name: " ".join(line.split()) for name, line in found if name not in _ONLY_IN_PYTHON}


def _definitions(lines: dict[str, str]) -> str:
    formatter = click.HelpFormatter(width=100)
    with formatter.indentation():
        formatter.write_dl(list(lines.items()))
    return formatter.getvalue().rstrip("\n")
