"""What follows from the forms of a call alone, computed once and then looked up: sizes and launches."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from twinrun_kernels.launches import DESCRIPTORS, REMEMBERED, Described, Launch
from twinrun_kernels.tuning import LaunchOptions, Table, architecture

from twinrun_attention import backward_kernels, decode_kernel, forward_kernel

TABLE = Table(Path(__file__).with_name("tuning.csv"))
NO_LIMIT = -1
# The most parts that one row of a decoding call is cut into, and rows of a block of row sums.
MOST_PARTS, ROW_SUM_BLOCK = 128, 64
# Scores of a head from which tiles come through descriptors: with fewer the host takes longer than the GPU.
DESCRIBED_SCORES = 512**2

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


class Call(NamedTuple):
    """A call without its addresses; tensors are (batch, row, head, column), packed (row, head, column)."""

    q: Form
    k: Form
    v: Form
    device: torch.device
    band: Band
    slopes: int | None = None
    """How far apart the slopes of two sequences are, 0 where they share them; None for no slopes."""
    packed: tuple[int, int, int] | None = None
    """Number of sequences, and the longest of queries and of keys."""

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.packed[0] if self.packed else self.q[0][0]

    @property
    def max_q(self) -> int:
        """Queries of the longest sequence."""
        return self.packed[1] if self.packed else self.q[0][1]

    @property
    def max_k(self) -> int:
        """Keys of the longest sequence."""
        return self.packed[2] if self.packed else self.k[0][1]

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return self.q[0][-2]

    @property
    def kv_heads(self) -> int:
        """Heads of keys."""
        return self.k[0][-2]

    @property
    def columns(self) -> int:
        """Columns of a tile, a power of two."""
        return max(16, int(triton.next_power_of_2(self.q[0][-1])))

    def row(self, kernel: str) -> LaunchOptions:
        """Return the launch options of a kernel."""
        scores = "biased" if self.slopes is not None or self.band.softcap > 0 else None
        return TABLE.options(
            kernel,
            arch=architecture(self.device),
            size=self.columns,
            causal=self.band.right >= 0 if kernel == "decode" else self.band.causal,
            scores="window" if self.band.left >= 0 else scores,
        )

    def values(self, grad: Form | None = None) -> dict[str, Any]:
        """Return numbers and constants that do not depend on the launch options, by the kernels' names."""
        forms = {"q": self.q, "k": self.k, "v": self.v} | ({} if grad is None else {"g": grad})
        found: dict[str, Any] = {}
        for name, (_, strides) in forms.items():
            # In units of eight elements.
            batch, row, head = 0 if self.packed else strides[0] // 8, strides[-3] // 8, strides[-2] // 8
            found |= {f"{name}_batch": batch, f"{name}_row": row, f"{name}_head": head}
        rows_q = self.q[0][0] if self.packed else self.max_q
        found |= {"slope_batch": self.slopes or 0, "heads": self.heads, "rows_q": rows_q}
        found |= {"max_q": self.max_q, "max_k": self.max_k, "scale": self.band.scale}
        found |= {"cap": self.band.softcap, "left": self.band.left, "right": self.band.right}
        found |= {"GROUP": self.heads // self.kv_heads, "D": self.q[0][-1], "COLS": self.columns}
        found |= {"HAS_LEFT": self.band.left >= 0, "HAS_RIGHT": self.band.right >= 0, "END": self.band.end}
        found |= {"HAS_SLOPES": self.slopes is not None, "CAPPED": self.band.softcap > 0}
        return found | {"VARLEN": self.packed is not None}


def _launch(call: Call, kernel: Any, *, looped: tuple[int, ...], by_keys: bool, grad: Form | None) -> Launch:
    """Prepare a kernel; what its loop reads, at the places `looped`, may come through descriptors."""
    row = call.row(kernel.__name__)
    forms = [form for place in looped if (form := (call.q, call.k, call.v, grad)[place])]
    tile = (1, 1, row.block_m if by_keys else row.block_n, call.columns)
    large = call.max_q * call.max_k >= DESCRIBED_SCORES and call.device.type == "cuda"
    described = {}
    # A descriptor has no stride of zero.
    if row.descriptors and DESCRIPTORS and large and not call.packed and all(all(one[1]) for one in forms):
        for place, (shape, strides) in zip(looped, forms):
            # The head before the row.
            sizes, steps = ([one[i] for i in (0, 2, 1, 3)] for one in (shape, strides))
            described[place] = Described(sizes, steps, tile)
    even = not call.packed and call.max_k % row.block_n == 0
    options = {"BLOCK_M": row.block_m, "BLOCK_N": row.block_n, "EVEN": even, "DESCRIBED": bool(described)}
    blocks = triton.cdiv(call.max_k, row.block_n) if by_keys else triton.cdiv(call.max_q, row.block_m)
    programs = blocks * call.batch * (call.kv_heads if by_keys else call.heads)
    values = call.values(grad) | options
    return Launch(kernel, programs, values, row=row, described=described)


@functools.lru_cache(maxsize=REMEMBERED)
def forward(call: Call) -> Launch:
    """Prepare the forward kernel."""
    return _launch(call, forward_kernel.forward, looped=(1, 2), by_keys=False, grad=None)


@functools.lru_cache(maxsize=REMEMBERED)
def backward(call: Call, grad: Form) -> tuple[Launch, Launch, Launch]:
    """Prepare the kernels of row sums, of the gradients of keys and values, and of that of queries."""
    blocks = {"BLOCK_M": ROW_SUM_BLOCK}
    programs = triton.cdiv(call.max_q, ROW_SUM_BLOCK) * call.batch * call.heads
    values = call.values(grad) | blocks
    return (
        Launch(backward_kernels.row_sums, programs, values),
        _launch(call, backward_kernels.backward_keys, looped=(0, 3), by_keys=True, grad=grad),
        _launch(call, backward_kernels.backward_queries, looped=(1, 2), by_keys=False, grad=grad),
    )


@functools.lru_cache(maxsize=REMEMBERED)
def decoding(call: Call) -> tuple[int, Launch, Launch]:
    """Return into how many parts the keys are cut, the kernel of a part, and that which adds them up."""
    row, group = call.row("decode"), call.heads // call.kv_heads
    rows = call.max_q * group
    block_m = min(max(16, triton.next_power_of_2(rows)), row.block_m)
    row_blocks = triton.cdiv(rows, block_m)
    splits, per_split = parts(call, row_blocks, row)
    values = call.values() | {"BLOCK_M": block_m, "BLOCK_N": row.block_n, "len_q": call.max_q}
    values |= {"splits": splits, "per_split": per_split, "PARTS": triton.next_power_of_2(splits)}
    grid = (splits, call.batch * call.kv_heads, row_blocks)
    return (
        splits,
        Launch(decode_kernel.decode, grid, values, row=row),
        Launch(decode_kernel.combine, call.batch * call.heads * call.max_q, values),
    )


def parts(call: Call, row_blocks: int, row: LaunchOptions) -> tuple[int, int]:
    """Return into how many parts the keys are cut, and the keys of one; the same on equal devices."""
    on_gpu = call.device.type == "cuda"
    processors = torch.cuda.get_device_properties(call.device).multi_processor_count if on_gpu else 2
    # Rounded down: programs that do not all run at once would wait for a second wave.
    wanted = row.programs * processors // (call.batch * call.kv_heads * row_blocks)
    blocks = max(1, triton.cdiv(call.max_k, row.block_n))
    per_split = triton.cdiv(blocks, max(1, min(wanted, MOST_PARTS))) * row.block_n
    return max(1, triton.cdiv(call.max_k, per_split)), per_split
