"""Draws in the groups of ArviZ: a population as an `xarray.DataTree`, and arrays out of whatever ArviZ holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebasin.errors import InputError, SpecError, StorageError, first_line
from onebasin.population.draws import CHAIN, LOG_DENSITY
from onebasin.state import dtype_name

OUTPUTS = "outputs"  # the variable of function values
PROVENANCE = "onebasin_provenance"  # an attribute of the posterior group
_DTYPE = "torch_dtype"  # an attribute of variables that ArviZ holds in another dtype
_MISSING = "ArviZ is not installed, and its trees are made with it: pip install 'onebasin[arviz]'"


def tree(
    tensors: Mapping[str, Tensor], rows: Tensor, chains: list[int], facts: Mapping[str, Tensor | None], provenance: Any
) -> Any:
    """An `xarray.DataTree` with the groups posterior, and sample_stats and predictions where there is something.

    Args:
        tensors: name -> (members, *shape).
        rows: the member of each draw, (chains, draws).
        chains: the number of each chain.
        facts: `log_density` (members,) and `outputs` (members, examples, *shape), or None.
        provenance: what goes to JSON as an attribute of the posterior.
    """
    try:
        from arviz_base import from_dict
    except ImportError as error:
        raise InputError(_MISSING) from error
    groups: dict[str, dict[str, Any]] = {"posterior": {name: _array(value, rows) for name, value in tensors.items()}}
    if (density := facts[LOG_DENSITY]) is not None and not bool(density.isnan().all()):
        groups["sample_stats"] = {"lp": _array(density, rows)}
    axes: dict[str, list[str]] = {}
    if (outputs := facts[OUTPUTS]) is not None:
        groups["predictions"] = {OUTPUTS: _array(outputs, rows)}
        inner = outputs.dim() - 2
        axes = {OUTPUTS: ["example", *(["output"] if inner == 1 else [f"output_{axis}" for axis in range(inner)])]}
    made = from_dict(
        groups, coords={CHAIN: chains}, pred_coords={CHAIN: chains}, pred_dims=axes, check_conventions=False
    )
    made.posterior.attrs[PROVENANCE] = json.dumps(provenance)
    for name, value in tensors.items():
        if value.is_floating_point() and value.dtype.itemsize < 4:
            made.posterior[name].attrs[_DTYPE] = dtype_name(value.dtype)
    return made


def _array(value: Tensor, rows: Tensor) -> Any:
    """Draws (chains, draws, *shape); half precision becomes float32, since numpy or netCDF have none."""
    wide = value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value
    return wide.detach().cpu()[rows].numpy()


def posterior_arrays(data: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays (chains, draws, *shape) of a posterior of ArviZ, with the chain and log density of each draw beside them.

    Args:
        data: an `xarray.DataTree` or `arviz.InferenceData` with a group posterior, that group, a dict of arrays, or the
            path of a netCDF file.

    Returns:
        The arrays, and the provenance that `to_arviz` left.

    Raises:
        SpecError: there is no posterior, or a variable has no chain and draw axes.
    """
    if isinstance(data, str | Path):
        return posterior_arrays(_read(Path(data)))
    group = data.get("posterior") if isinstance(data, dict) else getattr(data, "posterior", None)
    group = data if group is None else group
    variables = getattr(group, "data_vars", group)
    if not isinstance(variables, Mapping) or not len(variables):
        groups = ", ".join(map(str, getattr(data, "children", ()))) or f"a {type(data).__name__}"
        raise SpecError(f"expected draws of ArviZ in a group posterior, found {groups}: give the tree with that group")
    arrays = {str(name): _tensor(str(name), variables[name]) for name in variables}
    leading = tuple(next(iter(arrays.values())).shape[:2])
    facts: dict[str, Tensor] = {}
    numbers = np.asarray(getattr(group, "coords", {}).get(CHAIN, ()))
    if numbers.dtype.kind in "iu" and len(leading) == 2 and len(numbers) == leading[0]:
        facts[CHAIN] = torch.from_numpy(numbers.astype("int64")).repeat_interleave(leading[1])
    statistics = getattr(data, "sample_stats", None)
    if statistics is not None and "lp" in getattr(statistics, "data_vars", ()):
        facts[LOG_DENSITY] = _tensor("lp", statistics["lp"]).reshape(-1)
    kept = getattr(group, "attrs", {}).get(PROVENANCE)
    return {**facts, **arrays}, {} if kept is None else dict(json.loads(kept))


def _tensor(name: str, variable: Any) -> Tensor:
    dims = getattr(variable, "dims", None)
    if dims is not None:
        if not {CHAIN, "draw"} <= set(dims):
            raise SpecError(f"expected axes chain and draw in {name}, found {tuple(dims)}: give draws of a sampler")
        variable = variable.transpose(CHAIN, "draw", ...)
    array = np.array(getattr(variable, "values", variable))
    try:
        tensor = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError as error:
        raise SpecError(f"expected numbers in {name}, found {array.dtype}: leave it out of the posterior") from error
    kind = getattr(torch, str(getattr(variable, "attrs", {}).get(_DTYPE)), None)
    return tensor.to(kind) if isinstance(kind, torch.dtype) and tensor.is_floating_point() else tensor


def _read(path: Path) -> Any:
    """The tree in a netCDF file, in memory."""
    if not path.is_file():
        raise StorageError(f"{path} does not exist: check the path")
    try:
        import h5netcdf  # noqa: F401 - what reads netCDF for xarray
        import xarray
    except ImportError as error:
        raise InputError(f"{path} is a file of ArviZ, which is not installed: pip install 'onebasin[arviz]'") from error
    try:
        with xarray.open_datatree(path, engine="h5netcdf") as stored:
            return stored.load()
    except Exception as error:  # a damaged file can fail in any way
        raise StorageError(
            f"expected a netCDF file of ArviZ, but {path} cannot be read ({first_line(error, 120)}): save it again "
            'with to_netcdf(path, engine="h5netcdf")'
        ) from error
