"""The curvature of the log likelihood at a network, in the form that is wanted, and the posterior it implies.

With curvature G and prior precision Lambda the Laplace approximation is N(theta, (G + Lambda)^-1), and its evidence is

    log p(data) = log p(data | theta) + 1/2 (log det Lambda - theta^T Lambda theta - log det(G + Lambda)).

Lambda has one value per tensor. It is chosen after G, so G is kept by its eigenvalues where that is possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from onebasin.errors import InputError
from onebasin.functional import IGNORED, batches
from onebasin.inference.likelihood import LogLikelihood, categorical, learned_gaussian
from onebasin.inference.target import Outputs, ParameterLayout, Target
from onebasin.posterior import Block, Covariance, Diagonal, Full, Kronecker
from onebasin.state import State

# How sharply the log likelihood bends in a model's outputs: a root of its curvature for every example.
#
# The generalised Gauss-Newton matrix of the weights is G = sum_n J_n^T H_n J_n with the Jacobian J_n of the outputs and
# the curvature H_n = S_n S_n^T of the negative log likelihood in them, so it is a sum of squares of the rows S_n^T J_n.


def output_roots(likelihood: LogLikelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Roots S (n, K, R) with H = S S^T, for outputs (n, ...) of K numbers each.

    Categorical, bernoulli and gaussian with given noise: H is the Hessian, which is also the Fisher information.
    Gaussian with learned noise: H is the Fisher information diag(exp(-2 s), 2) of means and log standard deviations s,
    because the Hessian may be indefinite. A function of the user: H is its Hessian without its negative eigenvalues.

    >>> root = output_roots(categorical, torch.zeros(1, 2), torch.tensor([0]))
    >>> root @ root.mT
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """
    if likelihood is categorical and outputs.dim() == 2:
        chances = outputs.softmax(1)
        root = chances.sqrt()
        every = torch.diag_embed(root) - chances[:, :, None] * root[:, None, :]
        return torch.where((targets != IGNORED)[:, None, None], every, 0.0)
    if likelihood is learned_gaussian:
        log_std = outputs.chunk(2, dim=1)[1]
        parts = torch.stack([torch.exp(-log_std), torch.full_like(log_std, math.sqrt(2))], dim=1)
        if targets.dim() > 2:  # of pixels some may be missing
            parts = torch.where(targets.isnan().reshape(log_std.shape)[:, None], 0.0, parts)
        return torch.diag_embed(parts.flatten(1))

    def negative(output: Tensor, target: Tensor) -> Tensor:
        return -likelihood(output[None], target[None])[0]

    size = outputs[0].numel()
    curvature = vmap(jacrev(jacrev(negative)))(outputs, targets).reshape(len(outputs), size, size)
    values, vectors = torch.linalg.eigh(curvature.double())
    found: Tensor = (vectors * values.clamp(min=0).sqrt()[:, None, :]).to(outputs.dtype)
    return found


# The generalised Gauss-Newton matrix by its rows: exact, for any model, at the cost of one Jacobian per example.

_ENTRIES = 2**24  # numbers in the Jacobians of one piece of the data
_PIECE = 64  # examples in one piece: all its activations are there once per root


class Seen(NamedTuple):
    """One network and the data it is seen on; what a Target knows, where it has data.

    Attributes:
        target: the posterior.
        outputs: the model.
        likelihood: of its outputs.
        sampled: weights of the network by name.
        buffers: what it carries beside them.
    """

    target: Target
    outputs: Outputs
    likelihood: LogLikelihood
    sampled: State
    buffers: State

    def pieces(self, size: int) -> Iterator[tuple[Any, Tensor]]:
        """Arguments of the model and targets, at most `size` examples at once."""
        for rows, _ in batches(tuple(self.target.leaves), size):
            yield tree_unflatten([leaf[rows] for leaf in self.target.leaves], self.target.structure)

    def __call__(self, call: Any, moved: Mapping[str, Tensor] | None = None) -> Tensor:
        """Outputs in evaluation mode, with some weights replaced."""
        return self.outputs({**self.sampled, **(moved or {})}, self.buffers, call, False)[0]


