"""What of a launch follows from sizes, strides and options alone: computed once, and then looked up."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from twinrun_attention import tuning

NO_LIMIT = -1
# So many forms of calls are remembered: packed sequences have another longest one in each batch.
REMEMBERED = 4096
# The most parts that one row of a decoding call is cut into.
MOST_PARTS = 128
ROW_SUM_BLOCK = 64
# Triton 3.4 or newer, and not its interpreter.
DESCRIPTORS = (
    find_spec("triton.tools.tensor_descriptor") is not None and os.environ.get("TRITON_INTERPRET") != "1"
)

Form = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


class Band(NamedTuple):
    """What a query sees and how scores are changed: numbers for every kernel."""

    scale: float
    left: int = NO_LIMIT
    right: int = NO_LIMIT
    end: bool = True
    """Whether the last query and the last key stand beside each other, else the first ones do."""
    softcap: float = 0.0

    @property
    def causal(self) -> bool:
        """Whether all keys up to a query's own are seen, and no later ones."""
        return self.left < 0 and self.right >= 0

    def scores(self, *, sloped: bool) -> str | None:
        """Return what is done to scores, by the names of launch options."""
        if self.left >= 0:
            return "window"
        return "biased" if sloped or self.softcap > 0 else None

    def flags(self, *, sloped: bool) -> dict[str, bool]:
        """Return the constants of a kernel."""
        return {
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "END": self.end,
            "HAS_SLOPES": sloped,
            "CAPPED": self.softcap > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences one after the other in one tensor: where each begins, and the longest."""

    starts_q: Tensor
    starts_k: Tensor
    max_q: int
    max_k: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of sequences, and the longest of queries and of keys."""
        return self.starts_q.numel() - 1, self.max_q, self.max_k


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; tensors are (batch, row, head, column), packed ones (row, head, column)."""

    batch: int
    max_q: int
    max_k: int
    heads: int
    kv_heads: int
    head_size: int
    rows_q: int

    @classmethod
    def of(cls, q: tuple[int, ...], k: tuple[int, ...], packed: tuple[int, int, int] | None = None) -> Sizes:
        """Return the sizes of queries and keys with these shapes."""
        if packed:
            return cls(*packed, q[1], k[1], q[2], q[0])
        return cls(q[0], q[1], k[1], q[2], k[2], q[3], q[1])

    @property
    def columns(self) -> int:
        """Columns of a tile, a power of two."""
        return max(16, int(triton.next_power_of_2(self.head_size)))


@dataclass(frozen=True, kw_only=True)
class PreparedLaunch:
    """One kernel, ready for tensors of given forms."""

    row: tuning.LaunchOptions
    columns: int
    grid: tuple[int, ...]
    described: bool
    """Whether tiles come through tensor descriptors."""
    numbers: tuple[float, ...]
    """Strides, sizes and the band, in the order of the kernel's parameters."""
    options: dict[str, Any]
    """Constants of the kernel, and options of the compiler."""
    looped: tuple[Form, ...] = ()
    """Shapes and strides, the head before the row, of what the kernel's loop reads through descriptors."""
    looped_rows: int = 0
    """Rows of a tile of these."""
    started: dict[torch.dtype, Callable[..., None]] = field(default_factory=dict)
    """What starts the compiled kernel, by the type of the tensors: the first call of each adds it."""


@functools.lru_cache(maxsize=REMEMBERED)
def forward(
    q: Form,
    k: Form,
    v: Form,
    slope_stride: int | None,
    packed: tuple[int, int, int] | None,
    band: Band,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare the forward kernel; `slope_stride` is None where there are no slopes."""
    sizes = Sizes.of(q[0], k[0], packed)
    row = _row("forward", sizes, band, device, sloped=slope_stride is not None)
    described = row.descriptors and not packed and _describable(k, v)
    even = {"EVEN": not packed and sizes.max_k % row.block_n == 0}
    return PreparedLaunch(
        row=row,
        columns=sizes.columns,
        grid=(triton.cdiv(sizes.max_q, row.block_m) * sizes.batch * sizes.heads,),
        described=described,
        looped=tuple(map(_head_first, (k, v))) if described else (),
        looped_rows=row.block_n,
        numbers=(*_strides((q, k, v), packed), *_numbers(slope_stride, sizes, band)),
        options=_options(slope_stride, sizes, band, packed, row) | even | {"DESCRIBED": described},
    )


@functools.lru_cache(maxsize=REMEMBERED)
def backward(
    kernel: str,
    q: Form,
    k: Form,
    v: Form,
    grad: Form,
    slope_stride: int | None,
    packed: tuple[int, int, int] | None,
    band: Band,
    device: torch.device,
) -> PreparedLaunch:
    """Prepare the kernel `backward_keys` or `backward_queries`."""
    sizes = Sizes.of(q[0], k[0], packed)
    row = _row(kernel, sizes, band, device, sloped=slope_stride is not None)
    keys = kernel == "backward_keys"
    # What the loop reads comes through descriptors.
    looped = (q, grad) if keys else (k, v)
    described = row.descriptors and not packed and _describable(*looped)
    even = {} if keys else {"EVEN": not packed and sizes.max_k % row.block_n == 0}
    blocks = triton.cdiv(sizes.max_k, row.block_n) if keys else triton.cdiv(sizes.max_q, row.block_m)
    return PreparedLaunch(
        row=row,
        columns=sizes.columns,
        grid=(blocks * sizes.batch * (sizes.kv_heads if keys else sizes.heads),),
        described=described,
        looped=tuple(map(_head_first, looped)) if described else (),
        looped_rows=row.block_m if keys else row.block_n,
        numbers=(*_strides((q, k, v, grad), packed), *_numbers(slope_stride, sizes, band)),
        options=_options(slope_stride, sizes, band, packed, row) | even | {"DESCRIBED": described},
    )


@functools.lru_cache(maxsize=REMEMBERED)
def row_sums(q: Form, k: Form, grad: Form, packed: tuple[int, int, int] | None) -> PreparedLaunch:
    """Prepare the kernel that multiplies output and gradient, the first of the backward pass."""
    sizes = Sizes.of(q[0], k[0], packed)
    constants = {"D": sizes.head_size, "COLS": sizes.columns, "BLOCK_M": ROW_SUM_BLOCK}
    return PreparedLaunch(
        row=tuning.table()[0],
        columns=sizes.columns,
        grid=(triton.cdiv(sizes.max_q, ROW_SUM_BLOCK) * sizes.batch * sizes.heads,),
        described=False,
        numbers=(*_strides((grad,), packed), sizes.heads, sizes.rows_q, sizes.max_q),
        options=constants | {"VARLEN": packed is not None},
    )


@dataclass(frozen=True, kw_only=True)
class PreparedDecoding:
    """Both kernels of a decoding call."""

    splits: int
    attend: PreparedLaunch
    combine: PreparedLaunch
    """The kernel that adds the parts up."""


@functools.lru_cache(maxsize=REMEMBERED)
def decoding(
    q: Form, k: Form, v: Form, slope_stride: int | None, band: Band, device: torch.device
) -> PreparedDecoding:
    """Prepare decoding."""
    sizes = Sizes.of(q[0], k[0])
    rows = sizes.max_q * sizes.heads // sizes.kv_heads
    row = tuning.options(
        "decode", arch=tuning.architecture(device), head_size=sizes.columns, causal=band.right >= 0
    )
    block_m = min(max(16, triton.next_power_of_2(rows)), row.block_m)
    row_blocks = triton.cdiv(rows, block_m)
    splits, per_split = parts(sizes, row_blocks, row, device)
    constants = {"D": sizes.head_size, "COLS": sizes.columns}
    flags = band.flags(sloped=slope_stride is not None)
    flags.pop("END")
    blocks = {"GROUP": sizes.heads // sizes.kv_heads, "BLOCK_M": block_m, "BLOCK_N": row.block_n}
    sides = (band.scale, band.softcap, band.left, band.right)
    counts = (slope_stride or 0, sizes.heads, sizes.max_q, splits, per_split)
    shared: dict[str, Any] = {"row": row, "columns": sizes.columns, "described": False}
    return PreparedDecoding(
        splits=splits,
        attend=PreparedLaunch(
            grid=(splits, sizes.batch * sizes.kv_heads, row_blocks),
            numbers=(*_strides((q, k, v), None), *counts, *sides),
            options=constants | blocks | flags | row.compiler(),
            **shared,
        ),
        combine=PreparedLaunch(
            grid=(sizes.batch * sizes.heads * sizes.max_q,),
            numbers=(splits,),
            options=constants | {"PARTS": triton.next_power_of_2(splits)},
            **shared,
        ),
    )


def parts(sizes: Sizes, row_blocks: int, row: tuning.LaunchOptions, device: torch.device) -> tuple[int, int]:
    """Return into how many parts the keys are cut, and the keys of one; the same on equal devices."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    )
    # Rounded down: programs that do not all run at once would wait for a second wave.
    wanted = row.programs * processors // (sizes.batch * sizes.kv_heads * row_blocks)
    blocks = max(1, triton.cdiv(sizes.max_k, row.block_n))
    per_split = triton.cdiv(blocks, max(1, min(wanted, MOST_PARTS))) * row.block_n
    return max(1, triton.cdiv(sizes.max_k, per_split)), per_split


def forget() -> None:
    """Prepare every launch anew, as a search wants that changes the table."""
    for one in (forward, backward, row_sums, decoding):
        one.cache_clear()


def _row(
    kernel: str, sizes: Sizes, band: Band, device: torch.device, *, sloped: bool
) -> tuning.LaunchOptions:
    return tuning.options(
        kernel,
        arch=tuning.architecture(device),
        head_size=sizes.columns,
        causal=band.causal,
        scores=band.scores(sloped=sloped),
    )


def _describable(*forms: Form) -> bool:
    """Say whether descriptors can be made: no stride is zero."""
    return DESCRIPTORS and all(all(strides) for _, strides in forms)


def _head_first(form: Form) -> Form:
    """Return (batch, row, head, column) as (batch, head, row, column)."""
    return tuple((one[0], one[2], one[1], one[3]) for one in form)  # type: ignore[return-value]


def _strides(forms: tuple[Form, ...], packed: tuple[int, int, int] | None) -> tuple[int, ...]:
    """Return the strides of batch, row and head of each, in units of eight elements."""
    return tuple(
        stride
        for _, strides in forms
        for stride in (0 if packed else strides[0] // 8, strides[-3] // 8, strides[-2] // 8)
    )


def _numbers(slope_stride: int | None, sizes: Sizes, band: Band) -> tuple[float, ...]:
    sides = (band.scale, band.softcap, band.left, band.right)
    return (slope_stride or 0, sizes.heads, sizes.rows_q, sizes.max_q, sizes.max_k, *sides)


def _options(
    slope_stride: int | None,
    sizes: Sizes,
    band: Band,
    packed: tuple[int, int, int] | None,
    row: tuning.LaunchOptions,
) -> dict[str, Any]:
    return {
        "GROUP": sizes.heads // sizes.kv_heads,
        "D": sizes.head_size,
        "COLS": sizes.columns,
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "VARLEN": packed is not None,
        **band.flags(sloped=slope_stride is not None),
        **row.compiler(),
    }
