"""Where rules are kept: the name of an operation -> what it does to axes and exponents.

A rule is called as `rule(weave, node, *arguments, **options)`, with a `Value` wherever the traced call has a tensor,
and returns the resulting `Value` (or a tuple, for operations with several results).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Rule = Callable[..., Any]
Function = TypeVar("Function", bound=Rule)

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Function], Function]:
    """Register a function as the rule of the named aten operations (all overloads)."""

    def register(function: Function) -> Function:
        for name in names:
            RULES[f"aten.{name}"] = function
        return function

    return register


def rule_for(operation: str) -> Rule | None:
    """The rule of a traced operation such as `aten.add.Tensor`, or None."""
    return RULES.get(".".join(operation.split(".")[:2]))
