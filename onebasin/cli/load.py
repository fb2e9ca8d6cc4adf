"""From ``package.module:factory``, ``path/to/file.py:factory`` or a folder of transformers to a model; or to data.

Everything that can go wrong here is in the user's file, so each failure is one sentence with the line and the remedy.
"""

import copy
import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from onebasin.cli.pretrained import load_pretrained
from onebasin.errors import ModelError
from onebasin.functional import select_output
from onebasin.parallel import pickle_by_value
from onebasin.storage import real_path

_LISTED = 8  # names worth reading in one sentence


_PART = re.compile(r"(?P<model>.+)\[(?P<part>\w+)\]")  # model.py:net[logits]


@dataclass(frozen=True)
class Loaded:
    """A model, and the ``example_input`` function that stands beside its factory (if there is one)."""

    model: nn.Module
    example_input: Callable[[], Any] | None


def load(reference: str) -> Loaded:
    """Import the file or module and build its model.

    Args:
        reference: ``package.module:factory`` or ``path/to/file.py:factory``. The factory is a function without
            arguments that returns a module, a module class that needs no arguments, or a module. Or a folder that
            ``save_pretrained`` of transformers wrote. ``[logits]`` behind it chooses a part of what the model
            returns.

    Raises:
        ModelError: with the place and the remedy.
    """
    if (chosen := _PART.fullmatch(reference)) is not None and not Path(reference).exists():
        whole = load(chosen["model"])
        part = chosen["part"]
        return replace(whole, model=select_output(whole.model, int(part) if part.isdecimal() else part))
    if Path(reference).is_dir():
        return Loaded(*load_pretrained(Path(reference)))
    module, name, source = _imported(reference)
    model = _build(_find(module, name, source), name, source)
    example_input = getattr(module, "example_input", None)
    return Loaded(model, example_input if callable(example_input) else None)


@dataclass(frozen=True)
class Factory:
    """What builds a model, again and again.

    Attributes:
        name: as in its file.
        build: makes a model; takes `width` where `width` is not None.
        width: what its argument of that name is by default; None where it has none.
    """

    name: str
    build: Callable[..., nn.Module]
    width: int | None


def load_factory(reference: str) -> Factory:
    """Import the file or module and find what builds its model, which may have a width.

    Args:
        reference: as for `load`. A factory with an argument `width` that is a number by default has a width.

    Raises:
        ModelError: with the place and the remedy.
    """
    module, name, source = _imported(reference)
    found = _find(module, name, source)
    if isinstance(found, nn.Module):
        return Factory(name, lambda: copy.deepcopy(found), None)
    default = inspect.signature(found).parameters.get("width") if callable(found) else None
    width = default.default if default is not None and isinstance(default.default, int) else None
    return Factory(
        name, lambda **size: _build(functools.partial(found, **size) if size else found, name, source), width
    )


def fingerprint(reference: str) -> str:
    """The reference, and a digest of the file that it names: another after every edit.

    Args:
        reference: as for `load`, of something that was loaded.
    """
    source = reference.rpartition(":")[0]
    file = source if _is_file(source) else getattr(importlib.util.find_spec(source), "origin", None)
    content = Path(file).read_bytes() if file and Path(file).is_file() else b""
    return f"{reference} {hashlib.sha256(content).hexdigest()[:12]}"


def load_function(reference: str) -> Callable[[], Any]:
    """Import the file or module and find its function.

    Args:
        reference: ``package.module:function`` or ``path/to/file.py:function``, of a function without arguments.

    Returns:
        The function; whatever it raises becomes one sentence.

    Raises:
        ModelError: with the place and the remedy.
    """
    module, name, source = _imported(reference)
    function = _find(module, name, source)
    if not callable(function):
        raise ModelError(
            f"{name} in {source} is a {type(function).__name__}; it should be a function without arguments."
        )
    _check_no_arguments(function, name, source)

    def called() -> Any:
        return call_user_code(function, f"{name}() in {source}")

    called.__name__ = name
    return called


def load_object(reference: str) -> Any:
    """The object that a file or module defines under a name; a function or class without arguments is called.

    Raises:
        ModelError: with the place and the remedy.
    """
    module, name, source = _imported(reference)
    found = _find(module, name, source)
    if not inspect.isfunction(found) and not inspect.isclass(found):
        return found
    _check_no_arguments(found, name, source)
    return call_user_code(found, f"{name}() in {source}")


