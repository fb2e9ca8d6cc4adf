"""Networks linearised in their weights: the Gaussian over outputs that a Gaussian over weights implies.

Around the centre theta* of a component,

    f(x; theta)  ~  f(x; theta*) + J(x) (theta - theta*),    J(x) = df(x; theta*) / dtheta,

is linear in the weights, so theta ~ N(theta*, S S^T) makes the outputs Gaussian, with covariance (J S)(J S)^T. For a
Laplace approximation with the generalised Gauss-Newton matrix this is the model whose posterior was computed (Khan et
al., 2019; Immer et al., 2021), and it predicts better than networks at drawn weights, where f is no longer what its
curvature at theta* says.

Covariances (D, D) are never written out: each kind multiplies the rows of J by a root S of its own. The Jacobians are
those of a few examples at a time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap
from torch.utils._pytree import tree_map

from onebasin.errors import InputError, first_line
from onebasin.functional import (
    AnyInputs,
    Call,
    Inputs,
    Inventory,
    OutputPart,
    as_seen,
    batches,
    check_fits,
    check_rows,
    examples_in,
    fixed_buffers,
    inputs_of,
    moved,
    one_tensor,
    select_output,
)
from onebasin.parallel import Progress, progress_of
from onebasin.posterior.gaussian import Partial
from onebasin.posterior.layout import vector_dtype
from onebasin.posterior.posterior import Posterior
from onebasin.state import State, shared_names

_ENTRIES = 2**24  # numbers in the Jacobians of one piece of the examples
_PIECE = 64  # examples in one piece


@dataclass(frozen=True, eq=False)
class OutputGaussian:
    """The outputs of linearised networks: for each component of a posterior a Gaussian over those of every example.

    Attributes:
        mean: f(x; theta*) of each component (components, examples, ...).
        std: standard deviations of the function's values, without the noise of targets; of the same shape.
        weights: how much each component counts, float64 (components,).
        covariance: between the outputs of an example (components, examples, outputs, outputs); None unless asked for.
    """

    mean: Tensor
    std: Tensor
    weights: Tensor
    covariance: Tensor | None = None

    @property
    def probit(self) -> Tensor:
        """Logits that are damped where they are uncertain, z / sqrt(1 + pi std^2 / 8), of the shape of `mean`.

        Their softmax (of one logit: sigmoid) approximates the mean of that of Gaussian logits (MacKay, 1992), by a
        scaled probit function in place of the logistic one, and with independent logits where there are several.
        """
        return self.mean / (1 + math.pi / 8 * self.std.square()).sqrt()

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the whole mixture (examples, ...), float64."""
        mean, variance = self.mean.double(), self.std.double().square()
        weights = self.weights.to(mean.device).reshape(-1, *[1] * (mean.dim() - 1))
        middle = (weights * mean).sum(0)
        return middle, (weights * (variance + (mean - middle).square())).sum(0).sqrt()


