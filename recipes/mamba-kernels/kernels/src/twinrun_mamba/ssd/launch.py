"""From tensors to launches of the kernels."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from twinrun_entry.recording import empty, not_repeated
from twinrun_entry.starts import start

from twinrun_mamba.ssd import forward_kernels, tuning
from twinrun_mamba.ssd.sizes import Sizes
from twinrun_mamba.ssd.tuning import LaunchOptions

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Elements of a state that a program passes from chunk to chunk.
PASSED = 256


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a call, the last dimension of each contiguous, and how step sizes are made."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None
    seq_idx: Tensor | None
    softplus: bool
    low: float
    high: float
    tf32: bool
    """Whether fp32 may be multiplied in TF32."""

    @classmethod
    def of(cls, *tensors: Any, softplus: bool, low: float, high: float, tf32: bool) -> Inputs:
        """Return the inputs as kernels take them; fp32 in the interpreter, which multiplies bf16 wrongly."""
        x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx = tensors
        return cls(
            x=laid(x),
            dt=wide(dt),
            A=contiguous(wide(A)),
            B=laid(B),
            C=laid(C),
            D=None if D is None else wide(D),
            z=None if z is None else laid(z),
            dt_bias=None if dt_bias is None else contiguous(wide(dt_bias)),
            initial_states=None if initial_states is None else contiguous(wide(initial_states)),
            seq_idx=None if seq_idx is None else contiguous(as_type(seq_idx, torch.int32)),
            softplus=softplus,
            low=low,
            high=high,
            tf32=tf32,
        )

    @property
    def index(self) -> Tensor:
        """The sequences, or what stands in their place."""
        return self.x if self.seq_idx is None else self.seq_idx

    @property
    def bias(self) -> Tensor:
        """The bias of dt, or what stands in its place."""
        return self.x if self.dt_bias is None else self.dt_bias

    @property
    def skip(self) -> Tensor:
        """D, or what stands in its place."""
        return self.x if self.D is None else self.D

    @property
    def skip_strides(self) -> tuple[int, int]:
        """How far apart in D heads are, and columns: one number may serve all of them."""
        if self.D is None:
            return 0, 0
        return self.D.stride(0), self.D.stride(1) if self.D.dim() == 2 else 0

    @property
    def flags(self) -> dict[str, bool]:
        """Constants that every kernel by chunk takes."""
        return {"HAS_INDEX": self.seq_idx is not None}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the backward pass takes from the forward one."""

    steps: Tensor
    sums: Tensor
    states: Tensor
    """The first state of each chunk."""
    ungated: Tensor | None
    """The output before it is multiplied by silu of z."""


def run_forward(inputs: Inputs, sizes: Sizes, state_dtype: torch.dtype) -> tuple[Tensor, Tensor, Kept]:
    """Return output, last states, and what the backward pass takes."""
    x, row = inputs.x, (sizes.batch, sizes.length, sizes.heads, sizes.P)
    out = empty(row, x.dtype, x.device)
    ungated = empty(row, x.dtype, x.device) if inputs.z is not None else None
    steps, sums = (empty((*sizes.by_head, sizes.Q), torch.float32, x.device) for _ in range(2))
    kept = Kept(steps=steps, sums=sums, states=empty(sizes.states, state_dtype, x.device), ungated=ungated)
    final = empty((sizes.batch, sizes.heads, sizes.P, sizes.N), torch.float32, x.device)
    with on(x.device):
        run_sums(inputs, sizes, kept)
        states = run_states(x, inputs.B, inputs, sizes, kept, forward=True)
        start(
            forward_kernels.pass_states,
            sizes.batch * sizes.heads * triton.cdiv(sizes.P * sizes.N, PASSED),
            states,
            kept.sums,
            inputs.index,
            states if inputs.initial_states is None else inputs.initial_states,
            kept.states,
            final,
            sizes.heads,
            sizes.length,
            sizes.chunks,
            SIZE=sizes.P * sizes.N,
            Q=sizes.Q,
            BLOCK=PASSED,
            HAS_INITIAL=inputs.initial_states is not None,
            **inputs.flags,
        )
        run_outputs(run_products(inputs, sizes), inputs, sizes, kept, out)
    return out, final, kept


def run_sums(inputs: Inputs, sizes: Sizes, kept: Kept) -> None:
    """Fill in the step sizes and the sums of decays."""
    tile = sizes.heads_of_a_tile
    start(
        forward_kernels.chunk_sums,
        triton.cdiv(sizes.heads, tile) * sizes.batch * sizes.chunks,
        inputs.dt,
        inputs.A,
        inputs.bias,
        kept.steps,
        kept.sums,
        *inputs.dt.stride(),
        sizes.heads,
        sizes.length,
        sizes.chunks,
        inputs.low,
        inputs.high,
        Q=sizes.Q,
        HEADS=tile,
        HAS_BIAS=inputs.dt_bias is not None,
        SOFTPLUS=inputs.softplus,
    )


