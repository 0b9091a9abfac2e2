"""From tensors to launches of the kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import Tensor

from twinrun_attention import backward_kernels, forward_kernel, tuning
from twinrun_attention.decode_kernel import combine, decode

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DESCRIPTORS = find_spec("triton.tools.tensor_descriptor") is not None
NO_LIMIT = -1
# The most parts that one row of a decoding call is cut into.
MOST_PARTS = 128


@dataclass(frozen=True, kw_only=True)
class Band:
    """What a query sees and how scores are changed; numbers for every kernel."""

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

    def scores(self, slopes: Tensor | None) -> str | None:
        """Return what is done to scores, by the names of launch options."""
        if self.left >= 0:
            return "window"
        return "biased" if slopes is not None or self.softcap > 0 else None

    def flags(self, slopes: Tensor | None) -> dict[str, bool]:
        """Return the constants of a kernel."""
        return {
            "HAS_LEFT": self.left >= 0,
            "HAS_RIGHT": self.right >= 0,
            "END": self.end,
            "HAS_SLOPES": slopes is not None,
            "CAPPED": self.softcap > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Sequences one after the other in one tensor: where each begins, and the longest."""

    starts_q: Tensor
    starts_k: Tensor
    max_q: int
    max_k: int


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
    def of(cls, q: Tensor, k: Tensor, packing: Packing | None) -> Sizes:
        """Return the sizes of queries and keys."""
        if packing:
            batch, longest = packing.starts_q.numel() - 1, (packing.max_q, packing.max_k)
            return cls(batch, *longest, q.shape[1], k.shape[1], q.shape[2], q.shape[0])
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], q.shape[1])

    @property
    def columns(self) -> int:
        """Columns of a tile, a power of two."""
        return max(16, triton.next_power_of_2(self.head_size))


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, packing: Packing | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of the sum of each row: (batch, head, row), packed (head, row)."""
    sizes = Sizes.of(q, k, packing)
    q, k, v = (aligned(one) for one in (q, k, v))
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), _row_numbers(q, sizes, packing)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("inf"))
    row = tuning.options(
        "forward",
        arch=tuning.architecture(q.device),
        head_size=sizes.columns,
        causal=band.causal,
        scores=band.scores(slopes),
    )
    described = row.descriptors and not packing and all(_describable(one) for one in (k, v))
    grid = (triton.cdiv(sizes.max_q, row.block_m) * sizes.batch * sizes.heads,)
    with _on(q.device):
        forward_kernel.forward[grid](
            q,
            *(_source(one, row.block_n, sizes.columns, described) for one in (k, v)),
            out,
            lse,
            *_optional(slopes, packing, q),
            *(stride for one in (q, k, v) for stride in _strides(one, packing)),
            *_numbers(slopes, sizes, band),
            **_constants(slopes, sizes, band, packing, row),
            EVEN=not packing and sizes.max_k % row.block_n == 0,
            DESCRIBED=described,
            **row.compiler(),
        )
    return out, lse


def run_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    slopes: Tensor | None,
    packing: Packing | None,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    q, k, v, out, lse = saved
    sizes = Sizes.of(q, k, packing)
    q, k, v, grad = (aligned(one) for one in (q, k, v, grad))
    dq, dk, dv = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    with _on(q.device):
        grid = (triton.cdiv(sizes.max_q, 64) * sizes.batch * sizes.heads,)
        backward_kernels.row_sums[grid](
            out,
            grad,
            delta,
            packing.starts_q if packing else q,
            *_strides(grad, packing),
            sizes.heads,
            sizes.rows_q,
            sizes.max_q,
            D=sizes.head_size,
            COLS=sizes.columns,
            BLOCK_M=64,
            VARLEN=packing is not None,
        )
        for kernel in ("backward_keys", "backward_queries"):
            launch_backward(
                kernel, (q, k, v, grad, lse, delta), (dq, dk, dv), slopes, packing, band, sizes=sizes
            )
    return dq, dk, dv


def launch_backward(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    slopes: Tensor | None,
    packing: Packing | None,
    band: Band,
    *,
    sizes: Sizes,
) -> None:
    q, k, v, grad, lse, delta = inputs
    row = tuning.options(
        name,
        arch=tuning.architecture(q.device),
        head_size=sizes.columns,
        causal=band.causal,
        scores=band.scores(slopes),
    )
    keys = name == "backward_keys"
    # What the loop reads comes through descriptors.
    block, looped = (row.block_m, (q, grad)) if keys else (row.block_n, (k, v))
    described = row.descriptors and not packing and all(_describable(one) for one in looped)
    sources = [
        _source(one, block, sizes.columns, described and any(one is other for other in looped))
        for one in (q, k, v, grad)
    ]
    blocks, heads = (sizes.max_k, sizes.kv_heads) if keys else (sizes.max_q, sizes.heads)
    grid = (triton.cdiv(blocks, row.block_n if keys else row.block_m) * sizes.batch * heads,)
    even = {} if keys else {"EVEN": not packing and sizes.max_k % row.block_n == 0}
    getattr(backward_kernels, name)[grid](
        *sources,
        lse,
        delta,
        *(outputs[1:] if keys else outputs[:1]),
        *_optional(slopes, packing, q),
        *(stride for one in (q, k, v, grad) for stride in _strides(one, packing)),
        *_numbers(slopes, sizes, band),
        **_constants(slopes, sizes, band, packing, row),
        **even,
        DESCRIBED=described,
        **row.compiler(),
    )


def run_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of the sums (batch, row, head) of queries at the end of a cache."""
    sizes = Sizes.of(q, k, None)
    q, k, v = (aligned(one) for one in (q, k, v))
    rows = sizes.max_q * sizes.heads // sizes.kv_heads
    row = tuning.options(
        "decode", arch=tuning.architecture(q.device), head_size=sizes.columns, causal=band.right >= 0
    )
    block_m = min(max(16, triton.next_power_of_2(rows)), row.block_m)
    row_blocks = triton.cdiv(rows, block_m)
    splits, per_split = _splits(sizes, row_blocks, row, q.device)
    on = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty((sizes.batch, sizes.max_q, sizes.heads, splits, sizes.head_size), **on)
    sums, lse = torch.empty(partial.shape[:-1], **on), torch.empty(q.shape[:-1], **on)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    flags = band.flags(slopes)
    flags.pop("END")
    with _on(q.device):
        decode[splits, sizes.batch * sizes.kv_heads, row_blocks](
            q, k, v, partial, sums, slopes if slopes is not None else q, lengths,
            *(stride for one in (q, k, v) for stride in _strides(one, None)),
            _slope_stride(slopes), sizes.heads, sizes.max_q, splits, per_split,
            band.scale, band.softcap, band.left, band.right,
            GROUP=sizes.heads // sizes.kv_heads, D=sizes.head_size, COLS=sizes.columns,
            BLOCK_M=block_m, BLOCK_N=row.block_n, **flags, **row.compiler(),
        )  # fmt: skip
        parts = triton.next_power_of_2(splits)
        combine[(lse.numel(),)](
            partial, sums, out, lse, splits, D=sizes.head_size, COLS=sizes.columns, PARTS=parts
        )  # fmt: skip
    return out, lse