def linearise(
    model: nn.Module,
    posterior: Posterior,
    inputs: AnyInputs,
    *,
    output: OutputPart = None,
    covariance: bool = False,
    progress: Progress | bool | None = None,
) -> OutputGaussian:
    """Return the Gaussian over outputs of a network that is linearised at the centre of each component.

    It is exact for the linearised network, whatever the covariance of the posterior: diagonal, low-rank, Kronecker,
    full, or of the last layer alone.

    >>> from onebasin.posterior.gaussian import Diagonal, Gaussian
    >>> from onebasin.posterior.layout import flat_layout
    >>> from onebasin.population import Population
    >>> layer = nn.Linear(1, 1, bias=False)
    >>> layout = flat_layout(Population.from_models([layer]), layer)
    >>> posterior = Posterior.equal([Gaussian(torch.tensor([3.0]), Diagonal(torch.tensor([0.5])))], layout, [{}])
    >>> found = linearise(layer, posterior, torch.tensor([[2.0]]))
    >>> found.mean.item(), found.std.item()
    (6.0, 1.0)

    Args:
        model: the function; left exactly as it was.
        posterior: from `approximate` or `fit`.
        inputs: as in `predict`.
        output: as in `predict`.
        covariance: keep the covariance between the outputs of each example too.
        progress: True for a line on stderr with the time left, or a function that is called with (examples done,
            examples in all, "examples"), components one after the other.

    Raises:
        InputError: the model has no derivative under `torch.func.vmap`.
    """
    model = select_output(model, output)
    given = inputs_of(inputs, model)
    count = examples_in(given)
    shown = progress_of(progress)
    parts = []
    for number in range(len(posterior.components)):
        known = Linearisation(model, posterior, number)
        size = max(1, min(_PIECE, _ENTRIES // max(1, known.size * known.outputs(given))))
        pieces = []
        for rows, call in batches(given, size):
            pieces.append(known.gaussian(call, covariance))
            if shown is not None:
                shown(number * count + rows.stop, len(posterior.components) * count, "examples")
        parts.append([torch.cat(piece) for piece in zip(*pieces, strict=True)])
    mean, std, *between = (torch.stack(part) for part in zip(*parts, strict=True))
    return OutputGaussian(mean, std, posterior.weights, between[0] if covariance else None)


class Linearisation:
    """One component of a posterior, and the network at its centre.

    Attributes:
        size: weights that vary.
    """

    def __init__(self, model: nn.Module, posterior: Posterior, number: int) -> None:
        self.model, self._inventory, layout = model, Inventory(model), posterior.layout
        self.component = posterior.components[number]
        self.covariance, dtype = self.component.covariance, vector_dtype(layout)
        sizes = torch.tensor(layout.sizes)
        owner = torch.arange(len(sizes)).repeat_interleave(sizes)
        self._place: Tensor | None = None  # of the varying weights among those of the tensors that hold them
        self.names = layout.names
        if isinstance(self.covariance, Partial):
            places = self.covariance.places.cpu()
            inside = owner[places].unique()
            self.names = tuple(layout.names[index] for index in inside.tolist())
            columns = torch.isin(owner, inside).nonzero().flatten()
            self._place = torch.searchsorted(columns, places)
            self.covariance = self.covariance.inner
        state = {**layout.shaped(self.component.centre), **posterior.buffers[number]}
        check_fits(model, state)
        seen = as_seen(model, {name: state[name] for name in layout.spec})
        self._tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in seen.items()}
        self._first, self._dtype = shared_names(model), dtype
        self._device = self.component.centre.device
        self._everything = {**fixed_buffers(model, self._device, dtype), **self._tensors}
        self.moving = {name: self._tensors[name] for name in self.names}
        self.size = sum(value.numel() for value in self.moving.values())
        self._slices = dict(zip(layout.names, layout.sizes, strict=True))

    def outputs(self, inputs: Inputs) -> int:
        """Numbers that the model gives for an example."""
        _, call = next(batches(inputs, 1))
        with self._inventory.undisturbed(call):
            result = self._run(self.moving, self._placed(call))
        check_rows(result, 1)
        return result.numel()

    def gaussian(self, call: Call, covariance: bool) -> list[Tensor]:
        """Mean and standard deviation (n, ...) for a few examples; with `covariance` also that (n, K, K)."""
        placed = self._placed(call)
        axes = tree_map(lambda value: 0 if isinstance(value, Tensor) and value.dim() else None, placed)

        def one(moving: State, example: Any) -> Tensor:
            rows = tree_map(lambda value, axis: value if axis is None else value[None], example, axes)
            return self._run(moving, rows).reshape(-1)

        with self._inventory.undisturbed(call):
            mean = self._run(self.moving, placed)
            slopes = self._derived(lambda: vmap(jacrev(one), in_dims=(None, axes))(self.moving, placed))
        jacobian = torch.cat([slopes[name].reshape(len(mean), -1, self._slices[name]) for name in self.names], dim=2)
        jacobian = jacobian if self._place is None else jacobian.index_select(2, self._place.to(jacobian.device))
        root = self.covariance.times_root(jacobian)
        std = torch.linalg.vector_norm(root, dim=2).reshape(mean.shape)
        return [mean, std, root @ root.mT] if covariance else [mean, std]

    def shifted(self, call: Call, flat: Tensor) -> Tensor:
        """Outputs (n, examples, ...) of the linearised network at weights (n, D)."""
        placed = self._placed(call)
        offsets = (flat - self.component.centre).to(self._dtype)
        pieces = dict(zip(self._slices, offsets.split([*self._slices.values()], dim=1), strict=True))
        tangents = {name: pieces[name].reshape(-1, *value.shape) for name, value in self.moving.items()}

        def one(tangent: State) -> Tensor:
            pair: Any = jvp(lambda moving: self._run(moving, placed), (self.moving,), (tangent,))
            slope: Tensor = pair[1]
            return slope

        with self._inventory.undisturbed(call):
            slopes: Tensor = self._derived(lambda: vmap(one)(tangents))
            return self._run(self.moving, placed) + slopes

    def _run(self, moving: Mapping[str, Tensor], placed: Call) -> Tensor:
        tensors = {name: moving.get(first, self._tensors[name]) for name, first in self._first.items()}
        arguments, options = placed
        everything = {**self._everything, **tensors}
        return one_tensor(self.model, functional_call(self.model, everything, arguments, options, tie_weights=False))

    def _placed(self, call: Call) -> Call:
        return moved(call, self._device, self._dtype)

    def _derived(self, derivative: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's forward mode, of torch.jit
                warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
                return derivative()
        except RuntimeError as error:  # torch refuses in many ways
            raise InputError(
                f"expected a model with derivatives under torch.func.vmap, found {type(self.model).__name__}, where "
                f"torch has none ({first_line(error, 120)}): predict with drawn networks, linearised=False"
            ) from error
