"""The numbers that ranks sum: any part of any rank's can be made anew, so none is kept to compare with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int32": torch.int32, "int64": torch.int64}
# Elements that are made at once.
PIECE = 1 << 24
BITS = 20


def fill(buffer: Tensor, *, rank: int, seed: int) -> None:
    """Write the numbers of `rank` into `buffer`: normal ones, or integers of 20 bits."""
    for place, part in enumerate(buffer.split(PIECE)):
        part.copy_(_numbers(place * PIECE, part, rank=rank, seed=seed))


def error(found: Tensor, *, ranks: int, seed: int) -> float:
    """Return how far `found` is from the sum over all ranks.

    Relative, from the sum in float64, for floating-point numbers; for integers the share that differ.
    """
    apart = size = 0.0
    for place, part in enumerate(found.split(PIECE)):
        numbers = (_numbers(place * PIECE, part, rank=rank, seed=seed) for rank in range(ranks))
        of_ranks = (one.to(part.dtype) for one in numbers)
        if not part.is_floating_point():
            exact = sum(one.long() for one in of_ranks)
            apart += float((part.long() != exact).sum())
            size += part.numel()
        else:
            exact = sum(one.double() for one in of_ranks)
            apart += float((part.double() - exact).square().sum())
            size += float(torch.as_tensor(exact).square().sum())
    if not found.is_floating_point():
        return apart / max(size, 1)
    relative = math.sqrt(apart / size) if size else math.sqrt(apart)
    return relative if math.isfinite(relative) else math.inf


def _numbers(start: int, like: Tensor, *, rank: int, seed: int) -> Tensor:
    """Return numbers that look random, from a hash of place, rank and seed."""
    mixed = torch.arange(start, start + like.numel(), device=like.device)
    mixed.mul_(0x9E3779B1).add_((rank + 1) * 0x85EBCA77 + seed)
    mixed.bitwise_xor_(mixed >> 15).mul_(0x2C1B3C6D).bitwise_xor_(mixed >> 12)
    bits = mixed.bitwise_and_((1 << BITS) - 1)
    if not like.is_floating_point():
        return bits - (1 << (BITS - 1))
    # From evenly spread to normal, as gradients are nearer to: a block's largest number sets its scale.
    evenly = (bits.float() + 0.5) / (1 << (BITS - 1)) - 1
    return torch.erfinv(evenly) * math.sqrt(2)
