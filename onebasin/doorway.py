"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any


class _Door(ModuleType):
    """A package whose functions are not hidden by rooms of the same name.

    The import system hangs every room on its package when it is imported; where a public function has the same name,
    the room stays away.
    """

    _functions: frozenset[str] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in self._functions and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """By name, so that functions that mention the package can be sent to other processes."""
        return import_module, (self.__name__,)


def opened(
    package: str, homes: Mapping[str, Sequence[str]], public: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package needs as its ``__getattr__`` and ``__dir__``.

    Args:
        package: its name.
        homes: room -> the public names that live in it, in the order of asking; a name in brackets, as "[metrics]",
            is the room itself.
        public: the names, for `dir`.
    """
    home = {name: room for room, names in homes.items() for name in names if not name.startswith("[")}
    rooms = {name.strip("[]"): room for room, names in homes.items() for name in names if name.startswith("[")}
    module = sys.modules[package]
    module.__class__ = _Door
    vars(module)["_functions"] = frozenset(name for name, room in home.items() if name == room.split(".")[0])

    def get(name: str) -> Any:
        if name == "__version__":
            return version(package)
        if name in rooms:
            return import_module(f"{package}.{rooms[name]}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = vars(module)[name] = getattr(import_module(f"{package}.{home[name]}"), name)
        return found

    return get, lambda: sorted({*vars(module), *public})
