"""Brute force: does the function really stay the same? Knows nothing of `onebasin`, only legs and forward passes.

Everything is float64. Scale freedoms are counted as the null space of finite-difference derivatives along the
legs of one unit, signs by trying all flips of the legs of one unit, permutations by trying random ones.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .expect import Case, Expected

State = dict[str, Tensor]
TOLERANCE = 1e-9


def leaves(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    parts = value.values() if hasattr(value, "values") else value
    return [leaf for part in parts for leaf in leaves(part)]


class Wide(TorchFunctionMode):
    """Casts to float32 inside a model (RMSNorm, rotary tables and softmax of `transformers`) become float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(widen, args), **{key: widen(value) for key, value in (kwargs or {}).items()})


def call(model: nn.Module, state: State, inputs: Any) -> Tensor:
    """All outputs of the model under `state`, flattened into one vector."""
    args = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    kwargs = inputs if isinstance(inputs, dict) else {}
    exact = next(iter(state.values())).dtype == torch.float64
    with Wide() if exact else nullcontext():
        out = functional_call(model, state, args, kwargs)
    return torch.cat([leaf.reshape(-1) for leaf in leaves(out) if leaf.is_floating_point()])


def double(inputs: Any) -> Any:
    """The same inputs with floating tensors in float64."""
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: double(value) for key, value in inputs.items()}
    return tuple(double(value) for value in inputs)


def redraw(inputs: Any, generator: torch.Generator) -> Any:
    """Fresh inputs of the same shapes: normal numbers, or integers in the range seen; booleans stay."""
    if isinstance(inputs, Tensor):
        if inputs.is_floating_point():
            return 1.5 * torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
        if inputs.dtype == torch.bool:
            return inputs
        return torch.randint(int(inputs.max()) + 1, inputs.shape, generator=generator)
    if isinstance(inputs, dict):
        return {key: redraw(value, generator) for key, value in inputs.items()}
    return tuple(redraw(value, generator) for value in inputs)


