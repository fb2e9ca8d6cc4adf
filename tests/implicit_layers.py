"""Layers of implicit ensembles with the tensor names and the forward pass of torch-uncertainty, in a few lines each.

Rows of a batch are (member, example): member m computes row m * examples + e. Networks of such layers take a batch that
was repeated once per member, but for packed ones, whose members share it until the last layer puts them in turn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


def noise(*shape: int, mean: float = 0.0) -> nn.Parameter:
    return nn.Parameter(mean + torch.randn(*shape, **DOUBLE))


def by_row(factors: Tensor, like: Tensor) -> Tensor:
    """Factors (M, channels) for a batch (M * examples, channels, ...)."""
    rows = factors.repeat_interleave(len(like) // len(factors), 0)
    return rows.reshape(*rows.shape, *(1,) * (like.dim() - 2))


def plain(*sizes: int, bias: bool = False, **options: Any) -> nn.Module:
    """A linear layer for two sizes, a convolution for three; transposed with transposed=True."""
    if len(sizes) == 2:
        return nn.Linear(*sizes, bias=bias, **DOUBLE)
    kind = nn.ConvTranspose2d if options.pop("transposed", False) else nn.Conv2d
    return kind(*sizes, bias=bias, **options, **DOUBLE)


class Batched(nn.Module):
    """BatchLinear, BatchConv2d, BatchConvTranspose2d."""

    def __init__(self, members: int, *sizes: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        name = "linear" if len(sizes) == 2 else "conv_transpose" if options.get("transposed") else "conv"
        setattr(self, name, plain(*sizes, **options))
        self.inner = name
        self.r_group, self.s_group = noise(members, sizes[0], mean=1.0), noise(members, sizes[1], mean=1.0)
        self.bias = noise(members, sizes[1]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, self.inner)(x * by_row(self.r_group, x))
        y = y * by_row(self.s_group, y)
        return y if self.bias is None else y + by_row(self.bias, y)


class Masked(nn.Module):
    """MaskedLinear, MaskedConv2d; masks are float64 as numpy makes them, whatever the dtype of the layer."""

    def __init__(self, members: int, *sizes: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.mask = nn.Module()
        masks = (torch.rand(members, sizes[0], **DOUBLE) < 0.6).double()
        self.mask.masks = nn.Parameter(masks, requires_grad=False)
        self.inner = "linear" if len(sizes) == 2 else "conv"
        setattr(self, self.inner, plain(*sizes, bias=bias, **options))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.inner)(x * by_row(self.mask.masks, x))


class LatentPosterior(nn.Module):
    """LPBNNLinear, LPBNNConv2d: factors of the inputs come out of an autoencoder.

    The library lays these members out as (example, member); so does this layer with `example_first=True`.
    """

    def __init__(
        self, members: int, *sizes: int, hidden: int = 3, bias: bool = True, gamma: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self.inner, self.std_factor, self.example_first = "linear" if len(sizes) == 2 else "conv", 0.01, False
        setattr(self, self.inner, plain(*sizes, **options))
        self.alpha = nn.Parameter(1 + 0.1 * torch.randn(members, sizes[0], **DOUBLE), requires_grad=False)
        self.gamma = noise(members, sizes[1], mean=1.0) if gamma else None
        self.bias = noise(members, sizes[1]) if bias else None
        self.encoder, self.decoder = nn.Linear(sizes[0], hidden, **DOUBLE), nn.Linear(hidden, sizes[0], **DOUBLE)
        self.latent_mean, self.latent_logvar = (nn.Linear(hidden, hidden, **DOUBLE) for _ in range(2))
        self.drawn: Tensor | None = None  # latents that replace those at their means

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latent_mean(self.encoder(self.alpha).relu()) if self.drawn is None else self.drawn

        def spread(values: Tensor, like: Tensor) -> Tensor:
            if not self.example_first:
                return by_row(values, like)
            rows = values.repeat(len(like) // len(values), 1)
            return rows.reshape(*rows.shape, *(1,) * (like.dim() - 2))

        y = getattr(self, self.inner)(x * spread(self.decoder(latents), x))
        y = y if self.gamma is None else y * spread(self.gamma, y)
        return y if self.bias is None else y + spread(self.bias, y)


class PackedLinear(nn.Module):
    """PackedLinear as it is now: weight (groups, outputs / groups, inputs / groups); sizes are those of all members."""

    def __init__(self, members: int, inputs: int, outputs: int, *, gamma: int = 1, first: bool = False,
                 last: bool = False, bias: bool = True) -> None:  # fmt: skip
        super().__init__()
        self.groups, self.members, self.last = 1 if first else members * gamma, members, last
        self.weight = noise(self.groups, outputs // self.groups, inputs // self.groups)
        self.bias = noise(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1))
        y = torch.einsum("bgi,goi->bgo", parts, self.weight).flatten(1)
        y = y if self.bias is None else y + self.bias
        return torch.cat(y.chunk(self.members, 1)) if self.last else y


class OldPackedLinear(nn.Module):
    """PackedLinear of earlier versions: a convolution of width one."""

    def __init__(self, members: int, inputs: int, outputs: int, *, gamma: int = 1, first: bool = False,
                 last: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.members, self.last = members, last
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, groups=1 if first else members * gamma, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1x1(x[..., None])[..., 0]
        return torch.cat(y.chunk(self.members, 1)) if self.last else y


class PackedConv2d(nn.Module):
    """PackedConv2d, PackedConvTranspose2d; sizes are those of all members."""

    def __init__(self, members: int, inputs: int, outputs: int, kernel: int, *, gamma: int = 1, first: bool = False,
                 last: bool = False, transposed: bool = False, **options: Any) -> None:  # fmt: skip
        super().__init__()
        self.members, self.last, self.inner = members, last, "conv_transpose" if transposed else "conv"
        kind = nn.ConvTranspose2d if transposed else nn.Conv2d
        groups = 1 if first else members * gamma
        setattr(self, self.inner, kind(inputs, outputs, kernel, groups=groups, **options, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, self.inner)(x)
        return torch.cat(y.chunk(self.members, 1)) if self.last else y


class Slots(nn.Module):
    """MIMO around an ordinary network with M times the inputs and outputs: slots in turn, then heads in turn."""

    def __init__(self, members: int, network: nn.Module) -> None:
        super().__init__()
        self.members, self.core_model = members, network

    def forward(self, x: Tensor) -> Tensor:
        y = self.core_model(torch.cat(x.chunk(self.members), 1))
        return torch.cat(y.chunk(self.members, 1))


class MCBatchNorm2d(nn.BatchNorm2d):
    """MC batch norm: in evaluation mode either the statistics of the batch are stored, or stored ones are used."""

    def __init__(self, channels: int, members: int) -> None:
        super().__init__(channels, track_running_stats=False, **DOUBLE)
        self.register_buffer("means", torch.zeros(members, channels, **DOUBLE))
        self.register_buffer("vars", torch.ones(members, channels, **DOUBLE))
        self.counter, self.accumulate = 0, True

    def forward(self, x: Tensor) -> Tensor:
        if self.accumulate:
            self.means[self.counter], self.vars[self.counter] = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=True)
        mean, variance = self.means[self.counter], self.vars[self.counter]
        return F.batch_norm(x, mean, variance, self.weight, self.bias, False, 0.0, self.eps)


class Sampler(nn.Module):
    """A distribution of the library: registers the parameters of its layer a second time."""

    def __init__(self, mu: nn.Parameter, rho: nn.Parameter) -> None:
        super().__init__()
        self.mu, self.rho = mu, rho

    def sample(self) -> Tensor:
        return self.mu + torch.log1p(torch.exp(self.rho)) * torch.randn(self.mu.shape, **DOUBLE)


class Bayes(nn.Module):
    """BayesLinear, BayesConv2d: `sigma` is the number whose softplus is the standard deviation."""

    def __init__(self, *sizes: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.options = options
        shape = (sizes[1], sizes[0] // options.get("groups", 1), *sizes[2:] * 2)
        self.weight_mu, self.weight_sigma = noise(*shape), noise(*shape, mean=-4.0)
        self.weight_sampler = Sampler(self.weight_mu, self.weight_sigma)
        self.weight_prior_dist = nn.Module()
        self.weight_prior_dist.register_buffer("pi", torch.tensor([1.0, 0.0]))
        if bias:
            self.bias_mu, self.bias_sigma = noise(sizes[1]), noise(sizes[1], mean=-4.0)
            self.bias_sampler = Sampler(self.bias_mu, self.bias_sigma)
        else:
            self.register_parameter("bias_mu", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_sampler.sample()
        bias = None if self.bias_mu is None else self.bias_sampler.sample()
        return F.linear(x, weight, bias) if weight.dim() == 2 else F.conv2d(x, weight, bias, **self.options)


def settled(network: nn.Module) -> nn.Module:
    """The network in evaluation mode, with batch norms that have seen something."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 2.0)
            nn.init.normal_(module.bias)
            module.num_batches_tracked.fill_(7)
    return network.eval()
