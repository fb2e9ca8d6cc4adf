"""How sharply the log likelihood bends in a model's outputs: a root of its curvature for every example.

The generalised Gauss-Newton matrix of the weights is G = sum_n J_n^T H_n J_n with the Jacobian J_n of the outputs and
the curvature H_n = S_n S_n^T of the negative log likelihood in them, so it is a sum of squares of the rows S_n^T J_n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from onebasin.inference.density.likelihood import LogLikelihood, categorical, learned_gaussian


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
        return torch.diag_embed(root) - chances[:, :, None] * root[:, None, :]
    if likelihood is learned_gaussian:
        log_std = outputs.chunk(2, dim=1)[1]
        return torch.diag_embed(torch.cat([torch.exp(-log_std), torch.full_like(log_std, math.sqrt(2))], dim=1))

    def negative(output: Tensor, target: Tensor) -> Tensor:
        return -likelihood(output[None], target[None])[0]

    size = outputs[0].numel()
    curvature = vmap(jacrev(jacrev(negative)))(outputs, targets).reshape(len(outputs), size, size)
    values, vectors = torch.linalg.eigh(curvature.double())
    found: Tensor = (vectors * values.clamp(min=0).sqrt()[:, None, :]).to(outputs.dtype)
    return found