def state_of(model: nn.Module) -> State:
    """Parameters and floating buffers of the state dict, each shared tensor once."""
    kept = set(model.state_dict())
    found = dict(model.named_parameters())
    found |= {name: b for name, b in model.named_buffers() if name in kept and b.is_floating_point()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def positions(leg: str, state: State, size: int, copies: int) -> tuple[str, Tensor]:
    """The tensor a leg names and the flat positions of its entries, shape (copies, size, entries per unit)."""
    match = re.fullmatch(r"([\w.]+)\((.*)\)", leg)
    assert match, f"not a leg: {leg}"
    name, axes = match[1], match[2].split(",")
    shape = state[name].shape
    index = torch.arange(math.prod(shape)).view(shape)
    labels: list[str] = []
    sizes: list[int] = []
    for axis, text in enumerate(axes + ["*"] * (len(shape) - len(axes))):
        if "|" in text:
            text, rest = text.split("|")[1], text.split("|")[0]
            spans = [range(*map(int, span.split(":"))) for span in rest.split("+")]
            index = index.index_select(axis, torch.tensor([i for span in spans for i in span]))
        factors = text.split(".")
        known = [_extent(factor, size) for factor in factors]
        spare = index.shape[axis] // math.prod(k for k in known if k)
        labels += factors
        sizes += [k or spare for k in known]
    index = index.reshape(sizes)
    for place in reversed([i for i, label in enumerate(labels) if "#" in label]):
        index = index.select(place, int(labels.pop(place).split("#")[0]))
    fibres = sorted((label, i) for i, label in enumerate(labels) if label[0].isalpha() and label != "u")
    order = [i for _, i in fibres] + [labels.index("u")]
    order += [i for i in range(len(labels)) if i not in order]
    return name, index.permute(order).reshape(copies, size, -1)


def _extent(factor: str, size: int) -> int:
    if factor == "*":
        return 0
    return size if factor == "u" else int(factor.split("#")[-1].lstrip("abcdefgh"))


def positive(name: str) -> bool:
    """Whether a tensor must stay positive for the model to make sense."""
    return name.endswith(("running_var", "std"))


class Probe:
    """One case in float64 under several generic states, with a few batches of inputs and the outputs to be kept.

    A symmetry of the architecture holds whatever the weights, so a unit that happens to be dead in one state is
    alive in another and claims no accidental freedom.
    """

    def __init__(self, case: Case, batches: int = 2, states: int = 4) -> None:
        self.model = case.build().double()
        generator = torch.Generator().manual_seed(7)
        first, state = double(case.inputs()), state_of(self.model)
        self.inputs = [first] + [redraw(first, generator) for _ in range(batches - 1)]
        self.states = [state] + [self._redrawn(state, generator) for _ in range(states - 1)]
        self.kept = [self.outputs(state) for state in self.states]

    def _redrawn(self, state: State, generator: torch.Generator) -> State:
        fresh = {}
        for name, tensor in state.items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            flip = 1.0 if positive(name) else noise.sign()
            fresh[name] = tensor * flip * torch.exp(0.3 * noise)
        return fresh

    def outputs(self, state: State) -> Tensor:
        """The outputs on all batches, one vector."""
        with torch.no_grad():
            return torch.cat([call(self.model, state, batch) for batch in self.inputs])

    def error(self, change: Callable[[State], State]) -> float:
        """Largest change of any output in any state, relative to the largest output; stops at the first that shows."""
        worst = 0.0
        for state, kept in zip(self.states, self.kept, strict=True):
            worst = max(worst, float((self.outputs(change(state)) - kept).abs().max() / kept.abs().max()))
            if worst > TOLERANCE:
                break
        return worst

    def legs(self, space: Expected) -> list[list[tuple[str, Tensor]]]:
        """The legs of a space; joined ones together."""
        words, state = space.legs.split(), self.states[0]
        return [[positions(leg, state, space.size, space.copies) for leg in word.split("&")] for word in words]

    def multiplied(self, state: State, factors: list[tuple[str, Tensor, float]]) -> State:
        """The state with the entries at each position list multiplied; var + eps of a batch norm by the square."""
        state = dict(state)
        for name, where, factor in factors:
            tensor, shift = state[name].clone(), self._eps(name)
            factor = factor**2 if name.endswith("running_var") else factor
            tensor.view(-1)[where] = (tensor.view(-1)[where] + shift) * factor - shift
            state[name] = tensor
        return state

    def _eps(self, name: str) -> float:
        if not name.endswith("running_var"):
            return 0.0
        owner: Any = self.model.get_submodule(name.removesuffix("running_var").rstrip("."))
        return owner.eps


def permutation_error(probe: Probe, space: Expected, seed: int = 3) -> float:
    """Change of the function under a random permutation of the units, drawn independently in every fibre."""
    generator = torch.Generator().manual_seed(seed)
    orders = [_moving(space.size, generator) for _ in range(space.copies)]
    legs = probe.legs(space)

    def permuted(state: State) -> State:
        state = {name: tensor.clone() for name, tensor in state.items()}
        for name, where in itertools.chain.from_iterable(legs):
            flat, moved = state[name].view(-1), torch.stack([where[c, o] for c, o in enumerate(orders)])
            flat[where] = flat[moved].clone()
        return state

    return probe.error(permuted)


def _moving(size: int, generator: torch.Generator) -> Tensor:
    while True:
        order = torch.randperm(size, generator=generator)
        if size == 1 or bool((order != torch.arange(size)).any()):
            return order


def scale_counts(probe: Probe, space: Expected) -> tuple[int, int]:
    """Dimensions of the exponent vectors of one unit that keep the function: (not moving, moving a running mean)."""
    legs, step, columns, bends = probe.legs(space), 1e-6, [], []
    scale = torch.cat([torch.full_like(kept, 1 / float(kept.norm())) for kept in probe.kept])
    middle = torch.cat(probe.kept)
    for leg in legs:
        ends = []
        for factor in (1 + step, 1 - step):
            factors = [(name, where[-1, -1], factor) for name, where in leg]
            ends.append(torch.cat([probe.outputs(probe.multiplied(state, factors)) for state in probe.states]))
        column = (ends[0] - ends[1]) * scale / (2 * step)
        columns.append(column if column.norm() > 1e-8 else torch.zeros_like(column))
        bends.append((ends[0] + ends[1] - 2 * middle).abs() * scale / step)
    smooth = torch.stack(bends).amax(0) < 1e-5  # elsewhere a relu or a maximum switched between the two ends
    columns = [column[smooth] for column in columns]
    plain = [c for leg, c in zip(legs, columns, strict=True) if not _is_statistic(leg)]
    free, total = nullity(torch.stack(plain, 1)), nullity(torch.stack(columns, 1))
    return free, total - free


def nullity(matrix: Tensor, tolerance: float = 1e-6) -> int:
    """Columns minus numerical rank, after giving every column that is not zero the same norm."""
    norms = matrix.norm(dim=0)
    live = norms > 1e-10 * norms.max()  # the others are rounding: dead parameters
    values = torch.linalg.svdvals(torch.where(live, matrix / norms, 0.0))
    return matrix.shape[1] - int((values > tolerance * values.max()).sum())


def sign_counts(probe: Probe, space: Expected) -> tuple[int, int]:
    """Dimensions over GF(2) of the sign flips of one unit that keep the function: (not flipping, flipping) a mean."""
    legs = probe.legs(space)
    means = [i for i, leg in enumerate(legs) if _is_statistic(leg)]
    plain = total = 0
    for flips in itertools.product((False, True), repeat=len(legs)):
        chosen = [(n, w[-1, -1], -1.0) for leg, flip in zip(legs, flips, strict=True) if flip for n, w in leg]
        if probe.error(lambda state, chosen=chosen: probe.multiplied(state, chosen)) < TOLERANCE:
            total += 1
            plain += not any(flips[i] for i in means)
    assert total & (total - 1) == 0, "the flips that keep the function are not a group"
    free = plain.bit_length() - 1
    return free, total.bit_length() - 1 - free


def _is_statistic(leg: list[tuple[str, Tensor]]) -> bool:
    return any(name.endswith("running_mean") for name, _ in leg)


def diagonal_freedoms(case: Case, states: int = 8) -> int:
    """Dimension of ALL entrywise rescalings of the parameters that keep the function (running statistics fixed)."""
    probe = Probe(case, batches=1, states=states)
    names = [name for name, _ in probe.model.named_parameters()]
    entries = sum(probe.states[0][name].numel() for name in names)
    generator, rows = torch.Generator().manual_seed(11), []
    for state in probe.states:
        state = {name: tensor.requires_grad_(name in names) for name, tensor in state.items()}
        weights, count = [state[name] for name in names], 0
        while count < 2 * entries / states + 50:
            values = call(probe.model, state, redraw(probe.inputs[0], generator))
            for value in values[torch.randperm(len(values), generator=generator)[:40]]:
                grads = torch.autograd.grad(
                    value, weights, retain_graph=True, materialize_grads=True, allow_unused=True
                )
                row = torch.cat([(g * w.detach()).reshape(-1) for g, w in zip(grads, weights, strict=True)])
                rows.append(row / row.norm().clamp_min(1e-300))
                count += 1
    return nullity(torch.stack(rows), 1e-8)
