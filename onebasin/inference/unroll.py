"""Implicit ensembles of torch-uncertainty as networks of the ordinary base module; that library is not imported.

A network of such layers is known by the names and shapes of its tensors. Beside a layer `P` of the base module, which
holds `P.weight` and `P.bias`, it holds (M members, version 0.13 of the library and before):

| kind | tensors under `P.` | weight of member m |
| --- | --- | --- |
| BatchEnsemble | `linear.weight` or `conv.weight`, `r_group`, `s_group`, `bias` (M, outputs) | diag(s_m) W diag(r_m) |
| LPBNN | the same with `alpha`, `gamma`, `encoder`, `latent_mean`, `latent_logvar`, `decoder` | the same, r_m decoded |
| Masksembles | `linear` or `conv`, `mask.masks` (M, inputs) | W diag(mask_m) |
| Packed-Ensembles | `conv`, `conv1x1`, or `weight` (groups, outputs / groups, inputs / groups) | its rows of W |
| MIMO | `weight` (outputs, M inputs) first, `weight` (M outputs, inputs) last | slots summed; its rows of the last |
| MCBatchNorm | `means`, `vars` (M, channels) | the base's, with running statistics of draw m |
| mean-field VI | `weight_mu`, `weight_sigma`, `bias_mu`, `bias_sigma` | N(mu, log(1 + exp(sigma))^2): a Posterior |

Rows of one member lie side by side (member, then channel), and so does what a packed norm keeps of channels. A norm of
any other kind is shared, in evaluation mode, by all members. Tensors as in the base module are shared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, SpecError
from onebasin.functional import statistics_in
from onebasin.inference.layers import WEIGHTED, input_units, output_units
from onebasin.inference.member_weights import block_diagonal, member_rows, scaled_weights, slot_sums
from onebasin.inference.seeds import generator
from onebasin.population import Population
from onebasin.posterior import Diagonal, FlatLayout, Gaussian, Posterior
from onebasin.state import State, as_spec, as_state, is_statistic, shared_names, state_of
from onebasin.storage import digest

BATCH_ENSEMBLE, LPBNN, MASKSEMBLES = "BatchEnsemble", "LPBNN", "Masksembles"
PACKED, MIMO, MC_BATCH_NORM = "Packed-Ensembles", "MIMO", "MCBatchNorm"
MEAN_FIELD, SEPARATE = "mean-field VI", "separate networks"

_STD_FACTOR = 0.01  # by which LPBNN layers multiply latent deviations, unless they were built with another number
_INNER = ("linear", "conv", "conv1x1", "conv_transpose")  # where a layer keeps the weight of the base's layer
# Layers that compute each channel by itself.
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BY_CHANNEL = (*_BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.PReLU)
_FILTER_RESPONSE = {"gamma", "beta", "tau"}  # so does a filter response norm, which has no class in torch
_SEPARATE = re.compile(r"(?P<stem>.*\.)?(?P<list>core_models|saved_models)\.(?P<number>\d+)\.(.*\.)?")


class NothingImplicitError(InputError):
    """What was given holds no implicit ensemble that is known."""


def unroll(
    model: nn.Module,
    implicit: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str],
    *,
    draws: int | None = None,
    seed: int = 0,
    std_factor: float | None = None,
) -> Population | Posterior:
    """The members of an implicit ensemble as a Population of the base module; of (mu, rho) layers, a Posterior.

    Known are the layers of torch-uncertainty: packed, BatchEnsemble, masked (Masksembles), LPBNN, MIMO, MC batch norm
    and Bayesian ones; also lists of separate networks (`core_models` of deep ensembles, `saved_models` of checkpoint
    collectors). What is known is the names and shapes of tensors; no code of the file is run, and the library is not
    needed. Member m computes in evaluation mode what the implicit network computes for it, up to rounding.

    `chain` is the training: 0 for all members of a network that share a trained tensor. Members that share none
    (packed, `core_models`) have chains of their own.

    Args:
        model: one member as an ordinary module, with layers of the same names; for a packed network with the width of
            one member, for MIMO with one slot and one head. Not changed.
        implicit: the network, its state dict, or a file with it (`.pt`, `.ckpt`, `.safetensors`). A prefix that a
            wrapper put before the names is stripped; other tensors of the wrapper are left out.
        draws: of LPBNN layers, so many draws of the latents for each member, draw after draw; None for one network
            per member, with latents at their means.
        seed: of these draws.
        std_factor: what LPBNN layers multiply the deviations of latents by in a draw, which no file holds. None for
            that of the module, or 0.01 as the library has it.

    Raises:
        NothingImplicitError: no layer of this kind is in there; an InputError.
        InputError: more than one network is in there.
        SpecError: a layer was recognised, but does not fit the base module or the other layers.

    >>> layer = {"linear.weight": torch.ones(1, 2), "bias": torch.zeros(2, 1)}
    >>> factors = {"r_group": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "s_group": torch.ones(2, 1)}
    >>> unroll(nn.Linear(2, 1), layer | factors).tensor("weight")
    tensor([[[1., 2.]],
    <BLANKLINE>
            [[3., 4.]]])
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise InputError(
            f"expected the base module first, found {type(given).__name__}: give one member as an nn.Module, then the "
            "implicit network"
        )
    whole = _read(implicit)
    base = state_of(model)
    if not base:
        raise InputError(
            f"expected a base module with weights, found {type(model).__name__} without any: give one member"
        )
    if draws is not None and draws < 1:
        raise InputError(
            f"expected draws >= 1, found {draws}: give draws=1, or leave it out for latents at their means"
        )
    found = _recognise(model, base, whole)
    if found.kind != LPBNN and (draws is not None or std_factor is not None):
        name = "draws" if draws is not None else "std_factor"
        more = "draw from the posterior with .draw(n, generator)" if found.kind == MEAN_FIELD else "leave it out"
        raise InputError(f"{name}= is for LPBNN layers, found {found.kind} in {whole.where}: {more}")
    if found.kind == MEAN_FIELD:
        return _posterior(model, base, found)
    if draws is None:
        return _population(base, found, {})
    factor = _one_std_factor(found) if std_factor is None else std_factor
    _draw_latents(found, draws, seed, factor)
    return _population(base, found, {"draws": draws, "seed": seed, "std_factor": factor})


