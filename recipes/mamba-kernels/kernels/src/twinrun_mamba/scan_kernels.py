"""The scan's kernels: memory for what they write, parameters, launches. Arguments are valid here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.launch import MEASURED, Launcher, Timing, timing
from twinrun_mamba.layout import (
    Parameters,
    contiguous,
    is_aligned,
    is_time_adjacent,
    laid,
    new_projection,
    new_sequence,
)
from twinrun_mamba.validation import KERNEL_TYPES, Sizes

# Steps between two saved states; channels of a block; states that a block handles at once.
CHUNK, CHANNELS, STATE_TILE = 32, 32, 16
THREADS = 128
# What decides the order of sums is the same for every device, see launch.py.
# Resident blocks of an H200, of the backward pass with several state tiles, and the occupancy that is
# enough.
RESIDENT_BLOCKS, MULTI_TILE_RESIDENT_BLOCKS, ENOUGH_OCCUPANCY = 396, 264, 0.95
# Blocks from which time is not split, and most parts of it: each part goes through those before it.
ENOUGH_BLOCKS, MOST_SPLITS = 320, 64
ENOUGH_FORWARD_BLOCKS, MOST_FORWARD_SPLITS = 64, 32
# Chunks that the forward pass does sooner than it starts a second kernel, and than one that overlaps.
FEW_CHUNKS, VERY_FEW_CHUNKS = 4, 2
# ScanForward, ScanBackward and ScanReduce of params.h.
FORWARD = Parameters("n" * 8 + "ssss" + "pp" + "a" * 7 + "naa")
BACKWARD = Parameters("n" * 8 + "s" * 7 + "pp" + "a" * 7 + "a" * 5 + "naa")
REDUCE = Parameters("a" * 8 + "pp" + "n" * 7)


def forward(
    launch: Launcher,
    sizes: Sizes,
    inputs: Sequence[Any],
    *,
    softplus: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, last state and, when they are to be saved, the states before every chunk."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx = inputs
    time_adjacent = is_time_adjacent(u)
    u, delta, z = laid(time_adjacent, u, delta, z)
    others = contiguous(A, D, delta_bias, initial_state, seq_idx)
    batch, channels, length, states, _ = sizes
    out = new_sequence(u, time_adjacent)
    last = u.new_empty((batch, channels, states), dtype=torch.float32)
    kept = (batch, channels, -(-length // CHUNK), states) if save else (0,)
    checkpoints = u.new_empty(kept, dtype=torch.float32)
    splits = _forward_splits(sizes)
    sequences = (u, delta, z, out)
    layout = (time_adjacent, is_aligned(time_adjacent, *sequences))
    given = (*sizes, softplus, *layout, *sequences, B, C, *others)
    workspace = _split_workspace(u, sizes, splits)
    params = FORWARD.pack(*given, last, checkpoints, splits, *workspace)
    variant = _variant(u.dtype, time_adjacent, seq_idx is not None)
    _launch_pass(launch, "forward", sizes, params, splits, variant=variant)
    return out, last, checkpoints


def backward(
    launch: Launcher,
    sizes: Sizes,
    out_gradient: Tensor,
    last_gradient: Tensor | None,
    checkpoints: Tensor,
    *,
    inputs: Sequence[Any],
    softplus: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first nine inputs, None for those that were not given."""
    u, delta, A, B, C, D, z, delta_bias, initial_state, seq_idx = inputs
    time_adjacent = is_time_adjacent(u)
    u, delta, z, out_gradient = laid(time_adjacent, u, delta, z, out_gradient)
    A, D, delta_bias, seq_idx, last_gradient = contiguous(A, D, delta_bias, seq_idx, last_gradient)
    batch, channels, length, states, groups = sizes

    def of_floats(given: Any, *shape: int) -> Any:
        return None if given is None else u.new_empty(shape, dtype=torch.float32)

    splits = _backward_splits(sizes)
    parts = splits * batch
    gu, gdelta, gz = (None if t is None else new_sequence(u, time_adjacent) for t in (u, delta, z))
    partial = (
        of_floats(A, parts, channels, states),
        of_floats(D, parts, channels),
        of_floats(delta_bias, parts, channels),
        *of_floats(u, 2, batch, groups, _blocks_per_group(sizes), length, states),
    )
    # With several state tiles the kernel keeps what it carries there, whether it was asked for or not.
    ginitial = of_floats(initial_state if states <= STATE_TILE else u, parts, channels, states)
    sequences = (u, delta, z, out_gradient, gu, gdelta, gz)
    layout = (time_adjacent, is_aligned(time_adjacent, *sequences))
    given = (*sizes, softplus, *layout, *sequences, B, C, A, D, delta_bias, seq_idx, checkpoints)
    workspace = _split_workspace(u, sizes, splits)
    params = BACKWARD.pack(*given, last_gradient, ginitial, *partial, splits, *workspace)
    variant = _variant(u.dtype, time_adjacent, seq_idx is not None)
    _launch_pass(launch, "backward", sizes, params, splits, variant=variant)
    ga, gd, gbias, gb, gc = _reduce(launch, sizes, partial, B, C)
    return gu, gdelta, ga, gb, gc, gd, gz, gbias, None if initial_state is None else ginitial[:batch]


