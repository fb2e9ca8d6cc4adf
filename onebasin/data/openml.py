"""OpenML, thousands of tables under one interface: found by name or number, fetched by scikit-learn, and kept.

What was fetched once is kept as inputs and targets in ``$ONEBASIN_CACHE/openml/NAME.npz``, by default below the user's
cache folder, whole or not at all, and read from there without a network. scikit-learn keeps its own downloads in the
same folder.

Numeric attributes become one column, nominal ones one column per level. Texts are refused, and so are missing values:
what to put in their place is not for a reader to decide.
"""

from __future__ import annotations

import os
import warnings
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote

import torch
from torch import Tensor

from onebasin.data.dataset import Parts, check_columns
from onebasin.errors import InputError, StorageError, first_line
from onebasin.storage import make_folder, publish, read_arrays

VARIABLE = "ONEBASIN_CACHE"
_UNKNOWN = (404, 412)  # OpenML says 412 for what it does not know


def cache_folder() -> Path:
    """$ONEBASIN_CACHE, or onebasin below the user's cache folder."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onebasin"


def read_openml(name: str, *, download: bool = False) -> Parts:
    """A data set from the cache or, with `download`, from OpenML.

    Args:
        name: name of the data set, of which the active version is taken that OpenML lists first; or its number.
        download: whether the network may be used for what is not in the cache.

    Raises:
        InputError: OpenML knows no such set, or it holds texts, gaps, or nothing to predict.
        StorageError: it is not in the cache and may not be downloaded, or OpenML cannot be reached, or a file is
            damaged.
        DiskError: it cannot be kept.
    """
    path = cache_folder() / "openml" / f"{quote(name, safe='')}.npz"
    if not path.is_file():
        if not download:
            raise StorageError(
                f"expected openml/{name} in the cache, found no {path}: allow its download (download=True, on the "
                "command line --download)"
            )
        inputs, targets, classes = _examples(_fetch(name), f"openml/{name}")
        _keep(path, inputs, targets, classes)
    try:
        stored = read_arrays(path)
        inputs, targets, classes = stored["inputs"], stored["targets"], int(stored["classes"])
    except (StorageError, InputError, KeyError, ValueError, RuntimeError) as error:
        raise StorageError(
            f"{path} was damaged after its download ({first_line(error)}): delete it, and download it again "
            "(download=True, on the command line --download)"
        ) from error
    return Parts(name, (inputs, targets), None, classes or None)


def _keep(path: Path, inputs: Tensor, targets: Tensor, classes: int) -> None:
    import numpy as np

    make_folder(path.parent)
    arrays = {"inputs": inputs.numpy(), "targets": targets.numpy(), "classes": np.array(classes)}
    publish(path, lambda file: np.savez(file, **arrays), replace=True)  # type: ignore[arg-type]  # numpy's stubs


def _fetch(name: str) -> Any:
    """The set as scikit-learn gives it; categories of inputs are numbered."""
    from sklearn.datasets import fetch_openml

    which: dict[str, Any] = {"data_id": int(name)} if name.isdecimal() else {"name": name}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of several versions of a name, which are meant
            return fetch_openml(**which, data_home=cache_folder(), as_frame=False, parser="liac-arff")
    except HTTPError as error:
        if error.code in _UNKNOWN:
            raise InputError(
                f"OpenML has no active data set {name!r} (HTTP {error.code}): check the name or number"
            ) from error
        raise StorageError(f"expected openml/{name}, found HTTP {error.code}: try again later") from error
    except (URLError, TimeoutError, ConnectionError, HTTPException) as error:
        raise StorageError(
            f"expected an answer from OpenML, found none ({first_line(error)}): connect to the network, or copy "
            f"{cache_folder()} from a machine that has it; digits needs no download"
        ) from error
    except (ValueError, KeyError, TypeError) as error:  # what it cannot read, does not know, or received damaged
        raise InputError(
            f"scikit-learn cannot read openml/{name} ({first_line(error)}): check the name, or convert the table and "
            "give it as .npz"
        ) from error


def _examples(table: Any, where: str) -> tuple[Tensor, Tensor, int]:
    """Inputs float32 (n, columns), one column per category; class numbers int64 (n,) or values float32 (n, outputs).

    Classes are numbered in the order of their numbers, if these are all numbers, or of their names. The last value is
    how many there are, 0 for values.
    """
    import numpy as np

    levels = [len((table.categories or {}).get(name) or ()) for name in table.feature_names]
    check_columns(table.data.shape[0], sum(max(1, count) for count in levels), where)
    values = torch.from_numpy(np.asarray(table.data.toarray() if hasattr(table.data, "toarray") else table.data, float))
    if not values.shape[1] or table.target is None or not len(values):
        raise InputError(f"expected inputs and a target in {where}, found {len(levels)} inputs: give a table as .npz")
    if not bool(values.isfinite().all()):
        missing = [name for name, column in zip(table.feature_names, values.T, strict=True) if column.isnan().any()]
        raise InputError(
            f"expected a value everywhere in {where}, found gaps in {', '.join(missing[:3])}: fill them or leave such "
            "rows out, and give the table as .npz"
        )
    columns = [
        torch.nn.functional.one_hot(column.long(), count).float() if count else column.float()[:, None]
        for column, count in zip(values.T, levels, strict=True)
    ]
    goal = np.asarray(table.target)
    if goal.dtype.kind in "fiu":
        return torch.cat(columns, 1), torch.from_numpy(goal.astype("float32")).reshape(len(values), -1), 0
    if goal.ndim > 1 and goal.shape[1] > 1:
        raise InputError(
            f"expected one category or several numbers to predict in {where}, found {goal.shape[1]} targets: give the "
            "table as .npz"
        )
    names = [str(name) for name in goal.reshape(-1)]
    number = {name: place for place, name in enumerate(sorted(set(names), key=_level_key))}
    return torch.cat(columns, 1), torch.tensor([number[name] for name in names]), len(number)


def _level_key(name: str) -> tuple[float, str]:
    """Sort "10" after "9", and names after numbers.

    >>> sorted(["10", "9", "b", "a"], key=_level_key)
    ['9', '10', 'a', 'b']
    """
    try:
        return float(name), name
    except ValueError:
        return float("inf"), name