def run_states(x: Tensor, B: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, *, forward: bool) -> Tensor:
    """Return what each chunk adds to its last state, or to the gradient of its first."""
    row = options("chunk_states", inputs)
    states = empty(sizes.states, torch.float32, x.device)
    block = sizes.in_state(row.block_n)
    start(
        forward_kernels.chunk_states,
        triton.cdiv(sizes.N, block) * sizes.programs,
        x,
        B,
        kept.steps,
        kept.sums,
        inputs.index,
        states,
        *x.stride()[:3],
        *B.stride()[:3],
        sizes.heads,
        sizes.length,
        sizes.chunks,
        GROUP=sizes.group,
        P=sizes.P,
        N=sizes.N,
        Q=sizes.Q,
        BLOCK_P=sizes.block_p,
        BLOCK_N=block,
        BLOCK_K=sizes.in_chunk(row.block_k),
        FORWARD=forward,
        PRECISION=row.fp32,
        **inputs.flags,
        **row.compiler(),
    )
    return states


def run_products(inputs: Inputs, sizes: Sizes) -> Tensor:
    """Return the products of C and B of each chunk; above the diagonal they are anything."""
    row = options("chunk_products", inputs)
    products = empty(sizes.products, torch.float32, inputs.x.device)
    m, k = sizes.in_chunk(row.block_m), sizes.in_chunk(row.block_k)
    blocks = (sizes.Q // m) * (sizes.Q // k)
    start(
        forward_kernels.chunk_products,
        blocks * sizes.batch * sizes.chunks * sizes.groups,
        inputs.C,
        inputs.B,
        products,
        *inputs.C.stride()[:3],
        *inputs.B.stride()[:3],
        sizes.groups,
        sizes.length,
        sizes.chunks,
        N=sizes.N,
        Q=sizes.Q,
        BLOCK_M=m,
        BLOCK_K=k,
        BLOCK_N=sizes.in_state(row.block_n),
        PRECISION=row.fp32,
        **row.compiler(),
    )
    return products


def run_outputs(products: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, out: Tensor) -> None:
    """Fill in the output, and what it is before z."""
    row = options("chunk_outputs", inputs)
    m, z = sizes.in_chunk(row.block_m), inputs.x if inputs.z is None else inputs.z
    start(
        forward_kernels.chunk_outputs,
        sizes.Q // m * sizes.programs,
        products,
        inputs.x,
        z,
        inputs.C,
        kept.states,
        kept.steps,
        kept.sums,
        inputs.index,
        inputs.skip,
        out,
        out if kept.ungated is None else kept.ungated,
        *inputs.x.stride()[:3],
        *z.stride()[:3],
        *inputs.C.stride()[:3],
        *inputs.skip_strides,
        sizes.heads,
        sizes.length,
        sizes.chunks,
        **blocks(sizes, row),
        HAS_D=inputs.D is not None,
        HAS_Z=inputs.z is not None,
        **inputs.flags,
        **row.compiler(),
    )


def blocks(sizes: Sizes, row: LaunchOptions) -> dict[str, Any]:
    """Return the constants of a kernel that has tiles of rows, of steps and of the state."""
    return {
        "GROUP": sizes.group,
        "P": sizes.P,
        "N": sizes.N,
        "Q": sizes.Q,
        "BLOCK_P": sizes.block_p,
        "BLOCK_M": sizes.in_chunk(row.block_m),
        "BLOCK_K": sizes.in_chunk(row.block_k),
        "BLOCK_N": sizes.in_state(row.block_n),
        "PRECISION": row.fp32,
    }


def options(kernel: str, inputs: Inputs) -> LaunchOptions:
    """Return the row of the table for a kernel on a tensor's device."""
    x = inputs.x
    arch = tuning.architecture(x.device)
    return tuning.options(kernel, arch=arch, element_bytes=x.element_size(), tf32=inputs.tf32)


def laid(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, wide enough for the interpreter."""
    tensor = wide(tensor)
    if tensor.stride(-1) == 1:
        return tensor
    not_repeated()
    return tensor.contiguous()


def contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor without gaps."""
    if tensor.is_contiguous():
        return tensor
    not_repeated()
    return tensor.contiguous()


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a type."""
    if tensor.dtype is dtype:
        return tensor
    not_repeated()
    return tensor.to(dtype)


def wide(tensor: Tensor) -> Tensor:
    """Return fp32 where Triton's interpreter runs."""
    return tensor.float() if INTERPRETED and tensor.device.type == "cpu" else tensor


def on(device: torch.device) -> Any:
    """Return a context in which kernels start on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