def implicit_kind(names: Iterable[str]) -> str | None:
    """The kind of implicit ensemble whose tensors have such names; None where names alone do not tell.

    >>> implicit_kind(["0.linear.weight", "0.r_group", "0.s_group"])
    'BatchEnsemble'
    """
    found = set(names)
    for name in found:
        for mark, kind in _MARKS.items():
            stem = name.removesuffix(mark)
            # `means` alone may be those of anything.
            if f".{name}".endswith(f".{mark}") and (mark != "means" or f"{stem}vars" in found):
                return kind
    return None


@dataclass(frozen=True)
class _Whole:
    """All tensors of what was given, the modules that own them if these are there, and facts about its file."""

    tensors: State
    modules: Mapping[str, nn.Module]
    where: str
    facts: Mapping[str, Any]


def _read(implicit: nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]) -> _Whole:
    """The tensors of a module, a state dict or a file; files are opened as those of any network."""
    if isinstance(implicit, str | os.PathLike):
        path = Path(implicit)
        networks = Population.open(path)
        if len(networks) != 1:
            raise InputError(
                f"expected one network in {path}, found {len(networks)}: unroll them one by one, and join them with "
                "Population.concatenate"
            )
        facts = {"file": path.name, "sha256": digest(path)} if path.is_file() else {"file": path.name}
        return _Whole(networks.member(0), {}, str(path), facts)
    if not isinstance(implicit, nn.Module):
        return _Whole(as_state(implicit), {}, "the state dict", {})
    modules = dict(implicit.named_modules(remove_duplicate=False))
    tensors = state_of(implicit)
    for path, module in modules.items():  # masks that were moved to another device are no parameters any more
        masks = getattr(module, "masks", None)
        if isinstance(masks, Tensor) and path.rpartition(".")[2] == "mask":
            tensors.setdefault(f"{path}.masks", masks.detach())
    return _Whole(tensors, modules, type(implicit).__name__, {"class": type(implicit).__name__})


@dataclass
class _Layer:
    """One layer of the base module, as it was found in the implicit network.

    Attributes:
        path: of the layer in the base module.
        kind: "" if it is an ordinary layer.
        members: M; 0 where a layer says nothing about it.
        own: tensors of the members by their names in the base module, (M, *shape).
        shared: tensors that all members share.
        spread: standard deviations of the shared ones, of mean-field layers.
        keys: what was read.
        latent: of LPBNN layers, how their members are drawn again.
        has_slots: of MIMO layers, whether they take M inputs side by side.
    """

    path: str
    kind: str = ""
    members: int = 0
    own: State = field(default_factory=dict)
    shared: State = field(default_factory=dict)
    spread: State = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    latent: _Latent | None = None
    has_slots: bool = False