def dense(seen: Seen, names: Sequence[str]) -> Tensor:
    """The whole matrix (d, d) of the tensors `names`, float64."""
    size = sum(seen.sampled[name].numel() for name in names)
    total = torch.zeros(size, size, dtype=torch.float64, device=seen.target.layout.device)
    for found in rows(seen, names):
        wide = found.double()
        total.addmm_(wide.T, wide)
    return total


def rows(seen: Seen, names: Sequence[str]) -> Iterator[Tensor]:
    """Rows (m, d) whose outer products sum to the matrix over the tensors `names`, for one piece of the data each."""
    moving = {name: seen.sampled[name] for name in names}

    def projected(moved: State, example: Any, root: Tensor) -> Tensor:
        return seen(tree_map(lambda value: value[None], example), moved).reshape(-1) @ root

    each = vmap(jacrev(projected), in_dims=(None, 0, 0))
    with torch.no_grad():
        size = sum(value.numel() for value in moving.values()) * seen(next(seen.pieces(1))[0]).numel()
        for call, goal in seen.pieces(max(1, min(_PIECE, seen.target.piece, _ENTRIES // max(1, size)))):
            roots = output_roots(seen.likelihood, seen(call), goal)
            slopes = each(moving, call, roots)
            yield torch.cat([slopes[name].flatten(0, 1).reshape(-1, moving[name].numel()) for name in names], dim=1)


# What goes through linear and convolution layers: their inputs, and the curvature's roots propagated back to them.
#
# Both are matrices of an example: one row for each place t at which the layer is applied (pixels, tokens), so that the
# derivative of a root by the weight matrix (p, q) of the layer is sum_t g_t a_t^T, with inputs a (q,) and slopes g
# (p,).

_LAYER_PIECE = 256  # examples in one pass


class Layer(NamedTuple):
    """A layer that runs once in a pass.

    Attributes:
        module: nn.Linear or nn.Conv2d.
        leading: its inputs have the examples on their first axis, and only these.
    """

    module: nn.Module
    leading: bool


class Pass(NamedTuple):
    """One pass over a piece of the data.

    Attributes:
        examples: in this piece.
        inputs: of each layer, as it was called.
        slopes: for each root of the outputs' curvature, what it is in the outputs of each layer.
    """

    examples: int
    inputs: dict[str, Tensor]
    slopes: Iterator[dict[str, Tensor]]


def tensor_names(module: str, own: Iterable[str] = ("weight", "bias")) -> list[str]:
    """State-dict names of a module's own tensors.

    >>> tensor_names("head"), tensor_names("")
    (['head.weight', 'head.bias'], ['weight', 'bias'])
    """
    return [f"{module}.{name}" if module else name for name in own]


def known_layers(seen: Seen) -> dict[str, Layer]:
    """Linear layers and plain convolutions that run once and whose weights are used nowhere else, by name."""
    modules = dict(seen.outputs.model.named_modules())
    found = [name for name, module in modules.items() if _known(module) and _owns(seen.target.layout, name)]
    counts = sorted({1, min(2, seen.target.examples)})  # an axis that follows both is that of the examples
    probes = [_probed(seen, {name: modules[name] for name in found}, count) for count in counts]
    once = [name for name in found if all(len(probe[name]) == 1 for probe in probes)]
    return {
        name: Layer(modules[name], all(probe[name][0][0] == count for probe, count in zip(probes, counts, strict=True)))
        for name in once
    }


def last_layer(seen: Seen) -> list[str]:
    """The sampled tensors of the module that starts last among those that hold some."""
    sampled, order, owners, hooks = set(seen.target.layout.names), [""], {}, []
    for name, module in seen.outputs.model.named_modules():
        owners[name] = [own for own in tensor_names(name, module._parameters) if own in sampled]
        if owners[name]:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: order.append(name)))
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(1))[0])
    return owners[order[-1]]


