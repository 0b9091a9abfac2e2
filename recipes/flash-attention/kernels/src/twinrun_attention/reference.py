"""Attention in plain torch, every score in memory: what the kernels are held to, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    end: bool = True,
    slopes: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Return the output of (batch, row, head, column) tensors; a row with nothing to attend gives zeros."""
    group = q.shape[2] // k.shape[2]
    k, v = (one.repeat_interleave(group, dim=2) for one in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    shift = k.shape[1] - q.shape[1] if end else 0
    rows = torch.arange(q.shape[1], device=q.device)[:, None] + shift
    distances = torch.arange(k.shape[1], device=q.device)[None, :] - rows
    if slopes is not None:
        slopes = slopes.expand(q.shape[0], q.shape[2])
        scores = scores - slopes[:, :, None, None].to(scores.dtype) * distances.abs()
    hidden = torch.zeros_like(distances, dtype=torch.bool)
    if right >= 0:
        hidden |= distances > right
    if left >= 0:
        hidden |= distances < -left
    # Where all is hidden, softmax has no value: such rows are zeroed before it, and after it.
    empty = hidden.all(1, keepdim=True)
    scores = scores.masked_fill(hidden & ~empty, float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(empty, 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v)