def _splits(
    sizes: Sizes, row_blocks: int, row: tuning.LaunchOptions, device: torch.device
) -> tuple[int, int]:
    """Return into how many parts the keys are cut, and the keys of one; the same on equal devices."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    )
    # Rounded down: programs that do not all run at once would wait for a second wave.
    wanted = row.programs * processors // (sizes.batch * sizes.kv_heads * row_blocks)
    blocks = max(1, triton.cdiv(sizes.max_k, row.block_n))
    per_split = triton.cdiv(blocks, max(1, min(wanted, MOST_PARTS))) * row.block_n
    return max(1, triton.cdiv(sizes.max_k, per_split)), per_split


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its columns do not lie together or rows do not begin at 16 bytes."""
    strides = tensor.stride()
    fits = strides[-1] == 1 and all(one % 8 == 0 for one in strides[:-1]) and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _describable(tensor: Tensor) -> bool:
    """Say whether a descriptor can be made: Triton is 3.4 or newer, and no stride is zero."""
    return DESCRIPTORS and all(tensor.stride()) and not INTERPRETED


def _source(tensor: Tensor, rows: int, columns: int, described: bool) -> Any:
    if not described:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - Triton 3.4 or newer

    view = tensor.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, columns])


def _strides(tensor: Tensor, packing: Packing | None) -> tuple[int, ...]:
    """Return the strides of batch, row and head in units of eight elements."""
    first = 0 if packing else tensor.stride(0) // 8
    return (first, tensor.stride(-3) // 8, tensor.stride(-2) // 8)


def _slope_stride(slopes: Tensor | None) -> int:
    return slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0


def _optional(slopes: Tensor | None, packing: Packing | None, q: Tensor) -> tuple[Tensor, ...]:
    """Return slopes and starts; what is absent is never read."""
    starts = (packing.starts_q, packing.starts_k) if packing else (q, q)
    return (q if slopes is None else slopes, *starts)


def _numbers(slopes: Tensor | None, sizes: Sizes, band: Band) -> tuple[float, ...]:
    sides = (band.scale, band.softcap, band.left, band.right)
    return (_slope_stride(slopes), sizes.heads, sizes.rows_q, sizes.max_q, sizes.max_k, *sides)


def _constants(
    slopes: Tensor | None, sizes: Sizes, band: Band, packing: Packing | None, row: tuning.LaunchOptions
) -> dict[str, Any]:
    return {
        "GROUP": sizes.heads // sizes.kv_heads,
        "D": sizes.head_size,
        "COLS": sizes.columns,
        "BLOCK_M": row.block_m,
        "BLOCK_N": row.block_n,
        "VARLEN": packing is not None,
        **band.flags(slopes),
    }


def _row_numbers(q: Tensor, sizes: Sizes, packing: Packing | None) -> Tensor:
    shape = (sizes.heads, sizes.rows_q) if packing else (sizes.batch, sizes.heads, sizes.max_q)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)