def passes(seen: Seen, layers: Mapping[str, Layer]) -> Iterator[Pass]:
    """What goes through these layers, piece by piece."""
    moving = {name: value.detach().clone().requires_grad_() for name, value in seen.sampled.items()}
    for call, goal in seen.pieces(min(_LAYER_PIECE, seen.target.piece)):
        inputs: dict[str, Tensor] = {}
        ends: dict[str, Tensor] = {}
        hooks = [
            layer.module.register_forward_hook(_recording(name, inputs, ends), with_kwargs=True)
            for name, layer in layers.items()
        ]
        with hooked(hooks), torch.enable_grad():
            outputs = seen(call, moving)
        roots = output_roots(seen.likelihood, outputs.detach(), goal)
        yield Pass(len(goal), inputs, _slopes(outputs, roots, ends))


def input_rows(module: nn.Module, given: Tensor) -> Tensor:
    """What the weight matrix is multiplied with (n, t, q)."""
    if not isinstance(module, nn.Conv2d):
        return given.reshape(given.shape[0] if given.dim() > 1 else 1, -1, given.shape[-1])
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(given, module._reversed_padding_repeated_twice, mode=mode)
    patches = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride).mT
    return patches.reshape(-1, *patches.shape[-2:])


def output_rows(module: nn.Module, output: Tensor) -> Tensor:
    """Slopes in the outputs (n, t, p), in the order of `input_rows`."""
    if isinstance(module, nn.Conv2d):
        return output.reshape(-1, output.shape[-3], output.shape[-2] * output.shape[-1]).mT
    return output.reshape(output.shape[0] if output.dim() > 1 else 1, -1, output.shape[-1])


def add_to(totals: dict[str, Tensor], name: str, term: Tensor) -> None:
    """Add a term to a sum in float64."""
    totals[name] = totals[name] + term if name in totals else term.double()


