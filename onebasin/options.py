"""Keyword options that are passed on in a dict: Python does not check their names, so we do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from onebasin.errors import InputError


def refuse_unknown(options: Mapping[str, object], known: Collection[str], where: str) -> None:
    """Raise `InputError` when an option has a name that nobody reads; a misspelt one would be ignored in silence.

    >>> refuse_unknown({"loss": "mse"}, ["loss", "batch"], "barrier")
    >>> refuse_unknown({"los": "mse"}, ["loss", "batch"], "barrier")
    Traceback (most recent call last):
    ...
    onebasin.errors.InputError: barrier has no option 'los': did you mean 'loss'? It knows batch, loss

    Args:
        options: the keyword arguments as given.
        known: the names that are read, such as `Options.__annotations__` of a TypedDict.
        where: how the message names the function.
    """
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out."
            raise InputError(f"{where} has no option {name!r}: {hint} It knows {', '.join(sorted(known))}")
