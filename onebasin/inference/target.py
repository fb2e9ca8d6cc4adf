"""The target, the posterior as a function of flat positions: potential and gradient of many chains at once.

    U(theta) = - sum_i log p(y_i | x_i, theta) - log p(theta)

Chains are a tensor axis: positions are (chains, D). A mini-batch of n out of N examples estimates the first sum by
N / n times its own. Sums over examples and weights are kept in float64, log likelihood and log prior apart, so that
energy differences are exact enough to accept or reject by.

Sampled are the parameters that require a gradient, tied ones once, laid out in a flat vector (D,). Everything else in
the state dict, the buffers (frozen parameters, running statistics), is carried along, one copy per chain.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from onebasin.errors import InputError, PrecisionWarning, SpecError, first_line
from onebasin.functional import (
    IGNORED,
    Bound,
    ClassLoss,
    Data,
    Inputs,
    Likelihood,
    attributes_kept,
    batches,
    call_arguments,
    check_class_numbers,
    check_one_hot,
    frozen_norms,
    global_seed,
    kind_of_targets,
    moved,
    one_tensor,
    pair_of,
    warn_loop,
    without,
)
from onebasin.inference.augment import MiniBatch
from onebasin.inference.compile import CLOSE, CLOSE_IN_BF16, Function, compiled
from onebasin.inference.likelihood import LogLikelihood, Noise, bernoulli, categorical, check_shares, choose
from onebasin.inference.seeds import Streams, derived, generator
from onebasin.parallel import align_tensors
from onebasin.posterior import FlatLayout
from onebasin.state import State, as_spec, dtype_name, shared_names, state_of


@dataclass(frozen=True, eq=False)
class ParameterLayout(FlatLayout):
    """Where the sampled weights lie, and what they are computed in.

    Attributes:
        dtype: what is computed in: the parameters' widest dtype, at least float32.
        device: where the parameters are.
    """

    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> ParameterLayout:
        """The layout of a model.

        >>> layout = ParameterLayout.of(nn.Linear(2, 3))
        >>> layout.names, layout.size
        (('weight', 'bias'), 9)
        """
        sampled = {name: value for name, value in model.named_parameters() if value.requires_grad and value.numel()}
        if not sampled:
            raise InputError(
                f"expected parameters to sample, found none in {type(model).__name__} that require a gradient: "
                "call requires_grad_(True) on those that should be inferred"
            )
        odd = [name for name, value in sampled.items() if not value.is_floating_point()]
        if odd:
            found = dtype_name(sampled[odd[0]].dtype)
            raise SpecError(
                f"expected real parameters, found {found} under {odd[0]}: freeze it with requires_grad_(False), or "
                "store real and imaginary parts as two parameters"
            )
        devices = {value.device for value in sampled.values()}
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise InputError(f"expected all parameters on one device, found {found}: move the model with .to(device)")
        dtype = torch.float32
        for value in sampled.values():
            dtype = torch.promote_types(dtype, value.dtype)
        tied = {name: first for name, first in shared_names(model).items() if name != first}
        return cls(tuple(sampled), as_spec(model), tied, dtype, devices.pop())

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the sampled tensors."""
        return [self.spec[name].shape for name in self.names]

    def split(self, position: Tensor) -> State:
        """Views of a flat position (..., D) as tensors (..., *shape)."""
        pieces = position.split(self.sizes, dim=-1)
        return {
            name: piece.reshape((*position.shape[:-1], *shape))
            for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Invert `split` for one network, or for tensors (chains, *shape): a vector (..., D) in the working dtype."""
        lead = tensors[self.names[0]].shape[: tensors[self.names[0]].dim() - len(self.shapes[0])]
        return torch.cat([tensors[name].to(self.dtype).reshape((*lead, -1)) for name in self.names], dim=-1)

    def buffers_of(self, model: nn.Module) -> State:
        """Every tensor of the state dict that is not sampled, wide enough to compute with."""
        state = state_of(model)
        return {name: widened(state[name]).clone() for name in self.buffer_names}

    def whole_state(self, sampled: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> State:
        """All names a functional call needs, tied ones included; works for one network and for stacked ones."""
        return {
            name: sampled[first] if (first := self.tied.get(name, name)) in sampled else buffers[name]
            for name in self.spec
        }

    def spread(self, values: Mapping[str, float], default: float, what: str) -> Tensor:
        """A vector (D,) with one value per tensor, chosen by state-dict name or pattern (`*.bias`); later keys win."""
        unused = [key for key in values if not any(fnmatchcase(name, key) for name in self.names)]
        if unused:
            raise InputError(
                f"expected names or patterns of sampled tensors in {what}, found {unused[0]!r}, which fits none of "
                f"{', '.join(self.names[:6])}{', ...' if len(self.names) > 6 else ''}: correct it"
            )
        chosen = [[value for key, value in values.items() if fnmatchcase(name, key)] for name in self.names]
        each = torch.tensor([own[-1] if own else default for own in chosen], dtype=self.dtype, device=self.device)
        return each.repeat_interleave(torch.tensor(self.sizes, device=self.device))


def is_frozen(module: nn.Module) -> bool:
    """Whether a module has parameters of its own, and none of them requires a gradient."""
    own = list(module.parameters(recurse=False))
    return bool(own) and not any(value.requires_grad for value in own)


def widened(value: Tensor) -> Tensor:
    """A tensor in a dtype that is wide enough to compute with; integers stay."""
    return value.float() if value.is_floating_point() and value.dtype.itemsize < 4 else value


Scale = float | Mapping[str, float] | None


@dataclass(frozen=True, eq=False)
class Prior:
    """Independent Gaussians around zero.

    log p(theta) = -1/2 sum_i precision_i theta_i^2 + constant

    Attributes:
        precision: 1 / scale^2 of each weight (D,); 0 where the prior is flat.
        constant: what normalises the density of the weights that are not flat.
    """

    precision: Tensor
    constant: float

    @classmethod
    def of(cls, layout: ParameterLayout, scale: Scale) -> Prior:
        """Read `prior=`: one standard deviation, a dict of them by name or pattern (others get 1), or None for flat."""
        if scale is None:
            return cls(torch.zeros(layout.size, dtype=layout.dtype, device=layout.device), 0.0)
        named = scale if isinstance(scale, Mapping) else {"*": scale}
        for key, value in named.items():
            if not (isinstance(value, int | float) and value > 0):
                raise InputError(
                    f"expected a positive standard deviation of the prior for {key!r}, found {value!r}: "
                    "give a number above 0, or prior=None for a flat prior"
                )
        scales = layout.spread({key: float(value) for key, value in named.items()}, 1.0, "prior")
        proper = scales[torch.isfinite(scales)].double()
        constant = -float(proper.log().sum()) - 0.5 * math.log(2 * math.pi) * len(proper)
        return cls(scales.square().reciprocal(), constant)

    @property
    def flat(self) -> bool:
        """Whether some weight has no proper prior."""
        return bool((self.precision == 0).any())

    def log_density(self, position: Tensor) -> Tensor:
        """Log density of positions (..., D), summed in float64 (...)."""
        return -0.5 * (position.double().square() * self.precision.double()).sum(-1) + self.constant


class Minibatches:
    """Rows (chains, n) for each step; a function of the seed, the chain and the step alone.

    An epoch has floor(N / n) batches, so that all are equally large; what is left over differs from epoch to epoch.

    >>> streams = Streams(0, chains=[0, 1], block=0)
    >>> Minibatches(examples=10, size=5).rows(0, streams).shape
    torch.Size([2, 5])
    """

    def __init__(self, examples: int, size: int | None) -> None:
        if size is not None and size < 1:
            raise InputError(f"a mini-batch has at least 1 example, found batch={size}: leave it out for all examples")
        self.examples, self.size = examples, None if size is None or size >= examples else size
        self._orders: dict[tuple[int, int, int], Tensor] = {}

    @property
    def per_epoch(self) -> int:
        """Steps in one epoch."""
        return 1 if self.size is None else self.examples // self.size

    def rows(self, step: int, streams: Streams) -> Tensor | None:
        """Rows of this step, None for the whole data."""
        if self.size is None:
            return None
        epoch, place = divmod(step, self.per_epoch)
        wanted = [(streams.seed, chain, epoch) for chain in streams.chains]
        if any(key not in self._orders for key in wanted):
            self._orders = {
                key: torch.randperm(self.examples, generator=generator(key[0], "order", key[1], key[2]))
                for key in wanted
            }
        rows = slice(place * self.size, (place + 1) * self.size)
        return torch.stack([self._orders[key][rows] for key in wanted])


PIECE = 4096  # examples in one pass over the whole data; bounds the memory of activations


class DensityEvaluation(NamedTuple):
    """Potential and gradient of every chain, from one pass over the data or a mini-batch.

    Attributes:
        gradient: dU/dtheta (chains, D).
        log_likelihood: of the whole data, or its estimate from the mini-batch; float64 (chains,).
        log_prior: float64 (chains,).
        buffers: what is carried beside the weights; new running statistics after a pass in training mode.
    """

    gradient: Tensor
    log_likelihood: Tensor
    log_prior: Tensor
    buffers: State

    @property
    def potential(self) -> Tensor:
        """U, float64 (chains,)."""
        return -(self.log_likelihood + self.log_prior)

    @property
    def finite(self) -> Tensor:
        """Whether potential and gradient are numbers, (chains,)."""
        return torch.isfinite(self.gradient).all(1) & torch.isfinite(self.potential)


# What is known of a single network, without a chain axis: (sampled weights, buffers, data, training mode) -> log
# likelihoods (n,) of the examples in `data`, and the buffers after the pass.
OneNetwork = Callable[[Mapping[str, Tensor], State, Any, bool], tuple[Tensor, State]]


class Outputs(Protocol):
    """The model as a function of one network's weights, for curvature and dropout, which put hooks on it.

    Attributes:
        model: the module that is called; hooks may be put on it and must be taken off again.
        constant: names of running means that training does not touch.
    """

    model: nn.Module
    constant: frozenset[str]

    def __call__(
        self, sampled: Mapping[str, Tensor], buffers: State, call: Any, training: bool
    ) -> tuple[Tensor, State]:
        """The outputs (n, ...), and the buffers as the pass has left it."""


class Mode(NamedTuple):
    """How a pass is made.

    Attributes:
        own: every chain has a mini-batch of its own.
        prior: whether the prior is added; once in several pieces.
        training: the model's training mode.
        factor: N / n.
        bf16: whether the model computes in bfloat16 where torch's autocast does; weights and likelihood do not.
        mixed: whether the last two tensors of the data are the targets of mixed-in examples and the share of the first.
    """

    own: bool
    prior: bool
    training: bool
    factor: float
    bf16: bool = False
    mixed: bool = False


class MixedTargets(NamedTuple):
    """Two targets for each example, and what the first counts (n,): the log likelihood is mixed alike."""

    targets: Tensor
    partners: Tensor
    share: Tensor


BatchChange = Callable[[MiniBatch], MiniBatch]


class Ready(NamedTuple):
    """A pass for certain shapes; what is compiled draws no random numbers."""

    function: Function
    compiled: bool


@dataclass(eq=False)
class Target:
    """The density exp(-U(theta)) that is to be sampled.

    Attributes:
        layout: where the weights lie.
        prior: the Gaussian prior.
        one: what is known of a single network.
        leaves: the tensors of inputs and targets, examples on the first axis; empty without data.
        structure: how `data` for `one` is made of the leaves.
        examples: N.
        buffers: what a network carries beside its sampled weights.
        compile: whether gradients are compiled.
        piece: examples in one pass over the whole data.
        outputs: the model's outputs for the arguments in `data`; None without data.
        likelihood: the log probability of the targets in `data` given these outputs; None without data.
    """

    layout: ParameterLayout
    prior: Prior
    one: OneNetwork
    leaves: list[Tensor]
    structure: Any
    examples: int
    buffers: State
    compile: bool = False
    piece: int = PIECE
    outputs: Outputs | None = None
    likelihood: LogLikelihood | None = None
    _functions: dict[tuple[Any, ...], Ready] = field(default_factory=dict)
    _refused: bool = False  # whether the compiler has refused mini-batch passes of several chains

    def buffers_for(self, chains: int) -> State:
        """The model's buffers, once per chain (chains, ...)."""
        return {name: value.expand(chains, *value.shape).clone() for name, value in self.buffers.items()}

    def __call__(
        self,
        position: Tensor,
        buffers: State,
        rows: Tensor | None = None,
        *,
        training: bool = False,
        seed: int = 0,
        bf16: bool = False,
        change: BatchChange | None = None,
    ) -> DensityEvaluation:
        """Potential and gradient at positions (chains, D).

        Args:
            position: the weights.
            buffers: what each chain carries beside them (chains, ...).
            rows: None for the whole data; indices (n,) of a mini-batch shared by all chains, or (chains, n).
            training: run the model in training mode: batch statistics are used and running ones updated, dropout drops.
            seed: of the model's own random numbers in training mode.
            bf16: compute the model in bfloat16 where torch's autocast does; not the whole data.
            change: what is done to the mini-batch (chains, n, ...) before.
        """
        with torch.no_grad():
            if rows is not None:
                taken, factor = [leaf[rows] for leaf in self.leaves], self.examples / rows.shape[-1]
                mode = Mode(rows.dim() == 2, True, training, factor, bf16)
                if change is not None:
                    taken, mode = _changed(change, taken, mode)
                return self._pass(position, buffers, taken, mode, seed)
            if self.examples <= self.piece:
                return self._pass(position, buffers, self.leaves, Mode(False, True, training, 1.0), seed)
            return self._pieces(position, buffers, training, seed)

    def log_density(self, position: Tensor, buffers: State) -> Tensor:
        """Log likelihood of the whole data + log prior, in evaluation mode, float64 (chains,)."""
        return -self(position, buffers).potential

    def _pieces(self, position: Tensor, buffers: State, training: bool, seed: int) -> DensityEvaluation:
        """The whole data, piece by piece; gradients and log likelihoods add up."""
        total: DensityEvaluation | None = None
        for number, (rows, _) in enumerate(batches(tuple(self.leaves), self.piece)):
            taken = [leaf[rows] for leaf in self.leaves]
            mode = Mode(False, total is None, training, 1.0)
            part = self._pass(position, buffers, taken, mode, derived(seed, "piece", number))
            buffers = part.buffers
            if total is not None:
                likelihood = total.log_likelihood + part.log_likelihood
                part = DensityEvaluation(total.gradient + part.gradient, likelihood, total.log_prior, buffers)
            total = part
        assert total is not None  # there are leaves
        return total

    def _pass(self, position: Tensor, buffers: State, taken: list[Tensor], mode: Mode, seed: int) -> DensityEvaluation:
        arguments = [position, *buffers.values(), *taken]
        key = (mode, *(tensor.shape for tensor in arguments))
        if key not in self._functions:
            self._functions[key] = self._ready(list(buffers), arguments, mode)
        ready = self._functions[key]
        with global_seed(seed) if mode.training and not ready.compiled else nullcontext():
            gradient, likelihood, prior, *changed = ready.function(*arguments)
        after = dict(zip(buffers, changed, strict=True)) if mode.training else buffers
        return DensityEvaluation(gradient, likelihood, prior, after)

    def _ready(self, names: Sequence[str], arguments: list[Tensor], mode: Mode) -> Ready:
        eager = self._gradients(names, mode, looped=False)
        with global_seed(0):  # trials must not move the generator
            try:
                eager(*arguments)
            except (RuntimeError, ValueError, TypeError, IndexError) as refusal:  # vmap refuses in many ways
                if mode.bf16:
                    return self._wider(names, arguments, mode, refusal)
                return self._looped(names, arguments, mode, refusal)
            several, fast = len(arguments[0]) > 1, None
            if self.compile and not (several and self._refused):
                fast = compiled(eager, arguments, CLOSE_IN_BF16 if mode.bf16 else CLOSE)
        # Where mini-batches were refused, the whole data, which training looks at once or twice, are not worth a trial;
        # samplers of the whole data begin with it.
        if self.compile and fast is None and several and (mode.own or not self._refused):
            self._refused = True  # no further trials, each of which computes a gradient or two
            return self._one_by_one(names, arguments, mode) or Ready(eager, False)
        return Ready(fast or eager, fast is not None)

    def _one_by_one(self, names: Sequence[str], arguments: list[Tensor], mode: Mode) -> Ready | None:
        """A compiled pass of one chain, called for each: for models whose stacked pass the compiler refuses.

        Convolutions of several chains are grouped ones, in layouts that it cannot always follow; nor are they faster.
        """
        chain_wise = 1 + len(names) + (len(arguments) if mode.own else 0)  # what follows are examples that all share
        one = [tensor[:1] if place < chain_wise else tensor for place, tensor in enumerate(arguments)]
        key = (mode, *(tensor.shape for tensor in one))
        if key not in self._functions:
            self._functions[key] = self._ready(names, one, mode)
        alone = self._functions[key]
        if not alone.compiled:
            return None

        def each(*tensors: Tensor) -> tuple[Tensor, ...]:
            rows = [slice(row, row + 1) for row in range(len(tensors[0]))]
            own, shared = tensors[:chain_wise], tensors[chain_wise:]
            results = [alone.function(*(tensor[row] for tensor in own), *shared) for row in rows]
            return tuple(torch.cat(parts) for parts in zip(*results, strict=True))

        return Ready(each, True)

    def _wider(self, names: Sequence[str], arguments: list[Tensor], mode: Mode, refusal: Exception) -> Ready:
        """A pass without bfloat16 where the model refuses it; chain after chain in it where only vmap does."""
        full = mode._replace(bf16=False)
        try:
            self._gradients(names, full, looped=False)(*arguments)
        except (RuntimeError, ValueError, TypeError, IndexError):  # vmap is what refuses, or the model itself
            try:
                self._gradients(names, mode, looped=True)(*arguments)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                refusal = error
            else:
                return self._looped(names, arguments, mode, refusal)
        ready = self._ready(names, arguments, full)
        warnings.warn(
            f"bfloat16 is refused by the model ({type(refusal).__name__}: {first_line(refusal, 120)}), so it trains in "
            f'{dtype_name(self.layout.dtype)}: leave precision="bf16" out, or use layers that torch.autocast supports',
            PrecisionWarning,
            stacklevel=2,
        )
        return ready

    def _looped(self, names: Sequence[str], arguments: list[Tensor], mode: Mode, refusal: Exception) -> Ready:
        """Chain after chain, for a model that vmap refuses; raises if the model itself does not run."""
        eager = self._gradients(names, mode, looped=True)
        try:
            eager(*arguments)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                f"the model could not be computed in {'training' if mode.training else 'evaluation'} mode with "
                f"{_examples(arguments, mode)} ({type(error).__name__}: {first_line(error, 120)}): it must run under "
                "torch.func.functional_call and have a gradient"
            ) from error
        if self.outputs is not None:
            warn_loop(self.outputs.model, refusal)
        return Ready(eager, False)

    def _gradients(self, names: Sequence[str], mode: Mode, *, looped: bool) -> Function:
        """All chains in one pass, or one after the other, as a function of flat tensors."""
        layout, prior = self.layout, self.prior

        def negative(sampled: State, buffers: State, data: list[Tensor]) -> tuple[Tensor, tuple[Tensor, State]]:
            examples, mixed = (data[:-2], data[-2:]) if mode.mixed else (data, [])
            given = tree_unflatten(examples, self.structure) if examples else None
            if mixed and given is not None:
                given = (given[0], MixedTargets(given[1], *mixed))
            with _bf16(layout.device) if mode.bf16 else nullcontext():
                values, after = self.one(sampled, buffers, given, mode.training)
            return -mode.factor * values.sum(), (mode.factor * values.detach().double().sum(), after)

        def one_by_one(sampled: State, buffers: State, data: list[Tensor]) -> tuple[State, tuple[Tensor, State]]:
            results = []
            for chain in range(len(sampled[layout.names[0]])):
                weights = {name: value[chain].detach().requires_grad_() for name, value in sampled.items()}
                own = {name: value[chain] for name, value in buffers.items()}
                kept = nullcontext() if self.outputs is None else attributes_kept(self.outputs.model)
                with torch.enable_grad(), kept:  # what one chain leaves in the model is not for the next
                    value, (likelihood, after) = negative(weights, own, [x[chain] for x in data] if mode.own else data)
                    slopes = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
                left = {name: value.detach() for name, value in after.items()}
                results.append((dict(zip(weights, slopes, strict=True)), (likelihood, left)))
            joined: tuple[State, tuple[Tensor, State]] = tree_map(lambda *each: torch.stack(each), *results)
            return joined

        axes = (0, 0, 0 if mode.own else None)
        several = one_by_one if looped else vmap(grad(negative, has_aux=True), in_dims=axes, randomness="different")

        def function(position: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            buffers = dict(zip(names, tensors[: len(names)], strict=True))
            with warnings.catch_warnings():
                # An operation without a batching rule is looped over by torch, which then warns that this is slow.
                warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
                slopes, (likelihood, after) = several(layout.split(position), buffers, list(tensors[len(names) :]))
            gradient = torch.cat([slopes[name].reshape(len(position), -1) for name in layout.names], dim=1)
            before = torch.zeros_like(likelihood)
            if mode.prior:
                gradient = gradient + prior.precision * position
                before = prior.log_density(position)
            return (gradient, likelihood, before, *([after[name] for name in names] if mode.training else []))

        return function


_NORMS = {F.batch_norm, F.instance_norm, F.layer_norm, F.group_norm}
_NORMS |= {torch.batch_norm, torch.instance_norm, torch.layer_norm, torch.group_norm}


class _WideNorms(TorchFunctionMode):
    """Norms compute with float32 inputs: vmap has no rule for bfloat16 beside float32 weights."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function in _NORMS:
            arguments = (widened(arguments[0]), *arguments[1:])
        return function(*arguments, **(options or {}))


@contextmanager
def _bf16(device: torch.device) -> Iterator[None]:
    """Bfloat16 for matrix products and convolutions; casts of weights are not kept, the next call has others."""
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False), _WideNorms():
        yield


def _changed(change: BatchChange, taken: list[Tensor], mode: Mode) -> tuple[list[Tensor], Mode]:
    """The mini-batch, inputs first, after a random change."""
    batch = change(MiniBatch(taken[:-1], taken[-1]))
    taken = [*batch.inputs, batch.targets]
    if batch.partners is None or batch.share is None:
        return taken, mode
    return [*taken, batch.partners, batch.share], mode._replace(mixed=True)


def _examples(arguments: list[Tensor], mode: Mode) -> str:
    """How many examples a pass sees, for messages."""
    count = arguments[-1].shape[1 if mode.own else 0] if len(arguments) > 1 and arguments[-1].dim() else 0
    return f"{count} examples"


LogDensity = Callable[[Mapping[str, Tensor]], Tensor]


class Called:
    """A copy of the model that is called with given weights; the original is left alone."""

    def __init__(self, model: nn.Module, layout: ParameterLayout) -> None:
        self.layout = layout
        self.model = copy.deepcopy(model)
        self.frozen = [module for module in self.model.modules() if is_frozen(module)]  # stay in evaluation mode
        self.model.to(layout.dtype).requires_grad_(False)
        self._train()
        self.constant = frozen_norms(self.model)
        self.model.eval()
        stored = layout.spec
        # Buffers outside of the state dict are part of the function.
        self.fixed = {name: value for name, value in self.model.named_buffers() if name not in stored}

    def __call__(
        self, sampled: Mapping[str, Tensor], buffers: State, call: Any, training: bool
    ) -> tuple[Tensor, State]:
        """The outputs, and the buffers as the pass has left it."""
        if training:
            self._train()
        else:
            self.model.eval()
        after = {name: value.clone() for name, value in buffers.items()} if training else buffers
        weights = {**self.fixed, **self.layout.whole_state(sampled, after)}
        arguments, options = call
        return one_tensor(
            self.model, functional_call(self.model, weights, arguments, options, tie_weights=False)
        ), after

    def _train(self) -> None:
        """Training mode for all but what is frozen."""
        self.model.train()
        for module in self.frozen:
            module.training = False


def target_of(
    model: nn.Module,
    data: Data,
    *,
    prior: Scale = 1.0,
    likelihood: str | LogLikelihood | None = None,
    noise: Noise = None,
    ignore_index: int | None = None,
    log_density: LogDensity | None = None,
    compile: bool = False,
    piece: int = PIECE,
) -> Target:
    """The posterior of a model's weights given data, or another density over them; options as in `sample`.

    >>> target = target_of(nn.Linear(2, 1), (torch.zeros(5, 2), torch.zeros(5)), noise=0.5, prior=2.0)
    >>> target(torch.zeros(3, 3), target.buffers_for(3)).gradient.shape
    torch.Size([3, 3])
    """
    layout = ParameterLayout.of(model)
    buffers = layout.buffers_of(model)
    if log_density is not None:
        if data is not None or prior not in (1.0, None) or likelihood is not None:
            raise InputError(
                "log_density= is the whole density, but data, prior or likelihood were given too: leave them out, or "
                "put them into the function"
            )
        prior = None
        _check_density(log_density, {name: value.detach() for name, value in model.named_parameters()})
    gaussian = Prior.of(layout, prior)
    if data is None:

        def alone(sampled: Mapping[str, Tensor], own: State, given: Any, training: bool) -> tuple[Tensor, State]:
            if log_density is None:
                return sampled[layout.names[0]].new_zeros(1), own
            return log_density(sampled).reshape(1), own

        return Target(layout, gaussian, alone, [], None, 0, buffers, compile, piece)

    inputs, goals = pair_of(data, model)
    data = inputs, without(goals, ignore_index)
    call, targets = _checked(layout, data)
    chosen = _likelihood(model, data, targets, likelihood, noise, ignored=ignore_index is not None)
    leaves, structure = tree_flatten((call, targets))
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        raise InputError(
            "expected only tensors with one row per example as inputs of the model: bind other arguments with a "
            "wrapper module"
        )
    called = Called(model, layout)
    one = judged(called, chosen)
    return Target(
        layout, gaussian, one, align_tensors(leaves), structure, len(targets), buffers, compile, piece, called, chosen
    )


def judged(called: Outputs, likelihood: LogLikelihood) -> OneNetwork:
    """The log likelihoods of one network, from its outputs."""

    def one(sampled: Mapping[str, Tensor], own: State, given: Any, training: bool) -> tuple[Tensor, State]:
        arguments, goal = given
        outputs, after = called(sampled, own, arguments, training)
        return log_likelihoods(likelihood, outputs, goal), after

    return one


def log_likelihoods(likelihood: LogLikelihood, outputs: Tensor, goal: Any) -> Tensor:
    """Log likelihoods (n,) of targets, or mixtures of those of two targets each; under autocast in float32."""
    if torch.is_autocast_enabled(outputs.device.type):
        with torch.autocast(outputs.device.type, enabled=False):
            return log_likelihoods(likelihood, widened(outputs), goal)
    if not isinstance(goal, MixedTargets):
        return likelihood(outputs, goal)
    return goal.share * likelihood(outputs, goal.targets) + (1 - goal.share) * likelihood(outputs, goal.partners)


def _checked(layout: ParameterLayout, data: tuple[Inputs, Tensor]) -> tuple[Any, Tensor]:
    """Inputs as arguments and targets, on the model's device and in its working dtype."""
    inputs, targets = data
    call = moved(call_arguments(inputs), layout.device, layout.dtype)
    known = targets.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) if targets.dim() >= 3 else targets
    for leaf in [*tree_flatten(call)[0], known]:  # of pixels NaN marks targets that are missing
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            raise InputError("expected finite data, found NaN or infinity: leave these examples out")
    kind = layout.dtype if targets.is_floating_point() else torch.int64
    return call, targets.to(device=layout.device, dtype=kind)