@contextmanager
def hooked(hooks: list[RemovableHandle]) -> Iterator[None]:
    """Take hooks off again."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _slopes(outputs: Tensor, roots: Tensor, ends: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for root in roots.unbind(-1):
        found = torch.autograd.grad(
            outputs, list(ends.values()), root.reshape(outputs.shape), retain_graph=True, materialize_grads=True
        )
        yield dict(zip(ends, found, strict=True))


def _known(module: nn.Module) -> bool:
    """Whether it does what its class is known for; a subclass may have another forward."""
    if isinstance(module, nn.Conv2d):
        return module.groups == 1 and type(module).forward is nn.Conv2d.forward
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _owns(layout: ParameterLayout, module: str) -> bool:
    """Whether weight or bias are sampled and neither is tied to another tensor."""
    names = [name for name in tensor_names(module) if name in layout.names]
    return bool(names) and not set(names) & set(layout.tied.values())


def _probed(seen: Seen, modules: Mapping[str, nn.Module], examples: int) -> dict[str, list[torch.Size]]:
    """Shapes of the inputs of all calls of each module, in a pass with this number of examples."""
    found: dict[str, list[torch.Size]] = {name: [] for name in modules}

    def watching(name: str) -> Callable[..., None]:
        return lambda module, arguments, options: found[name].append(_given(arguments, options).shape)

    hooks = [module.register_forward_pre_hook(watching(name), with_kwargs=True) for name, module in modules.items()]
    with hooked(hooks), torch.no_grad():
        seen(next(seen.pieces(examples))[0])
    return found


def _recording(name: str, inputs: dict[str, Tensor], ends: dict[str, Tensor]) -> Callable[..., Tensor]:
    """A hook that keeps inputs and outputs; what comes after gets a copy of the outputs, so it may work in place."""

    def hook(module: nn.Module, arguments: Any, options: Mapping[str, Any], output: Tensor) -> Tensor:
        inputs[name], ends[name] = _given(arguments, options).detach(), output
        return output.clone()

    return hook


def _given(arguments: Any, options: Mapping[str, Any]) -> Tensor:
    given: Tensor = arguments[0] if arguments else options["input"]
    return given


# The exact diagonal of the generalised Gauss-Newton matrix: for each weight the sum of its squared derivatives.

_DIAGONAL_ENTRIES = 2**24  # numbers in the derivatives of one layer for some examples


def diagonal(seen: Seen, names: Sequence[str]) -> dict[str, Tensor]:
    """The diagonal over the tensors `names`, float64 vectors.

    Weights of linear and convolution layers take matrix products of what goes through the layer; other tensors take the
    Jacobian of every example.
    """
    layers = {
        name: layer
        for name, layer in (known_layers(seen).items() if names else ())
        if layer.leading and set(tensor_names(name)) & set(names)
    }
    found = {name: value.reshape(-1) for name, value in _of_layers(seen, layers).items()} if layers else {}
    others = [name for name in names if name not in found]
    if others:
        sizes = [seen.sampled[name].numel() for name in others]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=seen.target.layout.device)
        for piece in rows(seen, others):
            total += piece.square().sum(0)
        found |= dict(zip(others, total.split(sizes), strict=True))
    return {name: found[name] for name in names}


def _of_layers(seen: Seen, layers: Mapping[str, Layer]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for found in passes(seen, layers):
        given = {name: input_rows(layers[name].module, value) for name, value in found.inputs.items()}
        for slopes in found.slopes:
            for name, slope in slopes.items():
                weight, bias = tensor_names(name)
                own = output_rows(layers[name].module, slope)
                add_to(totals, weight, _squares(own, given[name]))
                add_to(totals, bias, own.sum(1).square().sum(0))
    return totals


def _squares(slopes: Tensor, inputs: Tensor) -> Tensor:
    """Sum over n of (sum over t of g a^T)^2, entry by entry (p, q), for slopes (n, t, p) and inputs (n, t, q)."""
    if slopes.shape[1] == 1:
        return slopes[:, 0].square().T @ inputs[:, 0].square()
    size = max(1, _DIAGONAL_ENTRIES // (slopes.shape[2] * inputs.shape[2]))
    pieces = zip(slopes.split(size), inputs.split(size), strict=True)
    return torch.stack([(own.mT @ given).square().sum(0) for own, given in pieces]).sum(0)


# Kronecker factors of the curvature of linear and convolution layers (KFAC, in its "expand" form).
#
# The block of a weight matrix is  (sum over n, t of g g^T) kron (mean over n, t of a a^T)  with the inputs a and the
# slopes g of its layer for example n and place t. The bias has the first factor alone.


class Factors(NamedTuple):
    """The two factors of a layer.

    Attributes:
        slopes: sum of g g^T (p, p), float64.
        inputs: mean of a a^T (q, q), float64.
    """

    slopes: Tensor
    inputs: Tensor


def kronecker_factors(seen: Seen, layers: Mapping[str, Layer]) -> dict[str, Factors]:
    """The factors of these layers over the whole data; products in float64 keep the rank of few examples."""
    slopes: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for found in passes(seen, layers):
        for name, given in found.inputs.items():
            rows = input_rows(layers[name].module, given).flatten(0, 1).double()
            places = len(rows) / found.examples
            add_to(inputs, name, rows.T @ rows / (places * seen.target.examples))
        for each in found.slopes:
            for name, slope in each.items():
                rows = output_rows(layers[name].module, slope).flatten(0, 1).double()
                add_to(slopes, name, rows.T @ rows)
    return {name: Factors(slopes[name], inputs[name]) for name in layers}


# The curvature of the log likelihood at a network, in the form that is wanted, and the posterior it implies.

STRUCTURES = ("diagonal", "kfac", "full")
_LARGEST = 5000  # weights of a full matrix: 200 MB in float64
_WIDEST = 46.0  # a tuned precision is between exp(-46) and exp(46), about 1e-20 and 1e20


class Spectrum(NamedTuple):
    """Curvature of one tensor as a matrix (p, q): (left kron right) diag(values) (left kron right)^T, float64.

    Attributes:
        left: eigenvectors (p, p); None for the identity.
        right: eigenvectors (q, q); None for the identity.
        values: eigenvalues (p, q).
    """

    left: Tensor | None
    right: Tensor | None
    values: Tensor


class Curvature(Protocol):
    """A positive semi-definite matrix over the weights of some tensors."""

    def eigenvalues(self) -> list[Tensor]:
        """Eigenvalues of each block that is independent of the others."""

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Log det(G + Lambda), for one value of Lambda per tensor (T,)."""

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Covariance:
        """Covariance temperature * (G + Lambda)^-1."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """One spectrum per tensor.

    Attributes:
        spectra: in the order of the tensors.
        plain: all are in the basis of the weights themselves.
    """

    spectra: Sequence[Spectrum]
    plain: bool

    def eigenvalues(self) -> list[Tensor]:
        """Eigenvalues of each tensor."""
        return [spectrum.values.reshape(-1) for spectrum in self.spectra]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Sum of the logarithms of all eigenvalues."""
        pairs = zip(self.eigenvalues(), precision, strict=True)
        return torch.stack([(values + own).log().sum() for values, own in pairs]).sum()

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Covariance:
        """Diagonal, or Kronecker blocks."""
        blocks = []
        for (left, right, values), own in zip(self.spectra, precision, strict=True):
            if not bool((values + own > 0).all()):
                _refuse_flat(int((values + own <= 0).sum()))
            scale = ((values + own) / temperature).rsqrt().to(dtype)
            left, right = (None if side is None else side.to(dtype) for side in (left, right))
            blocks.append(Block(left, right, scale))
        return Diagonal(torch.cat([block.scale.reshape(-1) for block in blocks])) if self.plain else Kronecker(blocks)


