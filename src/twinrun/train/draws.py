"""Random numbers that follow from a key and a place alone: the same on every device and world size."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal(shape: torch.Size, key: int, device: torch.device) -> Tensor:
    """Draw standard normal numbers in fp32 by hashing positions; no generator state is used."""
    counter = torch.arange(shape.numel(), device=device)
    radius = torch.sqrt(-2 * torch.log(_hashed(2 * counter, key)))
    angle = 2 * math.pi * _hashed(2 * counter + 1, key)
    return (radius * torch.cos(angle)).view(shape)


def uniform(shape: torch.Size, key: int, device: torch.device) -> Tensor:
    """Draw numbers of (0, 1] in fp32 in the same way."""
    return _hashed(torch.arange(shape.numel(), device=device), key).view(shape)


def _hashed(counter: Tensor, key: int) -> Tensor:
    """Hash int64 counters to fp32 numbers in (0, 1]."""
    return (_scramble(_scramble(counter) ^ key) + 0.5) * 2.0**-32


def _scramble(word: Tensor) -> Tensor:
    """Mix 32-bit words held in int64: the lowbias32 constants of Wellons' hash prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    return word ^ (word >> 16)
