"""Integers that say where sequences start and which state is whose; their values are checked here.

Looking costs nothing on the CPU, where loaders make them. On a GPU it waits for the device, so values are
checked there only when TWINRUN_MAMBA_CHECK=1 asks for it. Kernels start anew at every change of seq_idx: a
wrong one gives wrong sequences and never touches other memory. A wrong conv_state_indices does.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import Tensor
from twinrun_kernels.operators import is_compiling

from twinrun_mamba.validation import ArgumentError, ArgumentTypeError, like, rank

INTEGERS = (torch.int32, torch.int64)


def sequence_index(seq_idx: Tensor | None, cu_seqlens: Tensor | None, sequence: Tensor) -> Tensor | None:
    """Return seq_idx as kernels take it for (batch, channels, length), from whichever of the two is given."""
    if seq_idx is None and cu_seqlens is None:
        return None
    batch, _, length = sequence.shape
    if cu_seqlens is None:
        return _checked(seq_idx, batch, length, sequence.device)
    if seq_idx is not None:
        raise ArgumentError("cu_seqlens", "both seq_idx and cu_seqlens", "one of them")
    if batch != 1:
        raise ArgumentError("cu_seqlens", f"batch {batch}", "batch 1, all sequences in one row")
    return index_of(cu_seqlens, length, sequence.device)


def index_of(cu_seqlens: Tensor, length: int, device: torch.device | str) -> Tensor:
    """Return the seq_idx (1, length) of boundaries 0 = cu_seqlens[0] <= ... <= cu_seqlens[-1] = length.

    Layers that share boundaries should share this tensor; making it costs two small kernels and no wait.
    """
    rank("cu_seqlens", cu_seqlens, (1,))
    _integers("cu_seqlens", cu_seqlens)
    if len(cu_seqlens) < 2:
        raise ArgumentError("cu_seqlens", f"{len(cu_seqlens)} boundaries", "2 or more")
    if may_look(cu_seqlens):
        _check_boundaries(cu_seqlens, length)
    steps = torch.arange(length, dtype=cu_seqlens.dtype, device=device)
    ends = cu_seqlens[1:].to(device, non_blocking=True)
    return torch.searchsorted(ends, steps, right=True, out_int32=True).unsqueeze(0)


def _checked(seq_idx: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
    rank("seq_idx", seq_idx, (2,))
    assert seq_idx is not None
    _integers("seq_idx", seq_idx)
    index = seq_idx.to(torch.int32)
    like("seq_idx", index, torch.int32, device, (batch, length), ("batch", "length"))
    if may_look(index):
        _check_index(index)
    return index


def _check_index(seq_idx: Tensor) -> None:
    if bool((seq_idx < 0).any()):
        raise ArgumentError("seq_idx", "a negative value", "0 or more")
    if bool((seq_idx[:, 1:] < seq_idx[:, :-1]).any()):
        raise ArgumentError("seq_idx", "values that decrease along a row", "values sorted along each row")


def _check_boundaries(cu_seqlens: Tensor, length: int) -> None:
    found = cu_seqlens.tolist()
    for number, (start, end) in enumerate(pairwise(found)):
        if end < start:
            raise ArgumentError("cu_seqlens", f"length {end - start} for sequence {number}", "0 or more")
    if (found[0], found[-1]) != (0, length):
        raise ArgumentError("cu_seqlens", f"{found[0]} to {found[-1]}", f"0 to the length {length}")


def _integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INTEGERS:
        raise ArgumentTypeError(name, tensor.dtype, "torch.int32 or torch.int64")


def check_rows(cache_seqlens: Tensor | None, conv_state_indices: Tensor | None, states: int) -> None:
    """Raise unless these are steps so far, and states to go on from, where their values may be looked at."""
    if cache_seqlens is not None and may_look(cache_seqlens):
        least = int(cache_seqlens.min())
        if least < 0:
            raise ArgumentError("cache_seqlens", least, "0 or more")
    if conv_state_indices is not None and may_look(conv_state_indices):
        used = [row for row in conv_state_indices.tolist() if row >= 0]
        if used and max(used) >= states:
            raise ArgumentError("conv_state_indices", max(used), f"less than the {states} states")
        if len(set(used)) < len(used):
            raise ArgumentError("conv_state_indices", "a state given twice", "each state once")


def may_look(tensor: Tensor) -> bool:
    """Say whether values may be looked at: on the CPU, or when it is asked for; never by a compiler."""
    if is_compiling():
        return False
    return tensor.device.type == "cpu" or os.environ.get("TWINRUN_MAMBA_CHECK") == "1"