def _likelihood(
    model: nn.Module,
    data: tuple[Inputs, Tensor],
    targets: Tensor,
    kind: str | LogLikelihood | None,
    noise: Noise,
    *,
    ignored: bool,
) -> LogLikelihood:
    """Choose the likelihood by what the model gives for a few examples; refuse a model without a definite answer.

    With `ignored`, class numbers `IGNORED` do not count.
    """
    rows, call = next(batches(data[0], 8))
    bound = Bound(model, state_of(model))
    outputs = bound(call)
    with global_seed(1):
        again = bound(call)
        if not torch.allclose(outputs, again, rtol=0, atol=0, equal_nan=True):
            raise InputError(
                f"expected one output for one network, but {type(model).__name__} draws random numbers in evaluation "
                "mode: use nn.Dropout, or dropout with training=self.training"
            )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise InputError(
                f"expected batch norm with running statistics, found {name!r} without: its outputs depend on who else "
                "is in the batch, so that weights alone have no density; use track_running_stats=True"
            )
    if not callable(kind) or isinstance(kind, Likelihood):
        word = kind_of_targets(targets, kind, noise)
        kind = kind if isinstance(kind, Likelihood) else word
        if word == "categorical":
            check_one_hot(targets, outputs)
    chosen = choose(kind, noise, outputs, targets[rows].to(outputs.device))
    if chosen is categorical or isinstance(chosen, ClassLoss):
        check_class_numbers(targets[targets != IGNORED] if ignored else targets, outputs.shape[1])
    elif chosen is bernoulli:
        check_shares(targets)
    return chosen


def _check_density(log_density: LogDensity, parameters: State) -> None:
    value = log_density(parameters)
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"expected one number, as a tensor, from log_density, found {found}: sum over all weights")
