"""From tensors to launches of the kernels; what does not depend on addresses is prepared once."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from twinrun_attention import backward_kernels, forward_kernel, prepared
from twinrun_attention.decode_kernel import combine, decode
from twinrun_attention.prepared import Band, Form, Packing, PreparedLaunch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, packing: Packing | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of the sum of each row: (batch, head, row), packed (head, row)."""
    q, k, v = (aligned(one) for one in (q, k, v))
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), _row_numbers(q, packing)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("inf"))
    ready = prepared.forward(
        *map(_form, (q, k, v)),
        slope_stride=_slope_stride(slopes),
        packed=packing.sizes if packing else None,
        band=band,
        device=q.device,
    )
    with _on(q.device):
        forward_kernel.forward[ready.grid](
            q,
            *(_source(one, ready.row.block_n, ready) for one in (k, v)),
            out,
            lse,
            *_optional(slopes, packing, q),
            *ready.numbers,
            **ready.options,
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
    q, k, v, grad = (aligned(one) for one in (q, k, v, grad))
    dq, dk, dv = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = torch.empty_like(lse)
    packed = packing.sizes if packing else None
    sums = prepared.row_sums(_form(q), _form(k), _form(grad), packed=packed)
    with _on(q.device):
        backward_kernels.row_sums[sums.grid](
            out, grad, delta, packing.starts_q if packing else q, *sums.numbers, **sums.options
        )
        for kernel in ("backward_keys", "backward_queries"):
            launch_backward(kernel, (q, k, v, grad, lse, delta), (dq, dk, dv), slopes, packing, band)
    return dq, dk, dv


def launch_backward(
    name: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    slopes: Tensor | None,
    packing: Packing | None,
    band: Band,
) -> None:
    """Launch one of the two kernels that make gradients."""
    q, k, v, grad, lse, delta = inputs
    ready = prepared.backward(
        name,
        *map(_form, (q, k, v, grad)),
        slope_stride=_slope_stride(slopes),
        packed=packing.sizes if packing else None,
        band=band,
        device=q.device,
    )
    keys = name == "backward_keys"
    block, looped = (ready.row.block_m, (q, grad)) if keys else (ready.row.block_n, (k, v))
    sources = (
        _source(one, block, ready) if any(one is other for other in looped) else one
        for one in (q, k, v, grad)
    )
    getattr(backward_kernels, name)[ready.grid](
        *sources,
        lse,
        delta,
        *(outputs[1:] if keys else outputs[:1]),
        *_optional(slopes, packing, q),
        *ready.numbers,
        **ready.options,
    )


def run_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of the sums (batch, row, head) of queries at the end of a cache."""
    q, k, v = (aligned(one) for one in (q, k, v))
    ready = prepared.decoding(
        *map(_form, (q, k, v)), slope_stride=_slope_stride(slopes), band=band, device=q.device
    )
    batch, rows, heads, head_size = q.shape
    on = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty((batch, rows, heads, ready.splits, head_size), **on)
    sums, lse = torch.empty(partial.shape[:-1], **on), torch.empty(q.shape[:-1], **on)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with _on(q.device):
        decode[ready.grid](
            q, k, v, partial, sums, slopes if slopes is not None else q, lengths,
            *ready.numbers, **ready.options,
        )  # fmt: skip
        combine[(lse.numel(),)](partial, sums, out, lse, ready.splits, **ready.combining)
    return out, lse


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its columns do not lie together or rows do not begin at 16 bytes."""
    strides = tensor.stride()
    fits = strides[-1] == 1 and all(one % 8 == 0 for one in strides[:-1]) and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.stride()


def _source(tensor: Tensor, rows: int, ready: PreparedLaunch) -> Any:
    if not ready.described:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - Triton 3.4 or newer

    view = tensor.transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, rows, ready.columns])


def _slope_stride(slopes: Tensor | None) -> int | None:
    """Return how far apart the slopes of two sequences are, 0 where they share them; None for no slopes."""
    if slopes is None:
        return None
    return slopes.stride(0) if slopes.dim() == 2 else 0


def _optional(slopes: Tensor | None, packing: Packing | None, q: Tensor) -> tuple[Tensor, ...]:
    """Return slopes and starts; what is absent is never read."""
    starts = (packing.starts_q, packing.starts_k) if packing else (q, q)
    return (q if slopes is None else slopes, *starts)


def _row_numbers(q: Tensor, packing: Packing | None) -> Tensor:
    shape = (q.shape[1], q.shape[0]) if packing else (q.shape[0], q.shape[2], q.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _on(device: torch.device) -> torch.cuda.device:
    return torch.cuda.device(device if device.type == "cuda" else -1)