@dataclass(frozen=True, eq=False)
class Dense:
    """The whole matrix.

    Attributes:
        matrix: G (d, d), float64.
        sizes: weights of each tensor.
    """

    matrix: Tensor
    sizes: Sequence[int]

    def eigenvalues(self) -> list[Tensor]:
        """All of them in one block."""
        return [_decomposed(self.matrix)[0]]

    def log_determinant(self, precision: Tensor) -> Tensor:
        """Of the sum, written out."""
        found: Tensor = torch.linalg.slogdet(self._total(precision)).logabsdet
        return found

    def shape(self, precision: Tensor, temperature: float, dtype: torch.dtype) -> Covariance:
        """Full."""
        total = self._total(precision)
        if not bool((precision > 0).all()):
            values = torch.linalg.eigvalsh(total)
            _refuse_flat(int((values <= _noise(values)).sum()))
        return Full(Full.from_precision(total / temperature).factor.to(dtype))

    def _total(self, precision: Tensor) -> Tensor:
        each = precision.repeat_interleave(torch.tensor(self.sizes, device=precision.device))
        return self.matrix + torch.diag(each)


def curvature_of(seen: Seen | None, structure: str, names: Sequence[str], shapes: Sequence[Tensor]) -> Curvature:
    """The curvature over the tensors `names`; zero without data.

    Args:
        seen: a network and its data.
        structure: one of `STRUCTURES`. "diagonal" and "full" are exact parts of the generalised Gauss-Newton matrix;
            "kfac" has Kronecker factors for linear and convolution layers, and the exact diagonal for other tensors.
        names: the tensors.
        shapes: tensors of their shapes.
    """
    sizes = [value.numel() for value in shapes]
    if structure == "full":
        if sum(sizes) > _LARGEST:
            raise InputError(
                f"expected at most {_LARGEST} weights for a full covariance, found {sum(sizes)}: choose "
                'structure="kfac" or layers="last"'
            )
        zero = shapes[0].new_zeros(sum(sizes), sum(sizes), dtype=torch.float64)
        return Dense(_finite(zero if seen is None else dense(seen, names)), sizes)
    if seen is None:
        empty = [value.new_zeros(value.numel(), 1, dtype=torch.float64) for value in shapes]
        return Blocks([Spectrum(None, None, value) for value in empty], structure == "diagonal")
    return _blocks(seen, structure == "diagonal", names)


