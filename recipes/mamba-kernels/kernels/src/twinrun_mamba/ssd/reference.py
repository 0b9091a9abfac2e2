"""SSD in plain torch, one time after the other: what the kernels are held to, in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus


def reference_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """Return output and last states; the arguments are those of mamba_chunk_scan_combined, any dtype."""
    batch, length, heads, size = x.shape
    group = heads // B.shape[2]
    B, C = (one.repeat_interleave(group, dim=2) for one in (B, C))
    steps = dt if dt_bias is None else dt + dt_bias
    steps = (softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    decay = torch.exp(steps * A)[..., None, None]
    if seq_idx is not None and length > 1:
        same = torch.nn.functional.pad(seq_idx[:, 1:] == seq_idx[:, :-1], (1, 0), value=True)
        decay = decay * same[..., None, None, None]
    added = torch.einsum("blh,blhp,blhn->blhpn", steps, x, B)
    first = x.new_zeros(batch, heads, size, B.shape[-1])
    state = first if initial_states is None else initial_states.to(x.dtype)
    rows = []
    for time in range(length):
        state = decay[:, time] * state + added[:, time]
        rows.append(torch.einsum("bhpn,bhn->bhp", state, C[:, time]))
    out = torch.stack(rows, 1) if rows else torch.zeros_like(x)
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    return (out if z is None else out * silu(z)), state
