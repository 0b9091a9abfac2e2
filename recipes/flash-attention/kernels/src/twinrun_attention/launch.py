"""From tensors to launches of the kernels; what does not depend on addresses is prepared once."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from twinrun_entry.recording import empty, empty_like, local, not_repeated
from twinrun_entry.starts import write_down

from twinrun_attention import backward_kernels, forward_kernel, prepared
from twinrun_attention.decode_kernel import combine, decode
from twinrun_attention.prepared import Band, Form, Packing, PreparedLaunch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_HERE = nullcontext()


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, packing: Packing | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of the sum of each row: (batch, head, row), packed (head, row)."""
    q, k, v = aligned(q), aligned(k), aligned(v)
    out, lse = empty_like(q, q.shape), _row_numbers(q, packing)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("inf"))
    ready = prepared.forward(
        *(_form(q), _form(k), _form(v)),
        _slope_stride(slopes),
        packing.sizes if packing else None,
        band,
        q.device,
    )
    tensors = (q, k, v, out, lse, *_optional(slopes, packing, q))
    with _on(q.device):
        start(forward_kernel.forward, ready, tensors, q.dtype, looped=(1, 2))
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
    q, k, v, grad = aligned(q), aligned(k), aligned(v), aligned(grad)
    dq, dk, dv = empty_like(q, q.shape), empty_like(k, k.shape), empty_like(v, v.shape)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    delta = empty_like(lse, lse.shape)
    packed = packing.sizes if packing else None
    sums = prepared.row_sums(_form(q), _form(k), _form(grad), packed)
    with _on(q.device):
        starts = packing.starts_q if packing else q
        start(backward_kernels.row_sums, sums, (out, grad, delta, starts), q.dtype)
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
        *(_form(q), _form(k), _form(v), _form(grad)),
        _slope_stride(slopes),
        packing.sizes if packing else None,
        band,
        q.device,
    )
    keys = name == "backward_keys"
    made = outputs[1:] if keys else outputs[:1]
    tensors = (q, k, v, grad, lse, delta, *made, *_optional(slopes, packing, q))
    start(getattr(backward_kernels, name), ready, tensors, q.dtype, looped=(0, 3) if keys else (1, 2))


def start(
    kernel: Any,
    ready: PreparedLaunch,
    tensors: tuple[Tensor, ...],
    dtype: torch.dtype,
    *,
    looped: tuple[int, ...] = (),
) -> None:
    """Start a kernel on tensors of `dtype`; those at places `looped` may be read through descriptors.

    Triton finds the compiled kernel anew in each call, which takes longer than all else here. What it looks
    at beside the form of a call is the type of each tensor and whether it begins at 16 bytes.
    """
    begins = 0
    for one in tensors:
        begins |= one.data_ptr()
    written_down = local.active is not None
    again = None if begins & 15 or written_down else ready.started.get(dtype)
    arguments: list[Any] = list(tensors)
    for place, form in zip(looped, ready.looped):
        arguments[place] = _source(tensors[place], form, ready, known=again is not None)
    if again is not None:
        again(*arguments)
        return
    compiled = kernel[ready.grid](*arguments, *ready.numbers, **ready.options)
    write_down(kernel, compiled, ready.grid[0], (*arguments, *ready.numbers))
    # The interpreter compiles nothing.
    if compiled is not None and not begins & 15:
        ready.started[dtype] = _starter(kernel, compiled, ready)


def _starter(kernel: Any, compiled: Any, ready: PreparedLaunch) -> Callable[..., None]:
    """Return what starts a compiled kernel with tensors of the form it was made ready for."""
    run = compiled[(*ready.grid, 1, 1)]
    # Constants are the last parameters of every kernel here.
    rest = (*ready.numbers, *(ready.options[name] for name in kernel.arg_names if name in ready.options))
    return lambda *tensors: run(*tensors, *rest)


class _Described:
    """What a launcher reads of Triton's TensorDescriptor, without its checks."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: Any, strides: Any) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


def _source(tensor: Tensor, form: Form, ready: PreparedLaunch, *, known: bool) -> Any:
    shape, strides = form
    if known:
        return _Described(tensor, shape, strides)
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: PLC0415 - Triton 3.4 or newer

    tile = [1, 1, ready.looped_rows, ready.columns]
    return TensorDescriptor(tensor.transpose(1, 2), list(shape), list(strides), tile)


def run_decode(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, slopes: Tensor | None, band: Band
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of the sums (batch, row, head) of queries at the end of a cache."""
    q, k, v = (aligned(one) for one in (q, k, v))
    ready = prepared.decoding(_form(q), _form(k), _form(v), _slope_stride(slopes), band, q.device)
    batch, rows, heads, head_size = q.shape
    on = {"dtype": torch.float32, "device": q.device}
    partial = torch.empty((batch, rows, heads, ready.splits, head_size), **on)
    sums, lse = torch.empty(partial.shape[:-1], **on), torch.empty(q.shape[:-1], **on)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with _on(q.device):
        tensors = (q, k, v, partial, sums, slopes if slopes is not None else q, lengths)
        start(decode, ready.attend, tensors, q.dtype)
        start(combine, ready.combine, (partial, sums, out, lse), q.dtype)
    return out, lse


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its columns do not lie together or rows do not begin at 16 bytes."""
    if not tensor.data_ptr() & 15 and _fit(tensor.stride()):
        return tensor
    not_repeated()
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=prepared.REMEMBERED)
def _fit(strides: tuple[int, ...]) -> bool:
    """Say whether columns lie together and rows are whole vectors of 16 bytes apart."""
    return strides[-1] == 1 and all(one % 8 == 0 for one in strides[:-1])


def _form(tensor: Tensor) -> Form:
    return tensor.shape, tensor.stride()


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
    return empty(shape, torch.float32, q.device)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels start on a device; entering one takes longer than to look."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    entered: AbstractContextManager[Any] = torch.cuda.device(device)
    return entered
