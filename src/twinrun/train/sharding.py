"""What FSDP2's collectives get wrong."""

from __future__ import annotations

import torch
from torch import nn


def gradient_excess(device: torch.device) -> float:
    """Return how many times too large FSDP2 makes a mean gradient: 1, or the number of ranks.

    FSDP2 asks for ReduceOp.AVG, which Gloo's reduce-scatter silently takes for a sum
    (github:pytorch/pytorch#162338); AdamW hides it until gradients are clipped. Measured on a
    layer of one weight, since a later PyTorch may mend either side.
    """
    from torch.distributed.fsdp import fully_shard

    probe = fully_shard(nn.Linear(1, 1, bias=False, device=device))
    probe(torch.ones(1, 1, device=device)).sum().backward()
    excess: float = probe.weight.grad.full_tensor().item()
    return excess
