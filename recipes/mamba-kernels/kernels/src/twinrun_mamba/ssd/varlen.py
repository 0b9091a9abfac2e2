"""States after the last step of each of the sequences that are packed in a row."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.ssd.reference import reference_chunk_scan


def states_of_sequences(
    x: Tensor, B: Tensor, boundaries: Tensor, steps: Tensor, sums: Tensor, states: Tensor
) -> Tensor:
    """Return (sequences, heads, head size, states) in fp32, from what the forward kernels keep.

    Of a sequence's last chunk the rows are added up anew; what came before is the chunk's first state. A
    sequence without steps has zeros.
    """
    if not x.shape[1]:
        return sums.new_zeros(len(boundaries) - 1, *states.shape[2:])
    size = sums.shape[-1]
    starts, last = boundaries[:-1], boundaries[1:] - 1
    chunk = last.clamp(min=0) // size
    times = chunk[:, None] * size + torch.arange(size, device=x.device)
    own = (times >= starts[:, None]) & (times <= last[:, None])
    rows = times.clamp(max=x.shape[1] - 1)
    # (head, sequence, row of its last chunk)
    sums, steps = sums[0][:, chunk], steps[0][:, chunk]
    at_last = sums.gather(2, (last.clamp(min=0) - chunk * size).expand(len(sums), -1)[..., None])
    weights = torch.where(own, torch.exp(torch.where(own, at_last - sums, 0.0)) * steps, 0.0)
    values = torch.where(own[..., None, None], x[0, rows].float(), 0.0) * weights.permute(1, 2, 0)[..., None]
    grouped = values.unflatten(2, (B.shape[2], -1))
    added = torch.einsum("sqgkp,sqgn->sgkpn", grouped, B[0, rows].float()).flatten(1, 2)
    began_before = (starts < chunk * size) | ((starts == 0) & (chunk == 0))
    decay = torch.where(began_before, torch.exp(at_last[..., 0]), 0.0).T[..., None, None]
    first = torch.where(began_before[:, None, None, None], states[0, chunk].float(), 0.0)
    return torch.where((starts <= last)[:, None, None, None], added + decay * first, 0.0)


def reference_states(tensors: list[Any], boundaries: Tensor) -> Tensor:
    """Return the same in plain torch; the arguments are those of reference_chunk_scan up to its states."""
    x, dt, A, B, C, _, _, dt_bias, initial, *options = tensors
    softplus, limits = options[-2:]
    found = []
    for start, end in pairwise(boundaries.tolist()):
        part = (one[:, start:end] for one in (x, dt, B, C))
        x_part, dt_part, B_part, C_part = part
        state = initial if start == 0 and end > 0 else None
        given = (x_part, dt_part, A, B_part, C_part, None, None, dt_bias, state, None, softplus, limits)
        found.append(reference_chunk_scan(*given)[1][0])
    return torch.stack(found)