@dataclass(frozen=True)
class _Latent:
    """What draws the factors of an LPBNN layer: N(mean, std^2) of latents (M, latent), and a linear decoder."""

    mean: Tensor
    std: Tensor
    decoder: tuple[Tensor, Tensor]
    weight: Tensor
    outputs: Tensor | None
    layer: nn.Module
    factor: float | None

    def weights(self, noise: Tensor | None = None) -> Tensor:
        """The weights of the members (M, *shape), with latents at their means or away from them by `noise`."""
        latents = self.mean if noise is None else self.mean + self.std * noise.to(self.mean)
        return scaled_weights(self.layer, self.weight, nn.functional.linear(latents, *self.decoder), self.outputs)


@dataclass(frozen=True)
class _Found:
    """A network: its kind ("" if it is ordinary), its layers in the order of the base module, and where it was.

    `one_run` says whether its members were trained together.
    """

    kind: str
    members: int
    layers: list[_Layer]
    prefix: str
    left_out: list[str]
    facts: Mapping[str, Any]
    one_run: bool = True


class _Tensors:
    """The tensors under a prefix, by their names without it; remembers which of a layer were read."""

    def __init__(self, whole: _Whole, prefix: str) -> None:
        self.prefix, self.where = prefix, whole.where
        self.tensors = {name.removeprefix(prefix): t for name, t in whole.tensors.items() if name.startswith(prefix)}
        self.modules = whole.modules

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def module(self, path: str) -> nn.Module | None:
        """The module of the implicit network at a path, if there are modules."""
        return self.modules.get((self.prefix + path).removesuffix("."))

    def take(self, layer: _Layer, name: str, shape: tuple[int | None, ...] | None = None) -> Tensor:
        """A tensor of a layer, by its name within it."""
        key = _join(layer.path, name)
        if key not in self.tensors:
            raise SpecError(
                f"expected {self.prefix}{key} in {self.where} beside other tensors of its layer, found no such "
                "tensor: give a base module with the same biases, and the whole network"
            )
        value = self.tensors[key]
        if shape is not None and (
            value.dim() != len(shape)
            or any(want not in (None, size) for want, size in zip(shape, value.shape, strict=True))
        ):
            wanted = ", ".join("M" if size is None else str(size) for size in shape)
            raise self.misfit(key, f"({wanted})", value)
        layer.keys.add(key)
        return value

    def dim(self, layer: _Layer, name: str) -> int:
        """The number of axes of a tensor of a layer; 0 where there is none."""
        key = _join(layer.path, name)
        return self.tensors[key].dim() if key in self.tensors else 0

    def misfit(self, key: str, wanted: str, value: Tensor) -> SpecError:
        """The refusal of a tensor whose shape does not go with the base module."""
        return SpecError(
            f"expected {self.prefix}{key} of {self.where} with shape {wanted} to fit the base module, found "
            f"{tuple(value.shape)}: give one member as the base module (of a packed network, that has the width of one)"
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _recognise(model: nn.Module, base: State, whole: _Whole) -> _Found:
    """The one implicit network among all places where the layers of the base module are."""
    attempts = [_attempt(model, base, whole, prefix) for prefix in _prefixes(base, whole.tensors)]
    found = [attempt for attempt in attempts if isinstance(attempt, _Found) and attempt.kind]
    if different := [other for other in found[1:] if not _same(whole, found[0].prefix, other.prefix)]:
        raise InputError(
            f"expected one implicit network in {whole.where}, found {found[0].kind} under {found[0].prefix!r} and "
            f"{different[0].kind} under {different[0].prefix!r}: give the tensors of one of them as a dict"
        )
    if found:
        return found[0]
    ordinary = [attempt for attempt in attempts if isinstance(attempt, _Found)]
    if separate := _separate(ordinary):
        return separate
    for attempt in attempts:
        if isinstance(attempt, _Misfit) and attempt.recognised:
            raise attempt.error
    known = "packed, BatchEnsemble, masked, LPBNN, MIMO, MC batch norm or Bayesian layers"
    if ordinary:
        places = [network.prefix for network in ordinary]
        raise NothingImplicitError(
            f"expected {known} in {whole.where}, found the tensors of an ordinary network: open it with Population.open"
            if len(places) == 1
            else f"expected {known} in {whole.where}, found ordinary networks under {' and '.join(map(repr, places))}: "
            "give the tensors of one of them to Population.from_states"
        )
    misfits = [attempt for attempt in attempts if isinstance(attempt, _Misfit)]
    if misfits:
        raise NothingImplicitError(f"expected {known} in {whole.where}, recognised none: {misfits[0].error}") from None
    layers = sorted({name.rpartition(".")[0] for name in base})
    raise NothingImplicitError(
        f"expected {known} in {whole.where} at the layers of the base module ({', '.join(layers[:4]) or 'one'}), found "
        f"tensors like {next(iter(whole.tensors), 'none')}: give a base module whose layers have the same names"
    )


@dataclass(frozen=True)
class _Misfit:
    """Why the tensors under a prefix are no network of the base module, and whether an implicit layer is among them."""

    error: SpecError
    recognised: bool


def _prefixes(base: State, tensors: State) -> list[str]:
    """Prefixes under which every layer of the base module has tensors, shortest first."""
    places = {""} | {
        ".".join(parts[:end]) for name in tensors for parts in [name.split(".")] for end in range(1, len(parts))
    }
    layers = sorted({name.rpartition(".")[0] for name in base}, key=len, reverse=True)
    ends = [
        place.removesuffix(layers[0]) for place in places if f".{place}".endswith(f".{layers[0]}" if layers[0] else "")
    ]
    prefixes = {f"{place}." if place and not layers[0] else place for place in ends}
    return sorted(
        (prefix for prefix in prefixes if all((prefix + layer).removesuffix(".") in places for layer in layers)),
        key=lambda prefix: (prefix.count("."), prefix),
    )


def _attempt(model: nn.Module, base: State, whole: _Whole, prefix: str) -> _Found | _Misfit:
    """The network under a prefix, or why there is none."""
    tensors = _Tensors(whole, prefix)
    layers, error = list[_Layer](), None
    for path, names in _layers(base).items():
        layer = _Layer(path)
        layers.append(layer)
        try:
            _read_layer(layer, names, model.get_submodule(path), base, tensors)
        except SpecError as refused:
            error = error or refused
    kinds = {layer.kind: layer for layer in reversed(layers) if layer.kind}
    try:
        if error is None:
            _check_whole(model, layers, kinds, tensors)
    except SpecError as refused:
        error = refused
    if error is not None:
        return _Misfit(error, bool(kinds.keys() - {MIMO}))
    left_out = [name for name in whole.tensors if not name.startswith(prefix)]
    kind = next(iter(kinds), "")
    common = [name for layer in layers for name in layer.shared if not is_statistic(name)]
    members = kinds[kind].members if kind else 1
    return _Found(kind, members, layers, prefix, left_out, whole.facts, one_run=kind != PACKED or bool(common))


def _layers(base: State) -> dict[str, list[str]]:
    """The layers that own tensors: path -> names within it, in the order of the state dict."""
    layers: dict[str, list[str]] = {}
    for name in base:
        path, _, own = name.rpartition(".")
        layers.setdefault(path, []).append(own)
    return layers


# What is found in a layer of one kind, and in no other.
_MARKS = {
    "r_group": BATCH_ENSEMBLE,
    "s_group": BATCH_ENSEMBLE,
    "latent_mean.weight": LPBNN,
    "mask.masks": MASKSEMBLES,
    "means": MC_BATCH_NORM,
    "weight_mu": MEAN_FIELD,
}


def _read_layer(layer: _Layer, names: list[str], module: nn.Module, base: State, tensors: _Tensors) -> None:
    """Read one layer of the base module out of the implicit network."""

    def new(name: str) -> bool:
        key = _join(layer.path, name)
        return key in tensors and key not in base

    shapes = {name: tuple(base[_join(layer.path, name)].shape) for name in names}
    inner = next((name for name in _INNER if new(f"{name}.weight")), None)
    mark = next((name for name in _MARKS if new(name)), None)
    flat = len(shapes.get("weight", ())) == 2
    packed_linear = flat and tensors.dim(layer, "weight") == 3  # (groups, outputs / groups, inputs / groups)
    layer.kind = _MARKS[mark] if mark else PACKED if "weight" in names and (inner or packed_linear) else ""
    if not layer.kind:
        _read_plain(layer, shapes, module, tensors)
    elif layer.kind == MEAN_FIELD:
        _read_mean_field(layer, shapes, tensors)
    elif layer.kind == MC_BATCH_NORM:
        _read_mc_batch_norm(layer, shapes, tensors)
    elif not isinstance(module, WEIGHTED) or not set(names) <= {"weight", "bias"}:
        raise SpecError(
            f"expected a linear layer or a convolution of the base module at {layer.path or 'its root'}, where "
            f"{tensors.where} has {layer.kind}, found {type(module).__name__}: give one member as the base module"
        )
    elif layer.kind == PACKED:
        _read_packed(layer, shapes, module, tensors, f"{inner}." if inner else "")
    elif inner is None:
        key = _join(layer.path, mark or "")
        raise SpecError(
            f"expected a shared weight (linear.weight or conv.weight) beside {tensors.prefix}{key} in {tensors.where}, "
            "found none: give the whole network"
        )
    else:
        _read_scaled(layer, shapes, module, tensors, inner)


def _read_scaled(
    layer: _Layer, shapes: Mapping[str, tuple[int, ...]], module: nn.Module, tensors: _Tensors, inner: str
) -> None:
    """BatchEnsemble, LPBNN and Masksembles: a shared weight whose inputs and outputs have factors."""
    weight = tensors.take(layer, f"{inner}.weight", shapes["weight"])
    inputs, outputs = input_units(module), output_units(module)
    if layer.kind == MASKSEMBLES:
        masks = tensors.take(layer, "mask.masks", (None, inputs))
        layer.members = len(masks)
        layer.own["weight"] = scaled_weights(module, weight, masks)
        if "bias" in shapes:
            layer.shared["bias"] = tensors.take(layer, f"{inner}.bias", shapes["bias"])
        return
    if layer.kind == BATCH_ENSEMBLE:
        by_input = tensors.take(layer, "r_group", (None, inputs))
        layer.members = len(by_input)
        by_output = tensors.take(layer, "s_group", (layer.members, outputs))
        layer.own["weight"] = scaled_weights(module, weight, by_input, by_output)
    else:
        layer.latent = _latent(layer, module, weight, tensors)
        layer.own["weight"] = layer.latent.weights()
    if "bias" in shapes:
        layer.own["bias"] = tensors.take(layer, "bias", (layer.members, outputs))


def _latent(layer: _Layer, module: nn.Module, weight: Tensor, tensors: _Tensors) -> _Latent:
    """The encoder of an LPBNN layer, evaluated; the decoder is linear, so mean latents give mean factors."""
    inputs, outputs = input_units(module), output_units(module)
    alpha = tensors.take(layer, "alpha", (None, inputs))
    layer.members = len(alpha)

    def part(name: str) -> tuple[Tensor, Tensor]:
        return tensors.take(layer, f"{name}.weight"), tensors.take(layer, f"{name}.bias")

    hidden = nn.functional.linear(alpha, *part("encoder")).relu()
    mean = nn.functional.linear(hidden, *part("latent_mean"))
    std = (nn.functional.linear(hidden, *part("latent_logvar")) / 2).exp()
    # Convolutions may have been built without factors of their outputs.
    has_gamma = _join(layer.path, "gamma") in tensors
    gamma = tensors.take(layer, "gamma", (layer.members, outputs)) if has_gamma else None
    factor = getattr(tensors.module(layer.path), "std_factor", None)
    return _Latent(mean, std, part("decoder"), weight, gamma, module, factor)


def _read_packed(
    layer: _Layer, shapes: Mapping[str, tuple[int, ...]], module: nn.Module, tensors: _Tensors, inner: str
) -> None:
    """A packed layer: rows of one member lie side by side, whatever its groups and whether it is the first.

    The first layer has one group, and every member sees all inputs; all others have M * gamma groups. Both times the
    rows of member m hold what it computes; gamma > 1 is what a grouped layer computes, or a block diagonal.
    """
    stored = tensors.take(layer, f"{inner}weight")
    key, shape = _join(layer.path, f"{inner}weight"), shapes["weight"]
    groups = int(getattr(module, "groups", 1))
    weight = stored
    if not inner:
        weight = stored.flatten(0, 1)
    elif inner == "conv1x1." and stored.dim() == 3:
        weight = stored[:, :, 0]
    elif (
        getattr(module, "transposed", False)
        and stored.dim() == len(shape)
        and stored.shape[0] == shape[0]
        and stored.shape[1] % shape[1] == 0
    ):
        # Rows of a transposed convolution are inputs: those of a first layer are common, and its columns are in turn.
        weight = stored.unflatten(1, (-1, shape[1])).movedim(1, 0).flatten(0, 1)
    rows, columns = shape[:2]
    if (
        weight.dim() != len(shape)
        or weight.shape[2:] != shape[2:]
        or weight.shape[0] % rows
        or columns % weight.shape[1]
        or rows % (groups * (columns // weight.shape[1]))
    ):
        raise tensors.misfit(key, f"(M * {rows}, {', '.join(map(str, shape[1:]))})", stored)
    layer.members = weight.shape[0] // rows
    if layer.members == 1 and inner in ("linear.", "conv."):
        raise SpecError(
            f"expected the weights of several members under {tensors.prefix}{key} of {tensors.where}, found those of "
            "one: if the layer is masked (Masksembles), the file lacks its masks, so give the module itself"
        )
    members = member_rows(weight, layer.members)
    layer.own["weight"] = torch.stack([block_diagonal(member, columns, groups) for member in members])
    if "bias" in shapes:
        bias = tensors.take(layer, f"{inner}bias", (layer.members * shapes["bias"][0],))
        layer.own["bias"] = member_rows(bias, layer.members)


def _read_mc_batch_norm(layer: _Layer, shapes: Mapping[str, tuple[int, ...]], tensors: _Tensors) -> None:
    """MC batch norm: statistics of M batches, each with the same weight and bias."""
    if "running_mean" not in shapes:
        raise SpecError(
            f"expected a batch norm with running statistics at {layer.path} of the base module, where {tensors.where} "
            "has those of MC batch norm, found none: give one with track_running_stats=True"
        )
    means = tensors.take(layer, "means", (None, *shapes["running_mean"]))
    variances = tensors.take(layer, "vars", tuple(means.shape))
    layer.members = len(means)
    empty = (means == 0).all(1) & ((variances == 0) | (variances == 1)).all(1)
    if bool(empty.any()):
        raise SpecError(
            f"expected statistics of {layer.members} batches in {tensors.prefix}{_join(layer.path, 'means')} of "
            f"{tensors.where}, found {int(empty.sum())} that were never filled: run the MC batch norm's fit on data "
            "before its weights are saved"
        )
    layer.own = {"running_mean": means, "running_var": variances}
    for name in shapes:
        if name in ("weight", "bias"):
            layer.shared[name] = tensors.take(layer, name, shapes[name])
        elif name == "num_batches_tracked":
            layer.shared[name] = torch.zeros((), dtype=torch.int64, device=means.device)
    layer.keys |= {_join(layer.path, name) for name in ("running_mean", "running_var", "num_batches_tracked")}


def _read_mean_field(layer: _Layer, shapes: Mapping[str, tuple[int, ...]], tensors: _Tensors) -> None:
    """A mean-field layer: means, and rho with standard deviations log(1 + exp(rho)); the library says sigma for rho."""
    for name in shapes:
        mean, rho = (tensors.take(layer, f"{name}_{part}", shapes[name]) for part in ("mu", "sigma"))
        layer.shared[name] = mean
        wide = rho.to(torch.promote_types(rho.dtype, torch.float32))
        layer.spread[name] = torch.logaddexp(wide, torch.zeros_like(wide))
    helpers = tuple(_join(layer.path, f"{name}_{end}.") for name in shapes for end in ("sampler", "prior_dist"))
    layer.keys |= {name for name in tensors.tensors if name.startswith(helpers)}


def _read_plain(layer: _Layer, shapes: Mapping[str, tuple[int, ...]], module: nn.Module, tensors: _Tensors) -> None:
    """An ordinary layer; one with more channels, of a packed network; or the first or last layer of MIMO."""
    values = {name: tensors.take(layer, name) for name in shapes}
    different = [name for name in shapes if tuple(values[name].shape) != shapes[name]]
    if not different:
        layer.shared = values
        return
    error = tensors.misfit(_join(layer.path, different[0]), str(shapes[different[0]]), values[different[0]])
    factors = {name: _factors(tuple(values[name].shape), shapes[name]) for name in different}
    multiples = {factor for axes in factors.values() for factor in axes or (0,)} - {1}
    if len(multiples) != 1 or 0 in multiples:
        raise error
    (members,) = multiples
    if isinstance(module, _BY_CHANNEL) or set(shapes) == _FILTER_RESPONSE:
        if any(axes.count(members) != 1 for axes in factors.values()):
            raise error
        for name, axes in factors.items():
            axis = axes.index(members)
            layer.own[name] = values[name].unflatten(axis, (members, -1)).movedim(axis, 0)
    elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
        raise SpecError(
            f"expected layers that compute every member by itself, found {tensors.prefix}{layer.path} in "
            f"{tensors.where}, a norm over the channels of several members: such a network cannot be taken apart"
        )
    elif _is_mimo(factors, shapes, module, members):
        layer.kind, layer.members = MIMO, members
        layer.has_slots = factors["weight"][1] > 1
        weight = slot_sums(values["weight"], members) if layer.has_slots else values["weight"]
        values["weight"] = weight
        heads = [name for name, axes in factors.items() if axes[0] > 1]
        layer.own = {name: member_rows(values[name], members) for name in heads}
    else:
        raise error
    layer.shared = {name: value for name, value in values.items() if name not in layer.own}
    layer.members = members


def _is_mimo(
    factors: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], module: nn.Module, members: int
) -> bool:
    """Whether an ordinary layer has M times the inputs, or M times the outputs with a bias for each, or both."""
    axes = factors.get("weight", ())
    return (
        len(axes) >= 2
        and set(axes[2:]) <= {1}
        and int(getattr(module, "groups", 1)) == 1
        and not getattr(module, "transposed", False)
        and ("bias" in factors) == (axes[0] == members and "bias" in shapes)
    )


def _factors(found: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """For each axis the multiple of what the base module has; nothing where that is not the difference."""
    if len(found) != len(shape) or any(not wanted or size % wanted for size, wanted in zip(found, shape, strict=True)):
        return ()
    return tuple(size // wanted for size, wanted in zip(found, shape, strict=True))


def _check_whole(model: nn.Module, layers: list[_Layer], kinds: Mapping[str, _Layer], tensors: _Tensors) -> None:
    """Refuse layers that do not make one network together, and tensors that the base module knows nothing about."""
    read = set().union(*(layer.keys for layer in layers))
    if unread := [name for name in tensors.tensors if name not in read]:
        raise SpecError(
            f"expected only tensors of layers that the base module has, found {tensors.prefix}{unread[0]} in "
            f"{tensors.where}: give a base module with this layer (and with the same biases)"
        )
    if len(kinds) > 1:
        first, second = list(kinds.values())[:2]
        raise SpecError(
            f"expected layers of one kind in {tensors.where}, found {first.kind} at {first.path} and {second.kind} at "
            f"{second.path}: a network of both cannot be unrolled"
        )
    counted = [layer for layer in layers if layer.members]
    if different := [layer for layer in counted if layer.members != counted[0].members]:
        first, second = counted[0], different[0]
        raise SpecError(
            f"expected one number of members in all layers of {tensors.where}, found {first.members} at "
            f"{first.path or 'the root'} and {second.members} at {second.path}: give one member as the base "
            "module (of a packed network, that has the width of one)"
        )
    split = next((layer for layer in layers if layer.own and not layer.kind), None)
    if split is not None and set(kinds) != {PACKED}:
        key = _join(split.path, next(iter(split.own)))
        raise SpecError(
            f"expected {tensors.prefix}{key} of {tensors.where} with the channels of the base module, found "
            f"{split.members} times as many, and no packed layer: give one member as the base module"
        )
    if MIMO in kinds:
        _check_mimo(model, [layer for layer in layers if layer.kind == MIMO], tensors)


def _check_mimo(model: nn.Module, layers: list[_Layer], tensors: _Tensors) -> None:
    """Refuse a network that is merely wider than the base module: its slots must come first, and its heads last."""
    order = _order_of_calls(model)
    slots = [layer for layer in layers if layer.has_slots]
    heads = [layer for layer in layers if layer.own]
    place = {layer.path: order.get(layer.path, number) for number, layer in enumerate(layers)}
    one_layer = len(layers) == 1 and slots == heads
    if one_layer or (slots and heads and max(place[s.path] for s in slots) < min(place[h.path] for h in heads)):
        return
    raise SpecError(
        f"expected M times the inputs in the first layer and M times the outputs in the last, as MIMO has, found "
        f"{tensors.prefix}{_join(layers[0].path, 'weight')} in {tensors.where} wider than that of the base module: "
        "give a base module of the width of the network"
    )


def _order_of_calls(model: nn.Module) -> dict[str, int]:
    """When the forward pass uses each layer, by its path; by the order of the state dict where it cannot be traced."""
    try:
        nodes = torch.fx.symbolic_trace(model).graph.nodes
    except Exception:  # control flow that depends on values fails in any way
        return {path: number for number, path in enumerate(_layers(state_of(model)))}
    order: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if node.op == "call_module":
            order.setdefault(str(node.target), number)
        elif node.op == "get_attr":
            order.setdefault(str(node.target).rpartition(".")[0], number)
    return order


def _same(whole: _Whole, first: str, second: str) -> bool:
    """Whether the tensors under two prefixes are the same, as where a loss keeps a reference to the model."""
    a, b = (
        {name.removeprefix(prefix): value for name, value in whole.tensors.items() if name.startswith(prefix)}
        for prefix in (first, second)
    )
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _separate(networks: list[_Found]) -> _Found | None:
    """Ordinary networks in a list that a wrapper of the library keeps, as one network of so many members."""
    numbered = {network.prefix: found for network in networks if (found := _SEPARATE.fullmatch(network.prefix))}
    if not numbered or len({(found["stem"], found["list"]) for found in numbered.values()}) != 1:
        return None
    members = sorted((n for n in networks if n.prefix in numbered), key=lambda n: int(numbered[n.prefix]["number"]))
    layers = [
        _Layer(
            same[0].path,
            SEPARATE,
            len(members),
            own={name: torch.stack([layer.shared[name] for layer in same]) for name in same[0].shared},
        )
        for same in zip(*(member.layers for member in members), strict=True)
    ]
    kept = tuple(member.prefix for member in members)
    left_out = [name for name in _names_of(members) if not name.startswith(kept)]
    found = numbered[kept[0]]
    return _Found(
        SEPARATE,
        len(members),
        layers,
        f"{found['stem'] or ''}{found['list']}.",
        left_out,
        members[0].facts,
        one_run=found["list"] != "core_models",
    )


def _names_of(members: list[_Found]) -> list[str]:
    """Names that at least one of the networks left out."""
    return sorted(set().union(*(member.left_out for member in members)))


def _one_std_factor(found: _Found) -> float:
    """The factor of the module's layers, which must be one and the same; of a file, the library's default."""
    factors = {layer.latent.factor for layer in found.layers if layer.latent and layer.latent.factor is not None}
    if len(factors) > 1:
        raise InputError(
            f"expected one std_factor in all LPBNN layers, found {sorted(factors)}: give the one to use as std_factor="
        )
    return next(iter(factors), _STD_FACTOR)


def _draw_latents(found: _Found, draws: int, seed: int, factor: float) -> None:
    """Replace the members of LPBNN layers by draws of their latents, each from a stream of its layer and its number."""
    for layer in found.layers:
        if layer.latent is None:
            continue
        shape = tuple(layer.latent.mean.shape)
        noise = [
            factor * torch.randn(shape, generator=generator(seed, "latents", layer.path, draw), dtype=torch.float64)
            for draw in range(draws)
        ]
        layer.own = {name: value.repeat(draws, *(1,) * (value.dim() - 1)) for name, value in layer.own.items()}
        layer.own["weight"] = torch.cat([layer.latent.weights(each) for each in noise])


def _population(base: State, found: _Found, facts: Mapping[str, Any]) -> Population:
    """The members as networks of the base module."""
    own = {_join(layer.path, name): value for layer in found.layers for name, value in layer.own.items()}
    shared = {_join(layer.path, name): value for layer in found.layers for name, value in layer.shared.items()}
    count = len(next(iter(own.values())))
    stacked = {
        name: (own[name] if name in own else shared[name].expand(count, *shared[name].shape)).detach().clone()
        for name in base
    }
    chain = torch.zeros(count, dtype=torch.int64) if found.one_run else torch.arange(count)
    return Population.from_stacked(stacked, chain=chain, provenance={**_provenance(found), **facts})


def _posterior(model: nn.Module, base: State, found: _Found) -> Posterior:
    """The diagonal Gaussian of mean-field layers; ordinary layers are constants of it."""
    values = {_join(layer.path, name): value for layer in found.layers for name, value in layer.shared.items()}
    spread = {_join(layer.path, name): value for layer in found.layers for name, value in layer.spread.items()}
    tied = {name: first for name, first in shared_names(model).items() if name != first and first in spread}
    names = tuple(name for name in base if name in spread and name not in tied)
    layout = FlatLayout(names, as_spec({name: values[name] for name in base}), tied)
    deviations = torch.cat([spread[name].reshape(-1) for name in names])
    centre = torch.cat([values[name].reshape(-1) for name in names]).to(deviations.dtype)
    buffers = {name: values[name].detach().clone() for name in layout.buffer_names}
    # The layers draw weights and keep the statistics, which training measured under the noise of the weights.
    facts = {**_provenance(found), "constant_statistics": list(statistics_in(layout.buffer_names))}
    return Posterior.equal([Gaussian(centre, Diagonal(deviations))], layout, [buffers], provenance=facts)


def _provenance(found: _Found) -> dict[str, Any]:
    """What was recognised, and where."""
    return {
        "unrolled": found.kind,
        "members": found.members,
        "layers": {layer.path: layer.kind for layer in found.layers if layer.kind},
        "prefix": found.prefix,
        "left_out": sorted({name.split(".")[0] for name in found.left_out}),
        **found.facts,
    }
