"""Errors and warnings of the library, and the check of option names.

There is one root class, and one subclass per question the user must answer. Every message says what was expected, what
was found, where, and what to do. The command line turns an error into its message and its `exit_code`; codes 1 and 2
belong to Python and to the option parser.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def first_line(error: BaseException, most: int = 200) -> str:
    r"""The first line of another library's error, as a part of our sentence.

    >>> first_line(ValueError("no such thing\nat line 3")), first_line(KeyError())
    ('no such thing', 'KeyError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


class OnebasinError(Exception):
    """Anything that onebasin refuses to do."""

    exit_code: ClassVar[int] = 3


class SpecError(OnebasinError):
    """Do these networks fit together? A tensor is missing, extra, not finite, or of another shape or dtype."""

    exit_code = 4


class StorageError(OnebasinError):
    """Is the file whole? It is absent, truncated, corrupt, half written or holds no network."""

    exit_code = 5


class UnsafeFileError(OnebasinError):
    """Do you trust this file? It is a pickle that wants to run code, and it was not run."""

    exit_code = 6


class DiskError(OnebasinError):
    """Where else can this be written? The disk is full or refuses to be written."""

    exit_code = 7


class TraceError(OnebasinError):
    """Which example input runs through the model? The model could not be traced."""

    exit_code = 8


class SymmetryError(OnebasinError):
    """Is this the symmetry of this network? An element or a symmetry does not fit."""

    exit_code = 9


class InputError(OnebasinError):
    """What did you mean? An example input or an option cannot be used."""

    exit_code = 10


class ModelError(OnebasinError):
    """Which model do you mean? The file, the factory in it, or what the factory returned is not usable."""

    exit_code = 11


class ClusterError(OnebasinError):
    """Where can this run? Workers die again and again, or a cluster cannot be reached."""

    exit_code = 12


class OnebasinWarning(UserWarning):
    """Anything that onebasin does although the result may not be what was meant."""


class SlowWarning(OnebasinWarning):
    """Why does it take so long? Torch cannot run several of these networks at once, so they run one by one."""


class StatisticsWarning(OnebasinWarning):
    """Where do running statistics come from? Networks compute with statistics that are not their own."""


class PrecisionWarning(OnebasinWarning):
    """In what is computed? In more digits than were asked for, because the model has no operations with so few."""


class LikelihoodWarning(OnebasinWarning):
    """Is this a posterior? Draws are made with a loss in the place of a likelihood."""


def check_options(options: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Raise `InputError` when an option has an unknown name: a misspelt one would be ignored in silence.

    >>> check_options({"loss": "mse"}, ["loss", "batch"], "barrier")
    >>> check_options({"los": "mse"}, ["loss", "batch"], "barrier")
    Traceback (most recent call last):
    ...
    onebasin.errors.InputError: barrier has no option 'los': did you mean 'loss'? It knows batch, loss

    Args:
        options: the keyword arguments as given.
        known: the names that are read.
        where: how the message names the function.
    """
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise InputError(f"{where} has no option {name!r}: {hint} It knows {', '.join(sorted(known))}")


def explained(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """A function whose misspelt, missing, superfluous and confused arguments are an `InputError`, not Python's.

    Signature, documentation and speed stay: nothing is looked at before the call fails. Confused are the nouns of this
    library, where the annotation of a parameter is one of them: a Posterior given as `population`.

    >>> explained(check_options)({}, ["loss"], were="barrier")
    Traceback (most recent call last):
    ...
    onebasin.errors.InputError: check_options has no option 'were': did you mean 'where'? It knows known, options, where
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Returned:
        try:
            return function(*arguments, **keywords)
        except (TypeError, AttributeError, KeyError) as error:
            # An error of the call itself has no frame below this one. One from inside the function stays what it is,
            # unless an argument is another noun than the annotation says.
            inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
            sentence = (_confused if inside else _misfit)(function, arguments, keywords)
            if not sentence:
                raise
            raise InputError(sentence) from (error if inside else None)

    return call


def explain_construction(owner: type) -> None:
    """Make the construction of a class `explained`; the class stays what it is."""
    owner.__init__ = explained(owner.__init__)  # type: ignore[misc]


def _misfit(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Why arguments do not fit a signature, in one sentence; "" where they do."""
    parameters = inspect.signature(function).parameters
    name = function.__qualname__.removesuffix(".__init__")
    named = {one.name: one for one in parameters.values() if one.name not in ("self", "cls")}
    given = list(arguments[len(parameters) - len(named) :])
    places = [key for key, one in named.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    options = [key for key, one in named.items() if one.kind is one.KEYWORD_ONLY]
    if not any(one.kind is one.VAR_KEYWORD for one in named.values()):
        try:
            check_options(keywords, [*places, *options], name)
        except InputError as error:
            return str(error)
    if any(one.kind is one.VAR_POSITIONAL for one in named.values()):
        return ""
    if len(given) > len(places):
        return _too_many(name, given, places, options)
    if twice := [key for key in places[: len(given)] if key in keywords]:
        return f"{name} was given {twice[0]} twice, by its place and by its name: give it once"
    needed = [key for key in (*places[len(given) :], *options) if named[key].default is named[key].empty]
    if missing := [key for key in needed if key not in keywords]:
        call = ", ".join(key for key in places if named[key].default is named[key].empty)
        return f"{name} needs {' and '.join(missing)}, which the call leaves out: write {name}({call})"
    return ""


_NOUNS = {
    "Population": "make one with Population.from_models or Population.open, or draw one from a posterior",
    "Posterior": "fit one, as onebasin.fit(population)",
    "Symmetry": "discover it, as onebasin.discover(model, inputs)",
    "Element": "take the one that onebasin.match(a, b, symmetry) returns as .element",
}


def _confused(function: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> str:
    """Which argument is no such noun as its parameter is annotated with; "" where none is."""
    signature = inspect.signature(function)
    for name, value in signature.bind(*arguments, **keywords).arguments.items():
        noun = str(signature.parameters[name].annotation).removesuffix(" | None")
        found = {one.__name__ for one in type(value).__mro__}
        where = f"{name} of {function.__qualname__}"
        if noun in _NOUNS and value is not None and noun not in found:
            article = "an" if noun[0] in "AEIOU" else "a"
            return f"expected {article} {noun} as {where}, found {type(value).__name__}: {_NOUNS[noun]}"
        if name == "path" and value is not None and not isinstance(value, str | os.PathLike):
            return f"expected a path as {where}, found {type(value).__name__}: give one text or pathlib.Path"
    return ""


def _too_many(name: str, given: list[Any], places: list[str], options: list[str]) -> str:
    if "data" in places:
        place = places.index("data")
        both = given[place : place + 2]
        if len(both) == 2 and all(hasattr(one, "__len__") and not isinstance(one, str | Mapping) for one in both):
            call = ", ".join("(inputs, targets)" if key == "data" else key for key in places)
            return f"{name} expected (inputs, targets) as one argument, found two: write {name}({call})"
    hint = f"by name, as in {name}({options[0]}=...)" if options else "in a list, or leave them out"
    taken = f"{len(places)} arguments by place ({', '.join(places)})" if places else "no argument by place"
    return f"{name} takes {taken}, found {len(given)}: give the others {hint}"
