"""The convolution's kernels: memory for what they write, parameters, launches. Arguments are valid here."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.launch import Launcher, Timing, timing
from twinrun_mamba.layout import (
    Fields,
    Parameters,
    contiguous,
    is_aligned,
    is_time_adjacent,
    laid,
    new_sequence,
)
from twinrun_mamba.validation import KERNEL_TYPES

# ConvForward, ConvBackward, ConvReduce and ConvUpdate of params.h.
FORWARD = Parameters("n" * 6 + "ssss" + "aaa" + "nn" + "uu")
BACKWARD = Parameters("n" * 6 + "s" * 6 + "aaa" + "nn" + "aa")
REDUCE = Parameters("aaaa" + "nnn")
UPDATE = Parameters("n" * 6 + "sss" + "n" + "aaaa")
THREADS = 128
# What models are trained with: only this width has kernels of its own for aligned and small rows.
ALIGNED_WIDTH = 4
# Bytes of a row that a team of conv_forward_small* has, times of a lane of conv_forward_tokens_small*, bytes
# of a step that a block of conv_backward_tokens_* has, and places of a block of conv_reduce.
SMALL_BYTES, SMALL_ROWS, COLUMN_BYTES, REDUCE_PLACES = 512, 4, 256, 16
# Blocks of a backward that keep every GPU busy, and vectors of 256 times that are worth a block and the sum
# over splits. Like those below the same for every device, see launch.py.
BLOCKS, SPLIT = 1024, 32
# Steps of a lane back through tokens: of fewer than SHORT elements, at least; twice as many of more; and the
# most, since longer sums are further off. Blocks that an H200 has at once, and a share that is enough.
SHORT, SHORT_STEPS, MOST_STEPS = 2**19, 4, 128
RESIDENT_BLOCKS, FP32_RESIDENT_BLOCKS, ENOUGH_OCCUPANCY = 396, 528, 0.9
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


def forward(launch: Launcher, inputs: tuple[Any, ...], *, silu: bool, last: bool) -> tuple[Tensor, Tensor]:
    """Return the output, and the last inputs (batch, channels, width - 1), empty unless asked for."""
    x, weight, bias, initial_states, seq_idx = inputs
    time_adjacent = is_time_adjacent(x)
    (x,) = laid(time_adjacent, x)
    weight, bias, seq_idx = contiguous(weight, bias, seq_idx)
    width = weight.shape[1]
    out = new_sequence(x, time_adjacent)
    special = last or initial_states is not None or seq_idx is not None
    variant = _variant(width, x, out, time_adjacent=time_adjacent, special=special)
    arch = launch.code_object.arch
    name, blocks, pieces, sizes = _forward_plan(x.dtype, x.shape, width, variant, timing(arch))
    states = x.new_empty((*x.shape[:2], width - 1) if last else (0,))
    given = (*sizes, silu, time_adjacent, x, out, initial_states, states if last else None)
    launch(name, blocks, FORWARD.pack(*given, weight, bias, seq_idx, *pieces))
    return out, states


def backward(
    launch: Launcher,
    out_gradient: Tensor,
    last_gradient: Tensor | None,
    inputs: tuple[Any, ...],
    *,
    silu: bool,
) -> Gradients:
    """Return the gradients of x, weight, bias and initial_states; that of bias also when there is none."""
    x, weight, bias, initial_states, seq_idx = inputs
    time_adjacent = is_time_adjacent(x)
    x, out_gradient = laid(time_adjacent, x, out_gradient)
    weight, bias, seq_idx = contiguous(weight, bias, seq_idx)
    channels, width = weight.shape
    gx = new_sequence(x, time_adjacent)
    # Rows along time have one kernel for all.
    special = time_adjacent or last_gradient is not None or initial_states is not None or seq_idx is not None
    variant = _variant(width, x, out_gradient, gx, time_adjacent=time_adjacent, special=special)
    name, blocks, steps, splits, sizes = _backward_plan(x.dtype, x.shape, width, variant)
    ginitial = None if initial_states is None else x.new_empty(initial_states.shape)
    gweight = weight.new_empty((splits, channels, width))
    gbias = weight.new_empty((splits, channels))
    states = (initial_states, last_gradient, ginitial)
    given = (*sizes, silu, time_adjacent, x, out_gradient, gx, *states, weight, bias, seq_idx)
    launch(name, blocks, BACKWARD.pack(*given, steps, splits, gweight, gbias))
    if splits == 1:
        return gx, gweight[0], gbias[0], ginitial
    return gx, *_reduce(launch, gweight, gbias), ginitial


def update(
    launch: Launcher,
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
    weight, bias, past, index = contiguous(weight, bias, cache_seqlens, conv_state_indices)
    out = new_sequence(x, is_time_adjacent(x))
    given = (*x.shape, weight.shape[1], silu, True, x, out, conv_state, conv_state.shape[2])
    params = UPDATE.pack(*given, weight, bias, past, index)
    launch(f"conv_update_{KERNEL_TYPES[x.dtype]}", -(-x.shape[0] * x.shape[1] // THREADS), params)
    return out


def _reduce(launch: Launcher, weight_partial: Tensor, bias_partial: Tensor) -> tuple[Tensor, Tensor]:
    splits, channels, width = weight_partial.shape
    gweight, gbias = weight_partial.new_empty((channels, width)), weight_partial.new_empty((channels,))
    params = REDUCE.pack(weight_partial, bias_partial, gweight, gbias, splits, channels, width)
    launch("conv_reduce", -(-channels * (width + 1) // REDUCE_PLACES), params, overlap=True)
    return gweight, gbias


def _variant(width: int, *sequences: Tensor, time_adjacent: bool, special: bool) -> str:
    """Return the variant of kernels: aligned as conv_aligned_forward.h has it, with no state or segment."""
    variant = ("" if time_adjacent else "_token_major") + ("_wide" if width > 4 else "")
    _, channels, length = sequences[0].shape
    if width != ALIGNED_WIDTH or special or (length % 8 if time_adjacent else channels % 4):
        return variant
    return f"{variant}_aligned" if is_aligned(time_adjacent, *sequences) else variant


@lru_cache(4096)
def _forward_plan(
    dtype: torch.dtype, shape: tuple[int, ...], width: int, variant: str, of: Timing
) -> tuple[str, int, Fields, Fields]:
    """Return the kernel, its blocks, how it cuts rows into pieces, and the sizes."""
    batch, channels, length = shape
    elements, is_fp32 = batch * channels * length, dtype is torch.float32
    token_major, aligned = variant.startswith("_token_major"), variant.startswith("_aligned")
    large = elements >= of.large_elements * (5 if aligned and not is_fp32 else 1)
    large = large and (length >= of.long_row or not aligned)
    small = elements < of.medium_elements if token_major else aligned and not large
    variant = variant.replace("_aligned", "_small") if small else variant
    # Steps of a lane through tokens, else of a team of 32 lanes.
    if "_token_major_small" in variant:
        steps = SMALL_ROWS
    elif token_major:
        steps = 8 if small else 16
    elif small:
        steps = SMALL_BYTES // dtype.itemsize
    else:
        steps = 2048 if large else 256
    # Rows of a block, as ALIGNED_LANES of conv_aligned_forward.h has it, or columns of a lane.
    rows = 1 if large and aligned and is_fp32 else 4
    groups, pieces = -(-channels // rows), -(-length // steps)
    units = batch * groups * pieces
    blocks = -(-units // THREADS) if token_major else units
    cut = (steps, pieces, _fast_divisor(pieces), _fast_divisor(groups))
    return f"conv_forward{variant}_{KERNEL_TYPES[dtype]}", blocks, cut, (batch, channels, length, width)


def _fast_divisor(divisor: int) -> int:
    """Return Reciprocal of conv_forward.h: a factor of 32 bits, and above it a shift."""
    shift = (divisor - 1).bit_length()
    return int(-(-(2 ** (31 + shift)) // divisor) | shift << 32)


@lru_cache(4096)
def _backward_plan(
    dtype: torch.dtype, shape: tuple[int, ...], width: int, variant: str
) -> tuple[str, int, int, int, Fields]:
    """Return the kernel, its blocks, a lane's steps, the splits of sums over batch and time, the sizes."""
    batch, channels, length = shape
    name = f"conv_backward{variant}_{KERNEL_TYPES[dtype]}"
    sizes = (batch, channels, length, width)
    if not variant.startswith("_token_major"):
        splits = max(1, min(BLOCKS // channels, batch * -(-length // 256) // SPLIT))
        return name, channels * splits, 0, splits, sizes
    groups = -(-channels * dtype.itemsize // COLUMN_BYTES)
    least = SHORT_STEPS if batch * channels * length < SHORT else 2 * SHORT_STEPS
    resident_blocks = FP32_RESIDENT_BLOCKS if dtype is torch.float32 else RESIDENT_BLOCKS
    wanted = -(-length // (16 * _pieces(groups * batch, length, resident_blocks))) * 4
    steps = min(max(wanted, least), MOST_STEPS)
    splits = batch * -(-length // (4 * steps))
    return name, groups * splits, steps, splits, sizes


def _pieces(units: int, length: int, resident_blocks: int) -> int:
    """Return into how many parts of `units` blocks tokens go, so that the last blocks fill a GPU too."""
    pieces = 1
    for times in range(1, 9):
        pieces = max(1, resident_blocks * times // units)
        if pieces * units >= ENOUGH_OCCUPANCY * resident_blocks * times and length <= 4 * MOST_STEPS * pieces:
            break
    return pieces
