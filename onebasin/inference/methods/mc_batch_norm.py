"""Monte Carlo batch norm: after training, a draw has the batch-norm statistics of one random training batch.

In training a network is normalised by the statistics of whatever batch it is in, which are random. Teye et al. (2018)
read this as approximate Bayesian inference: at test time a trained network is used with the statistics of random
training batches B, and the spread of its predictions is that of a posterior over (mu_B, sigma_B). A draw here is such a
network in evaluation mode: the trained weights, and running statistics

    replace:    (mu, sigma^2)  <-  (mu_B, sigma_B^2)
    update:     (mu, sigma^2)  <-  (1 - m) (mu, sigma^2) + m (mu_B, sigma_B^2),    m the momentum of each norm.

The statistics of the batch are measured layer by layer, every norm normalising by those of the batch itself
(`onebasin.functional.refreshed`), so that with "replace" the draw does on B what it should: the inputs of every norm
have its running mean and its (unbiased) variance.

The draws of a chain have the same weights, so as they are all distances between them are zero; `onebasin.fold_norms`
moves the statistics into weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from onebasin.errors import InputError
from onebasin.functional import norms_used, refreshed_one, tracked
from onebasin.inference.kernel import ChainPlan, Draws, Info, Stage, StepIndex, check_counts
from onebasin.inference.seeds import Streams
from onebasin.inference.target import Outputs, Target
from onebasin.inference.training import TrainedMethod
from onebasin.state import State

MODES = ("replace", "update")


@dataclass(frozen=True, kw_only=True)
class MCBatchNorm(TrainedMethod):
    """Monte Carlo batch norm: after training, a draw has the batch-norm statistics of one random training batch.

    Attributes:
        draws: networks drawn from each training.
        mode: "replace" the running statistics by those of the batch, or "update" them with the momentum of each norm.
        examples: in the batch of a draw; None for `batch`, as in training, which the theory asks for. With as many as
            the data have all draws of a chain are equal.
    """

    name: ClassVar[str] = "mcbatchnorm"
    draws: int = 10
    mode: str = "replace"
    examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(1, draws=self.draws)
        check_counts(2, examples=self.examples)
        if self.mode not in MODES:
            raise InputError(f'expected mode "replace" or "update", found {self.mode!r}: give mode="replace"')

    def plan(self, target: Target) -> ChainPlan:
        """Train, then draw batches."""
        if target.outputs is None:
            raise InputError("mcbatchnorm needs data to take batches of, found none: give data=(inputs, targets)")
        if self.examples is not None and self.examples > target.examples:
            raise InputError(
                f"expected at most {target.examples} examples in a batch, all there are, found examples="
                f"{self.examples}: leave examples out, or give fewer, since the draws from batches of all are equal"
            )
        size = self.examples or self.batch or target.examples
        kernel = MCBatchNormKernel(target, target.outputs, min(size, target.examples), self.mode == "update")
        if not norms_used(target.outputs.model, kernel.network(), kernel.inputs(slice(2)), constant=kernel.constant):
            raise InputError(
                "expected a batch norm with running statistics that training moves, found none in "
                f"{type(target.outputs.model).__name__}: use another method, such as Dropout"
            )
        return ChainPlan((self.training(target, optimum=True), Stage("batch norm", kernel, 0)), self.draws, (0,))


class MCBatchNormState(NamedTuple):
    """Trained networks."""

    position: Tensor
    buffers: State


@dataclass(frozen=True, eq=False)
class MCBatchNormKernel:
    """Trained networks that do not move, and the statistics of random batches.

    Attributes:
        target: the posterior.
        outputs: the model.
        examples: in a batch.
        update: whether running statistics are averaged with those of the batch.
    """

    target: Target
    outputs: Outputs
    examples: int
    update: bool

    @property
    def constant(self) -> frozenset[str]:
        """Names of the running means that no draw moves."""
        return self.outputs.constant

    def init(self, start: Draws, streams: Streams) -> MCBatchNormState:
        """Take trained networks."""
        return MCBatchNormState(start.position, start.buffers)

    def step(self, state: MCBatchNormState, step_index: StepIndex, streams: Streams) -> tuple[MCBatchNormState, Info]:
        """Nothing: training is over."""
        return state, {}

    def draw(self, state: MCBatchNormState, streams: Streams) -> Draws:
        """Each network with the statistics of a batch of its own, without repetition inside of it."""
        drawn = []
        for chain, stream in enumerate(streams.each("batch")):
            rows = torch.randperm(self.target.examples, generator=stream)[: self.examples]
            buffers = {name: value[chain] for name, value in state.buffers.items()}
            drawn.append(self.statistics(state.position[chain], buffers, rows))
        stacked = {name: torch.stack([own[name] for own in drawn]) for name in state.buffers}
        return Draws(state.position, stacked, self.target.log_density(state.position, stacked))

    def statistics(self, position: Tensor, buffers: State, rows: Tensor) -> State:
        """The buffers of one network at `position` (D,) with the statistics of the batch `rows` (n,)."""
        layout, model = self.target.layout, self.outputs.model
        network = layout.whole_state(layout.split(position), buffers)
        inputs = self.inputs(rows.to(position.device))
        found, means = refreshed_one(model, network, inputs, batch=len(rows), constant=self.constant)
        changed = {name: found[name] for name in buffers}
        if not self.update:
            return changed
        for prefix, momentum in self._momenta(means, buffers).items():
            for name in (f"{prefix}running_mean", f"{prefix}running_var"):
                before = buffers[name]
                changed[name] = torch.lerp(before.double(), changed[name].double(), momentum).to(before.dtype)
        return changed

    def _momenta(self, means: tuple[str, ...], buffers: State) -> dict[str, float]:
        """The share of the batch in each norm that it changes, by the prefix of its tensors."""
        momenta: dict[str, float] = {}
        for name, norm in tracked(self.outputs.model).items():
            prefix = f"{name}." if name else ""
            if f"{prefix}running_mean" in means:
                count = int(buffers[f"{prefix}num_batches_tracked"])  # None: torch averages all batches alike
                momenta[prefix] = 1 / (count + 1) if norm.momentum is None else norm.momentum
        return momenta

    def inputs(self, rows: slice | Tensor) -> Any:
        """The model's inputs for some of the examples."""
        (arguments, named), _ = tree_unflatten([leaf[rows] for leaf in self.target.leaves], self.target.structure)
        return named or arguments

    def network(self) -> State:
        """The network that the model itself holds."""
        return {name: value.detach() for name, value in self.outputs.model.state_dict().items()}