def _blocks(seen: Seen, plain: bool, names: Sequence[str]) -> Blocks:
    spectra: dict[str, Spectrum] = {}
    layers = {} if plain else known_layers(seen)
    wanted = {name: layer for name, layer in layers.items() if set(tensor_names(name)) & set(names)}
    for name, factors in kronecker_factors(seen, wanted).items() if wanted else ():
        weight, bias = tensor_names(name)
        values, left = _decomposed(factors.slopes)
        across, right = _decomposed(factors.inputs)
        spectra[weight] = Spectrum(left, right, torch.outer(values, across))
        spectra[bias] = Spectrum(left, None, values[:, None])
    others = [name for name in names if name not in spectra]
    for name, own in diagonal(seen, others).items():
        spectra[name] = Spectrum(None, None, _finite(own)[:, None])
    return Blocks([spectra[name] for name in names], plain)


def tuned(eigenvalues: Sequence[Tensor], squares: Tensor) -> Tensor:
    """The prior precision of each block that maximises the evidence, (blocks,).

    The derivative of the evidence by log lambda is 1/2 (sum_i g_i / (g_i + lambda) - lambda |theta|^2), which falls in
    lambda: there is one maximum, found by bisection.

    Args:
        eigenvalues: g of each block.
        squares: |theta|^2 of each block (blocks,).
    """
    low, high = torch.full_like(squares, -_WIDEST), torch.full_like(squares, _WIDEST)
    for _ in range(70):
        middle = (low + high) / 2
        known = torch.stack([(own / (own + value)).sum() for own, value in zip(eigenvalues, middle.exp(), strict=True)])
        rising = known > middle.exp() * squares
        low, high = torch.where(rising, middle, low), torch.where(rising, high, middle)
    return ((low + high) / 2).exp()


def log_evidence(curvature: Curvature, precision: Tensor, sizes: Sequence[int], squares: Tensor) -> Tensor:
    """What the evidence adds to the log likelihood at the mode; NaN for a flat prior.

    Args:
        curvature: G.
        precision: Lambda of each tensor (T,).
        sizes: weights of each tensor.
        squares: |theta|^2 of each tensor (T,).
    """
    counts = torch.tensor(sizes, dtype=torch.float64, device=precision.device)
    prior = (counts * precision.log() - precision * squares).sum()
    found = 0.5 * (prior - curvature.log_determinant(precision))
    return torch.where((precision > 0).all(), found, torch.nan)


def _decomposed(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, zero where they are rounding, and eigenvectors of a positive semi-definite matrix."""
    values, vectors = torch.linalg.eigh(_finite(factor))
    return torch.where(values > _noise(values), values, 0), vectors


def _noise(values: Tensor) -> Tensor:
    return torch.finfo(values.dtype).eps * len(values) * values.max()


def _finite(matrix: Tensor) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(
            "expected a finite curvature at the trained networks, found NaN or infinity: train with a smaller rate, or "
            "start from other networks"
        )
    return matrix


def _refuse_flat(directions: int) -> None:
    if directions:
        raise InputError(
            f"expected data or a prior to bound every weight, found {directions} directions without either: give a "
            "prior, such as prior=1.0"
        )
