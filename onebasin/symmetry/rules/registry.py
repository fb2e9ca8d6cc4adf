"""The table of rules: name of an operation -> what it does to axes and exponents.

A rule is called as `rule(constraints, node, *arguments, **options)`, with a `Value` wherever the traced call has a
tensor, and returns the resulting `Value` (or a tuple, for operations with several results).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Rule = Callable[..., Any]
Function = TypeVar("Function", bound=Rule)

RULES: dict[str, Rule] = {}
FOLLOWING: set[Rule] = set()
"""Rules that know what to do with an operand that holds positions (`Value.points`)."""


def rule(*names: str, follows: bool = False) -> Callable[[Function], Function]:
    """Register a function as the rule of the named aten operations (all overloads).

    With `follows` the rule deals with positions among its operands (`Value.points`); for any other rule their units are
    made rigid before it runs.
    """

    def register(function: Function) -> Function:
        for name in names:
            RULES[f"aten.{name}"] = function
        if follows:
            FOLLOWING.add(function)
        return function

    return register


def rule_for(operation: str) -> Rule | None:
    """The rule of a traced operation such as `aten.add.Tensor`, or None."""
    return RULES.get(".".join(operation.split(".")[:2]))
