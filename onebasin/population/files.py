"""Networks in files of other programs: safetensors, and torch files without running their code."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onebasin.errors import OnebasinError, StorageError, UnsafeFileError, first_line
from onebasin.population.member_storage import FileSource, MemorySource, Source
from onebasin.population.names import add_tied, natural_key, strip_prefix
from onebasin.state import Spec, spec_of
from onebasin.storage import TensorFile, check_plain, check_torch_file, map_tensors, read_header

TORCH_SUFFIXES = (".pt", ".pth", ".th", ".ckpt")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)
POSTERIOR = "onebasin-posterior"  # in the metadata of a posterior's file
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"  # of save_pretrained

# Where training scripts put the weights, in the order in which we look; averaged weights only if nothing else is there.
_NESTED = re.compile(r"state_dict|model_state_dict|model|net|network|params|weights|module|ema.*|.*_ema")


def network_paths(folder: Path) -> list[Path]:
    """List the files of a folder that may hold a network, in natural order."""
    paths = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")]
    return sorted((path for path in paths if path.is_file()), key=natural_key)


def is_pretrained(path: Path) -> bool:
    """Whether a folder holds one network as `save_pretrained` of transformers writes it."""
    if not (path / CONFIG).is_file() or not ((path / WEIGHTS).is_file() or (path / INDEX).is_file()):
        return False
    config = _json_object(path / CONFIG)
    return "model_type" in config or "architectures" in config


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}


def weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a folder of `save_pretrained`: one, or the parts that its index names.

    Raises:
        StorageError: the index is damaged, or leads out of the folder.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    named = _json_object(folder / INDEX).get("weight_map")
    names = sorted({str(name) for name in named.values()}) if isinstance(named, dict) else []
    if not names or any(Path(name).name != name for name in names):
        raise StorageError(
            f"expected {folder / INDEX} to name the parts of a network beside it, found something else: write the "
            "folder again with save_pretrained"
        )
    return [folder / name for name in names]


def pretrained_source(
    folder: Path, expected: Spec | None = None, tied: Mapping[str, str] | None = None
) -> tuple[Source, Spec]:
    """The network in a folder of `save_pretrained`; its tensors are mapped, and read when they are used."""
    files = [read_header(path) for path in weight_files(folder)]
    if len(files) == 1:
        return file_source(files[0], expected, tied)
    tensors = {name: value for file in files for name, value in map_tensors(file, file.entries).items()}
    stored = add_tied(strip_prefix(tensors, expected), tied or {})
    state = {name: tensors[stored[name]] for name in stored}
    return MemorySource({name: value[None] for name, value in state.items()}, 1), spec_of(state)


def file_source(
    file: TensorFile, expected: Spec | None = None, tied: Mapping[str, str] | None = None
) -> tuple[Source, Spec]:
    """A safetensors file of another program as one network; its tensors stay on the disk."""
    if not file.entries:
        raise StorageError(f"{file.path} holds no tensor: choose a file with the weights of a network")
    if file.metadata.get("onebasin") == POSTERIOR:
        raise StorageError(
            f"expected networks in {file.path}, found a posterior: open it with ob.load_posterior, and draw networks "
            "from it with posterior.draw(n, generator)"
        )
    if (kind := file.metadata.get("onebasin", "")).startswith("onebasin-"):
        raise StorageError(
            f"expected a network in {file.path}, found a file of the kind {kind}: read it with what wrote it"
        )
    stored = add_tied(strip_prefix(file.entries, expected), tied or {})
    return FileSource(file, stored, 1, stacked=False), {name: file.entries[stored[name]].spec for name in stored}


def torch_sources(path: Path, expected: Spec | None = None) -> list[tuple[Source, Spec]]:
    """Read a torch file as one network, or as several when it holds a list of state dicts."""
    content = load_weights(path)
    several = isinstance(content, list | tuple) and content and all(isinstance(item, Mapping) for item in content)
    sources: list[tuple[Source, Spec]] = []
    states = [(item, _find_state(item)) for item in (content if several else [content])]
    check_plain((state for _, state in states), path)
    for item, state in states:
        if not state:
            named = [key[:80] for key in item if isinstance(key, str)][:6] if isinstance(item, Mapping) else []
            keys = ", ".join(named) or f"a {type(item).__name__} without names"
            raise StorageError(
                f"expected a state dict in {path}, found {keys}: "
                "load it yourself and pass the dict of tensors to Population.from_states"
            )
        stored = strip_prefix(state, expected)
        clean = {name: state[stored[name]].detach() for name in stored}
        sources.append((MemorySource({name: value[None] for name, value in clean.items()}, 1), spec_of(clean)))
    return sources


def _find_state(content: Any, depth: int = 3) -> dict[str, Tensor]:
    """Find the dict of tensors in a checkpoint: under a usual key, or the content itself, or its only such dict."""
    if not isinstance(content, Mapping) or depth == 0:
        return {}
    order = _NESTED.pattern.split("|")
    usual = [key for key in content if isinstance(key, str) and _NESTED.fullmatch(key)]
    usual.sort(key=lambda key: order.index(key) if key in order else len(order))
    for key in usual:
        if state := _find_state(content[key], depth - 1):
            return state
    tensors = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}
    if tensors:
        return tensors
    inner = [state for value in content.values() if (state := _find_state(value, depth - 1))]
    return inner[0] if len(inner) == 1 else {}


def load_weights(path: Path) -> Any:
    """Load a torch file onto the CPU without running code; zip files are mapped.

    Raises:
        UnsafeFileError: when the pickle asks for anything but tensors and plain values. It is not executed.
        StorageError: when the file is empty, truncated or no torch file.
    """
    try:
        check_torch_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about odd files, each of which we refuse in our own words
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError as error:
        raise StorageError(f"{path} does not exist: check the path") from error
    except OnebasinError:
        raise
    except Exception as error:  # a corrupt pickle can fail in any way
        if code := _wanted_code(path, error):
            raise UnsafeFileError(
                f"{path} asks to run {code}, expected only tensors; it was not run. If you trust the file, load it "
                "yourself and pass the state_dict() to Population.from_states"
            ) from error
        if _is_text(path):
            raise StorageError(
                f"expected a torch file, but {path} is a text: give the file that torch.save wrote, or move it away to "
                "go on without it"
            ) from error
        why = first_line(error, 120) if not isinstance(error, KeyError) else "its pickle refers to what it never stored"
        raise StorageError(
            f"expected a whole torch file, but {path} is truncated, corrupt or something else "
            f"({why}): copy it again from its source, or move it away to go on without it"
        ) from error


def _wanted_code(path: Path, error: Exception) -> str:
    """Name what the file wanted to run, or nothing if it is merely damaged."""
    if "TorchScript" in str(error):
        return "a TorchScript program"
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    if match := re.search(r"GLOBAL ([\w.]*\w)", str(error)):
        return match[1]
    # A pickle (first byte 0x80) with instructions that torch never writes.
    return "an unknown pickle" if "Unsupported operand" in str(error) and _first_byte(path) == b"\x80" else ""


def _is_text(path: Path) -> bool:
    """Whether a file begins with nothing but printable characters, as no torch file does."""
    with path.open("rb") as file:
        beginning = file.read(512)
    with contextlib.suppress(UnicodeDecodeError):
        text = beginning.decode("utf-8", errors="strict" if len(beginning) < 512 else "ignore")
        return bool(text) and all(letter.isprintable() or letter in "\n\r\t" for letter in text)
    return False


def _first_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1)
