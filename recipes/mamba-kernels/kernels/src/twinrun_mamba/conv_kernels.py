"""The convolution's kernels: memory for what they write, parameters, launches. Arguments are valid here."""

from __future__ import annotations

from struct import Struct
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.launch import Launcher
from twinrun_mamba.layout import Fields, address, dense, is_time_adjacent, laid, new_sequence, sequence
from twinrun_mamba.memory import empty
from twinrun_mamba.validation import KERNEL_TYPES

# ConvForward, ConvBackward, ConvReduce and ConvUpdate of params.h.
FORWARD, BACKWARD, REDUCE, UPDATE = Struct("=25q"), Struct("=36q"), Struct("=7q"), Struct("=23q")
THREADS = 128
# Blocks of a backward that keep every GPU busy. Not the device's own number: sums must not depend on it.
BLOCKS = 2048
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward(start: Launcher, inputs: tuple[Any, ...], *, silu: bool, last: bool) -> tuple[Tensor, Tensor]:
    """Return the output, and the last inputs (batch, channels, width - 1) when told, else an empty tensor."""
    x, weight, bias, initial_states, seq_idx = inputs
    time_adjacent = is_time_adjacent(x)
    x = laid(x, time_adjacent)
    weight, bias, seq_idx = map(dense, (weight, bias, seq_idx))
    batch, channels, length = x.shape
    width = weight.shape[1]
    out = new_sequence(x, time_adjacent)
    states = empty((batch, channels, width - 1) if last else (0,), x.dtype, x.device)
    params = FORWARD.pack(
        *_sizes(x, width, silu, time_adjacent),
        *sequence(x),
        *sequence(out),
        *sequence(initial_states),
        *sequence(states if last else None),
        weight.data_ptr(),
        address(bias),
        address(seq_idx),
    )
    name = _name("conv_forward", x.dtype, width, time_adjacent)
    start(name, _forward_blocks(batch, channels, length, time_adjacent), params)
    return out, states


def backward(
    start: Launcher,
    out_gradient: Tensor,
    last_gradient: Tensor | None,
    inputs: tuple[Any, ...],
    *,
    silu: bool,
) -> Gradients:
    """Return the gradients of x, weight, bias and initial_states; that of bias also when there is none."""
    x, weight, bias, initial_states, seq_idx = inputs
    time_adjacent = is_time_adjacent(x)
    x, out_gradient = laid(x, time_adjacent), laid(out_gradient, time_adjacent)
    weight, bias, seq_idx = map(dense, (weight, bias, seq_idx))
    channels, width = weight.shape
    batch, _, length = x.shape
    blocks, splits = _splits(batch, channels, length, time_adjacent)
    gx = new_sequence(x, time_adjacent)
    ginitial = None if initial_states is None else empty(tuple(initial_states.shape), x.dtype, x.device)
    gweight = empty((splits, channels, width), torch.float32, x.device)
    gbias = empty((splits, channels), torch.float32, x.device)
    params = BACKWARD.pack(
        *_sizes(x, width, silu, time_adjacent),
        *sequence(x),
        *sequence(out_gradient),
        *sequence(gx),
        *sequence(initial_states),
        *sequence(last_gradient),
        *sequence(ginitial),
        weight.data_ptr(),
        address(bias),
        address(seq_idx),
        splits,
        gweight.data_ptr(),
        gbias.data_ptr(),
    )
    start(_name("conv_backward", x.dtype, width, time_adjacent), blocks * splits, params)
    if splits == 1:
        return gx, gweight[0], gbias[0], ginitial
    return gx, *_reduced(start, gweight, gbias), ginitial


def update(
    start: Launcher,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """Return the output of some more steps; `conv_state` is brought up to date in place."""
    weight, bias, past, index = map(dense, (weight, bias, cache_seqlens, conv_state_indices))
    out = new_sequence(x, is_time_adjacent(x))
    params = UPDATE.pack(
        *_sizes(x, weight.shape[1], silu, True),
        *sequence(x),
        *sequence(out),
        *sequence(conv_state),
        conv_state.shape[2],
        weight.data_ptr(),
        address(bias),
        address(past),
        address(index),
    )
    start(f"conv_update_{KERNEL_TYPES[x.dtype]}", -(-x.shape[0] * x.shape[1] // THREADS), params)
    return out


def _reduced(start: Launcher, weight_partial: Tensor, bias_partial: Tensor) -> tuple[Tensor, Tensor]:
    splits, channels, width = weight_partial.shape
    gweight = empty((channels, width), torch.float32, weight_partial.device)
    gbias = empty((channels,), torch.float32, weight_partial.device)
    params = REDUCE.pack(
        weight_partial.data_ptr(),
        bias_partial.data_ptr(),
        gweight.data_ptr(),
        gbias.data_ptr(),
        splits,
        channels,
        width,
    )
    start("conv_reduce", -(-channels * (width + 1) // THREADS), params)
    return gweight, gbias


def _sizes(x: Tensor, width: int, silu: bool, time_adjacent: bool) -> Fields:
    return (*x.shape, width, silu, time_adjacent)


def _name(kernel: str, kind: torch.dtype, width: int, time_adjacent: bool) -> str:
    layout, wide = "" if time_adjacent else "_tokens", "_wide" if width > 4 else ""
    return f"{kernel}{layout}{wide}_{KERNEL_TYPES[kind]}"


def _forward_blocks(batch: int, channels: int, length: int, time_adjacent: bool) -> int:
    if time_adjacent:
        return -(-batch * channels * -(-(length + 7) // 1024) // 4)
    return -(-batch * -(-length // 32) * -(-channels // 4) // THREADS)


def _splits(batch: int, channels: int, length: int, time_adjacent: bool) -> tuple[int, int]:
    """Return blocks for one split, and splits of the sums over batch and time."""
    if not time_adjacent:
        return -(-channels // THREADS), batch * -(-length // 256)
    return channels, max(1, min(BLOCKS // channels, batch * -(-(length + 7) // 256)))
