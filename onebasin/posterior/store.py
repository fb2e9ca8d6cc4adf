"""A posterior in one safetensors file: tensors by role, everything else as JSON in the header; nothing is unpickled.

Names are `weights`, `<m>.centre`, `<m>.shape.<tensor>` and `<m>.rest.<tensor>` for component m. Of tensors that are
equal bit for bit the first is written; `same` in the header maps further names to its name. Tensors of zeros are not
written: `zeros` in the header is their spec. (Files of version 1 have every tensor.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onebasin.errors import InputError, OnebasinError, StorageError
from onebasin.population.durable import make_folder, need_space
from onebasin.population.tensor_file import read_header, read_tensors, write_tensors
from onebasin.posterior.coordinates import Coordinates
from onebasin.posterior.gaussian import Gaussian
from onebasin.posterior.shapes import SHAPES
from onebasin.posterior.storage import Kept, kept
from onebasin.state import State, as_spec, spec_from_json, spec_to_json

FORMAT = "onebasin-posterior"
VERSION = 2
_COUNTS = (".shape.places", ".shape.size")  # whole numbers among the tensors of a shape
_ZEROS, _TIMES = 1 << 30, 64  # bytes of zeros that a file may stand for: so many, or so many times its tensors


class Parts(NamedTuple):
    """What a posterior is made of."""

    components: tuple[Gaussian, ...]
    weights: Tensor
    layout: Coordinates
    rest: tuple[State, ...]
    provenance: Mapping[str, Any]


def kept_parts(parts: Parts) -> Kept:
    """All tensors of a posterior by the names of the file, without repetition."""
    tensors: State = {"weights": parts.weights}
    for index, (component, rest) in enumerate(zip(parts.components, parts.rest, strict=True)):
        tensors[f"{index}.centre"] = component.centre
        tensors |= {f"{index}.shape.{name}": value for name, value in component.shape.tensors().items()}
        tensors |= {f"{index}.rest.{name}": value for name, value in rest.items()}
    return kept(tensors)


def write_parts(path: Path, parts: Parts) -> None:
    """Write a posterior; readers see the whole file or the one before."""
    once = kept_parts(parts)
    facts = _facts(parts) | {"same": json.dumps(once.same), "zeros": spec_to_json(as_spec(once.zeros))}
    make_folder(path.parent)
    need_space(path.parent, sum(value.nbytes for value in once.tensors.values()))
    write_tensors(path, once.tensors, facts)


def read_parts(path: Path) -> Parts:
    """Read back what `write_parts` wrote."""
    facts = read_header(path).metadata
    if facts.get("onebasin") != FORMAT:
        raise StorageError(
            f"expected a posterior in {path}, found another kind of file: open populations with Population.open"
        )
    if facts.get("version") not in ("1", str(VERSION)):
        raise StorageError(f"{path} has version {facts.get('version')}, expected 1 to {VERSION}: upgrade onebasin")
    tensors, _ = read_tensors(path)
    try:
        return _parts(_all(tensors, facts), facts)
    except (KeyError, ValueError, TypeError, RuntimeError, OnebasinError) as error:  # torch has no better class
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> StorageError:
    """What to say of a file whose parts contradict each other."""
    return StorageError(
        f"expected a whole posterior in {path}, found one whose parts do not fit ({error}): save it again"
    )


def _facts(parts: Parts) -> dict[str, str]:
    layout = parts.layout
    try:
        provenance = json.dumps(dict(parts.provenance))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"expected a provenance of plain JSON values, found one that is not ({error}): leave such values out"
        ) from error
    return {
        "onebasin": FORMAT,
        "version": str(VERSION),
        "spec": spec_to_json(layout.spec),
        "names": json.dumps(layout.names),
        "tied": json.dumps(dict(layout.tied)),
        "kinds": json.dumps([component.shape.kind for component in parts.components]),
        "provenance": provenance,
    }


def _all(tensors: State, facts: Mapping[str, str]) -> State:
    """The tensors of a file, and those that it does not repeat."""
    if facts["version"] == "1":
        return tensors
    spec = spec_from_json(facts["zeros"])
    if sum(own.nbytes for own in spec.values()) > max(_ZEROS, _TIMES * sum(own.nbytes for own in tensors.values())):
        raise ValueError("zeros beyond all measure")  # a header of a few bytes could ask for any amount of memory
    zeros = {name: torch.zeros(own.shape, dtype=own.dtype) for name, own in spec.items()}
    same = {name: tensors[first] for name, first in _read(facts["same"], dict).items()}
    return {**tensors, **zeros, **same}


def _parts(tensors: State, facts: Mapping[str, str]) -> Parts:
    spec = spec_from_json(facts["spec"])
    layout = Coordinates(tuple(_read(facts["names"], list)), spec, _read(facts["tied"], dict))
    kinds: list[str] = _read(facts["kinds"], list)
    _check_numbers(tensors, layout)
    components = tuple(
        Gaussian(tensors[f"{index}.centre"], SHAPES[kind].from_tensors(_under(tensors, f"{index}.shape.")))
        for index, kind in enumerate(kinds)
    )
    rest = tuple(_under(tensors, f"{index}.rest.") for index in range(len(kinds)))
    provenance: dict[str, Any] = _read(facts["provenance"], dict)
    return Parts(components, tensors["weights"], layout, rest, provenance)


def _check_numbers(tensors: State, layout: Coordinates) -> None:
    """Refuse files whose centres, spreads or weights are no real numbers that can be computed with."""
    counted = {name: own for name, own in tensors.items() if ".rest." not in name and not name.endswith(_COUNTS)}
    kinds = {name: own.dtype for name, own in counted.items()}
    kinds |= {name: layout.spec[name].dtype for name in layout.names}
    if wrong := [name for name, kind in kinds.items() if not kind.is_floating_point or kind.itemsize < 2]:
        raise TypeError(f"expected real numbers in {wrong[0]}, found {kinds[wrong[0]]}")
    if wrong := [name for name, own in tensors.items() if name.endswith(_COUNTS) and own.dtype != torch.int64]:
        raise TypeError(f"expected whole numbers in {wrong[0]}, found {tensors[wrong[0]].dtype}")


def _read(text: str, kind: type) -> Any:
    """A JSON value of a kind."""
    found = json.loads(text)
    if not isinstance(found, kind):
        raise TypeError(f"expected a {kind.__name__}, found a {type(found).__name__}")
    return found


def _under(tensors: Mapping[str, Tensor], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
