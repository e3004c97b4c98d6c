"""Gradients of several ranks: summed, measured, cut to a norm."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchrl_vla.collectors.ranks import Ranks


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
    """Give every rank the sum of the gradients of all.

    A parameter without a gradient on any rank stays without, so that the optimizer
    passes over it as in a single process.

    Args:
        parameters: the same on every rank, whole.
        ranks: of the run.
    """
    device = parameters[0].device
    here = [p.grad is not None for p in parameters]
    anywhere = torch.tensor(here, dtype=torch.float32, device=device)
    ranks.add([anywhere])
    with_gradient = [p for p, num in zip(parameters, anywhere, strict=True) if num]
    for parameter in with_gradient:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    ranks.add([p.grad for p in with_gradient])


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to ``max_norm``; returns their norm before, over all shards.

    Args:
        parameters: whole, or cut over the ranks.
        max_norm: largest norm.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