@cache
def _variant(dtype: torch.dtype, time_adjacent: bool, packed: bool) -> str:
    """Return the end of the names of a call's kernels."""
    layout, segments = "" if time_adjacent else "_token_major", "_packed" if packed else ""
    return f"{layout}{segments}_{KERNEL_TYPES[dtype]}"


def _launch_pass(
    launch: Launcher, direction: str, sizes: Sizes, params: bytes, splits: int, *, variant: str
) -> None:
    """Launch a pass; before it, where time is split, the kernel of the splits' aggregates."""
    if splits > 1:
        launch(f"scan_split_{direction}{variant}", _split_kernel_blocks(sizes, splits), params)
    tiles = "_multi_tile" if sizes.states > STATE_TILE else ""
    overlap = splits > 1 and _should_overlap(sizes, splits, timing(launch.code_object.arch))
    blocks = _pass_blocks(sizes) * splits
    launch(f"scan_{direction}{tiles}{variant}", blocks, params, sizes.states, overlap=overlap)


def _reduce(launch: Launcher, sizes: Sizes, partial: Sequence[Any], B: Tensor, C: Tensor) -> tuple[Any, ...]:
    """Reduce partial gradients in order: of A, D and bias over splits and batch, of B and C over blocks."""
    batch, channels, length, states, groups = sizes
    parts = partial[0].shape[0]
    # One part is the sum.
    sums = [t if t is None else t.new_empty(t.shape[1:]) if parts > 1 else t[0] for t in partial[:3]]
    gb, gc = new_projection(B), new_projection(C)
    params = REDUCE.pack(*partial, *sums, gb, gc, *sizes, _blocks_per_group(sizes), parts)
    blocks = 2 * batch * groups * -(-length // CHUNK)
    if parts > 1:
        blocks += -(-channels * (states + 2) // THREADS)
    launch(f"scan_reduce_{KERNEL_TYPES[B.dtype]}", blocks, params, overlap=True)
    return *sums, gb, gc


@lru_cache(4096)
def _forward_splits(sizes: Sizes) -> int:
    """Return the time splits of the forward pass, for half as much work again."""
    if _pass_blocks(sizes) >= ENOUGH_FORWARD_BLOCKS:
        return 1
    splits = _splits(sizes, [RESIDENT_BLOCKS], MOST_FORWARD_SPLITS)
    # The same parts where nothing overlaps, too.
    few = VERY_FEW_CHUNKS if _should_overlap(sizes, splits, MEASURED) else FEW_CHUNKS
    return splits if _chunks(sizes) > few else 1


@lru_cache(4096)
def _backward_splits(sizes: Sizes) -> int:
    """Return the time splits of the backward pass, for an eighth more work."""
    if sizes.states > STATE_TILE:
        return _splits(sizes, [MULTI_TILE_RESIDENT_BLOCKS * times for times in range(1, 5)], MOST_SPLITS)
    if _pass_blocks(sizes) >= ENOUGH_BLOCKS:
        return 1
    return _splits(sizes, [RESIDENT_BLOCKS * times for times in range(1, 4)], MOST_SPLITS)


def _splits(sizes: Sizes, room: Sequence[int], most: int) -> int:
    """Return the splits of a sequence, equal but for the last, that fill one of `room`."""
    blocks, chunks = _pass_blocks(sizes), _chunks(sizes)
    copied_into = {places // blocks: places // blocks * blocks / places for places in reversed(room)}
    enough = [splits for splits, share in copied_into.items() if share >= ENOUGH_OCCUPANCY]
    wanted = min(enough) if enough else max(copied_into, key=lambda splits: copied_into[splits])
    each = -(-chunks // max(1, min(wanted, chunks, most)))
    return -(-chunks // each)


def _split_workspace(like: Tensor, sizes: Sizes, splits: int) -> tuple[Tensor | None, Tensor | None]:
    """Return workspace for the splits' aggregates: their states, and their sums of dt with resets."""
    if splits == 1:
        return None, None
    shape = splits, sizes.batch, sizes.channels
    split_states = like.new_empty((*shape, sizes.states), dtype=torch.float32)
    return split_states, split_states.new_empty((*shape, 2))


def _chunks(sizes: Sizes) -> int:
    return -(-sizes.length // CHUNK)


def _blocks_per_group(sizes: Sizes) -> int:
    return -(-(sizes.channels // sizes.groups) // CHANNELS)


def _pass_blocks(sizes: Sizes) -> int:
    return sizes.batch * sizes.groups * _blocks_per_group(sizes)


def _split_kernel_blocks(sizes: Sizes, splits: int) -> int:
    """Return the blocks of the kernel of split aggregates: a state tile each, of every part but one."""
    return _pass_blocks(sizes) * (splits - 1) * -(-sizes.states // STATE_TILE)


def _should_overlap(sizes: Sizes, splits: int, of: Timing) -> bool:
    """Return whether a pass in parts should start while the kernel before it runs."""
    blocks = _pass_blocks(sizes) * splits
    return _split_kernel_blocks(sizes, splits) + blocks <= of.overlap_room or blocks >= of.overlap_many
