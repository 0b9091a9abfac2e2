"""Upstream's function for Mamba-2's SSD, and what of its arguments is wrong."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.packing import sequence_index
from twinrun_mamba.reference import compute_type
from twinrun_mamba.ssd.reference import reference_chunk_scan
from twinrun_mamba.ssd.varlen import reference_states, states_of_sequences
from twinrun_mamba.validation import KERNEL_TYPES, ArgumentError, ArgumentTypeError, like, one_of, ranks

BACKENDS = ("native", "reference")
CHUNK_SIZES = (16, 32, 64, 128, 256)
HEAD_SIZES, STATES = 128, 256
NO_LIMIT = (0.0, float("inf"))
RANKS = {
    "x": (4,),
    "dt": (3,),
    "A": (1,),
    "B": (4,),
    "C": (4,),
    "D": (1, 2),
    "z": (4,),
    "dt_bias": (1,),
    "initial_states": (4,),
}


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Any:
    """Return the output of Mamba-2's SSD, and what else is asked for.

    With `return_final_states` that is the state after the last step, with `return_varlen_states` behind it
    (sequences, heads, head size, states), the states after the sequences of cu_seqlens, without gradient.

    Positional arguments are upstream's. All tensors have gradients, the last state too; every bit repeats.

    x, z: (batch, length, heads, head size up to 128); bf16, fp16 or fp32, one dtype for x, z, B and C.
    dt: (batch, length, heads). A, dt_bias: (heads). D: (heads) or (heads, head size).
    B, C: (batch, length, groups, states up to 256); groups divide heads.
    chunk_size: 16, 32, 64, 128 or 256 rows that are computed as products of matrices.
    initial_states: (batch, heads, head size, states), for the first sequence of each row.
    seq_idx: (batch, length), sorted integers; the state starts from zero where they change.
    cu_seqlens: the same as boundaries from 0 to length, for batch 1; seq_idx goes before it.
    state_dtype: of the states kept between chunks, the dtype of x or fp32; None takes that of x.
    x in fp32 is multiplied in TF32 where torch.set_float32_matmul_precision("high") lets torch do so.
    backend: "native", the kernels, by default on a GPU and in Triton's interpreter; else "reference", torch.
    Raises ArgumentError, a ValueError, that names the argument.
    """
    given = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    _check(given, chunk_size)
    low, high = _limits(dt_limit)
    index = _index(seq_idx, cu_seqlens, x, return_varlen_states)
    kept = x.dtype if state_dtype is None else state_dtype
    one_of("state_dtype", kept, tuple(dict.fromkeys((x.dtype, torch.float32))))
    ends = cu_seqlens.to(x.device) if return_varlen_states and cu_seqlens is not None else None
    varlen = None
    if _backend(backend, x) == "reference":
        kind = compute_type(x)
        tensors: list[Any] = [None if one is None else one.to(kind) for one in given]
        tensors += [index, dt_softplus, (low, high)]
        out, final = reference_chunk_scan(*tensors)
        out = out.to(x.dtype)
        varlen = None if ends is None else reference_states(tensors, ends)
    else:
        # Triton is not everywhere, and reads its variables when it is imported.
        from twinrun_mamba.ssd import ops  # noqa: PLC0415

        # The switch that decides how torch itself multiplies fp32.
        tf32 = x.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32
        out, final, *parts, _ = ops.forward(*given, index, chunk_size, dt_softplus, low, high, tf32, kept)
        varlen = None if ends is None else states_of_sequences(x, B, ends, *parts)
    found = (out, *((final,) if return_final_states else ()), *(() if varlen is None else (varlen.detach(),)))
    return found if len(found) > 1 else out


def _index(seq_idx: Tensor | None, cu_seqlens: Tensor | None, x: Tensor, varlen: bool) -> Tensor | None:
    """Return seq_idx, from cu_seqlens where it is not given."""
    sequence = x.flatten(2).transpose(1, 2)
    if varlen and cu_seqlens is None:
        raise ArgumentError("return_varlen_states", "True without cu_seqlens", "False, or both")
    # Whichever is taken, boundaries that are looked up must be right.
    of_boundaries = sequence_index(None, cu_seqlens, sequence) if varlen or seq_idx is None else None
    return of_boundaries if seq_idx is None else sequence_index(seq_idx, None, sequence)


def _backend(backend: str | None, x: Tensor) -> str:
    """Return the backend of a call; a GPU, or Triton's interpreter, runs the kernels."""
    if backend is not None:
        one_of("backend", backend, BACKENDS)
    if x.dtype not in KERNEL_TYPES:
        if backend == "native":
            raise ArgumentTypeError("x", x.dtype, "bf16, fp16 or fp32; any with backend='reference'")
        return "reference"
    if x.device.type in ("cuda", "meta"):
        return backend or "native"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "native" and not interpreted:
        raise ArgumentError("backend", f"native on {x.device}", "a GPU, or TRITON_INTERPRET=1")
    return backend or ("native" if interpreted else "reference")


def _limits(dt_limit: tuple[float, float]) -> tuple[float, float]:
    """Return the least and the largest step size."""
    try:
        low, high = map(float, dt_limit)
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not low <= high:
        raise ArgumentError("dt_limit", dt_limit, "two numbers, the least and the most")
    return low, high


def _check(given: tuple[Any, ...], chunk_size: int) -> None:
    """Raise unless shapes, types and devices fit each other."""
    ranks(*((name, value, RANKS[name]) for name, value in zip(RANKS, given)), required=5)
    x, dt, A, B, C, D, z, dt_bias, initial = given
    if x.dtype not in (*KERNEL_TYPES, torch.float64):
        raise ArgumentTypeError("x", x.dtype, "bf16, fp16 or fp32")
    # 64.0 is one of them, and no constant of a kernel.
    one_of("chunk_size", chunk_size if isinstance(chunk_size, int) else str(chunk_size), CHUNK_SIZES)
    batch, length, heads, size = x.shape
    groups, states = B.shape[2:]
    if not 1 <= size <= HEAD_SIZES:
        raise ArgumentError("x", f"head size {size}", f"1 to {HEAD_SIZES}")
    if not 1 <= states <= STATES:
        raise ArgumentError("B", f"{states} states", f"1 to {STATES}")
    if groups < 1 or heads % groups:
        raise ArgumentError(
            "B", f"{groups} groups for {heads} heads", "a number of groups that divides heads"
        )
    row, projection = ("batch", "length", "heads", "head size"), ("batch", "length", "groups", "states")
    like("B", B, x.dtype, x.device, (batch, length, groups, states), projection)
    like("C", C, x.dtype, x.device, (batch, length, groups, states), projection)
    if z is not None:
        like("z", z, x.dtype, x.device, tuple(x.shape), row)
    _like_any("dt", dt, x, (batch, length, heads), ("batch", "length", "heads"))
    _like_any("A", A, x, (heads,), ("heads",))
    _like_any("dt_bias", dt_bias, x, (heads,), ("heads",))
    _like_any("D", D, x, (heads, size)[: 1 if D is None else D.dim()], ("heads", "head size"))
    shape = ("batch", "heads", "head size", "states")
    _like_any("initial_states", initial, x, (batch, heads, size, states), shape)


def _like_any(
    name: str, tensor: Tensor | None, x: Tensor, shape: tuple[int, ...], dims: tuple[str, ...]
) -> None:
    """Raise unless a tensor of any floating type has this shape and is where x is."""
    if tensor is None:
        return
    if not tensor.is_floating_point():
        raise ArgumentTypeError(name, tensor.dtype, "a floating type")
    like(name, tensor, tensor.dtype, x.device, shape, dims)