def _imported(reference: str) -> tuple[ModuleType, str, str]:
    """The module, the name in it, and where the module is."""
    source, colon, name = reference.rpartition(":")
    if not colon or not source or not name:
        raise ModelError(
            f"{reference!r} names no factory: write path/to/file.py:factory or package.module:factory, where the "
            "factory is a function without arguments that returns the model."
        )
    return _import_file(Path(source)) if _is_file(source) else _import_module(source), name, source


def _is_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source or "\\" in source


def call_user_code(function: Callable[[], Any], what: str) -> Any:
    """Call a function of the user's file; whatever it raises becomes one sentence with the line that raised.

    Raises:
        ModelError: if the function raises, or leaves the process.
    """
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ModelError(f"{what} raised {_describe(error)}.") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else f" (looked in {real_path(path.parent)})."
        raise ModelError(f"There is no file {path}{hint}")
    path = real_path(path)
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # inside a package: import it as such, so relative imports work
        parts.insert(0, root.name)
        root = root.parent
    _let_import_from(root)
    if len(parts) > 1:
        module = _guarded_import(lambda: importlib.import_module(".".join(parts)), str(path))
    else:  # a name of its own, so that a file called types.py or test.py shadows nothing
        module = _guarded_import(lambda: _execute(f"onebasin_model_{path.stem}", path), str(path))
    pickle_by_value(module)
    return module


def _execute(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch look their module up by name
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    _let_import_from(Path.cwd())
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise ModelError(
            f"There is no module {name} to import from here or from the installed packages; "
            "for a file write its path, as in path/to/file.py:factory."
        )
    return _guarded_import(lambda: importlib.import_module(name), name)


def _let_import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _guarded_import(function: Callable[[], ModuleType], source: str) -> ModuleType:
    module: ModuleType = call_user_code(function, f"Importing {source}")
    return module


def _find(module: ModuleType, name: str, source: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    candidates = [key for key, value in vars(module).items() if _is_candidate(key, value, module)]
    near = difflib.get_close_matches(name, candidates, n=1)
    if near:
        hint = f"did you mean {source}:{near[0]}?"
    elif candidates:
        listed = ", ".join(sorted(candidates)[:_LISTED]) + (", ..." if len(candidates) > _LISTED else "")
        hint = f"it has {listed}."
    else:
        hint = "it defines no function or class at all; add one without arguments that returns the model."
    raise ModelError(f"{source} has no {name}; {hint}")


def _is_candidate(key: str, value: Any, module: ModuleType) -> bool:
    if key.startswith("_") or key == "example_input":
        return False
    is_defined_there = getattr(value, "__module__", None) == module.__name__ or key in getattr(module, "__all__", ())
    return isinstance(value, nn.Module) or (callable(value) and is_defined_there)


def _build(factory: Any, name: str, source: str) -> nn.Module:
    if isinstance(factory, nn.Module):
        return factory
    if not callable(factory):
        raise ModelError(
            f"{name} in {source} is a {type(factory).__name__}; "
            "it should be a function without arguments that returns the model, or the model itself."
        )
    _check_no_arguments(factory, name, source)
    model = call_user_code(factory, f"{name}() in {source}")
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name}() in {source} returned a {type(model).__name__}; it should return an nn.Module.")
    return model


def _check_no_arguments(function: Callable[..., Any], name: str, source: str) -> None:
    required = _required_arguments(function)
    if required:
        raise ModelError(
            f"{name} in {source} needs {', '.join(required)}; write a function without arguments beside it that "
            f"returns {name}(...) with the values you want, and name that one."
        )


def _required_arguments(factory: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some built-ins tell nothing: calling them will
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in optional]


def _describe(error: BaseException) -> str:
    """The error's type and text, and the innermost line of code outside this file and the import machinery."""
    text = (
        f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error).strip() else type(error).__name__
    )
    if isinstance(error, SyntaxError):
        return f"{text} (line {error.lineno}: {(error.text or '').strip()})"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    if not frames:
        return text
    first, last = frames[0], frames[-1]
    # The user's own line first; the line deep inside a library only when it is elsewhere.
    where = f"{first.filename} line {first.lineno}"
    code = linecache.getline(first.filename, first.lineno or 0).strip()
    inner = "" if last.filename == first.filename else f", inside {Path(last.filename).name} line {last.lineno}"
    return f"{text} ({where}: {code}{inner})"
