"""From gradients of the output and of the last states to those of all inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from twinrun_entry.recording import converted, empty, summed, zeros
from twinrun_entry.starts import start

from twinrun_mamba.ssd import backward_kernels
from twinrun_mamba.ssd.launch import (
    PASSED,
    Inputs,
    Kept,
    blocks,
    contiguous,
    laid,
    on,
    options,
    run_products,
    run_states,
)
from twinrun_mamba.ssd.sizes import Sizes

# Programs that a kernel which sums over heads of a group should have at least.
PROGRAMS = 512
GATED_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """What the gradients of step sizes and decays are made of, by head and time."""

    dsteps: Tensor
    reaching: Tensor
    over_rows: Tensor
    over_cols: Tensor
    reading: Tensor
    carried: Tensor


def run_backward(
    inputs: Inputs, sizes: Sizes, kept: Kept, grad: Tensor, final: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, A, B, C, D, z, the bias of dt and the initial states."""
    grad = laid(grad)
    with on(grad.device):
        products = run_products(inputs, sizes)
        grad, dz = (grad, None) if inputs.z is None else run_gate(inputs, sizes, kept, grad)
        added = run_states(grad, inputs.C, inputs, sizes, kept, forward=False)
        grads, carried, initial = run_passing(added, inputs, sizes, kept, final)
        dx, dD, dsteps, reaching = run_values(products, grads, inputs, sizes, kept, grad)
        dproducts, over_rows, over_cols = run_product_gradients(products, inputs, sizes, kept, grad)
        (dB, dC), reading = run_projections(dproducts, grads, inputs, sizes, kept, grad)
        parts = StepParts(
            dsteps=dsteps,
            reaching=reaching,
            over_rows=over_rows,
            over_cols=over_cols,
            reading=reading,
            carried=carried,
        )
        ddt, dA, dbias = run_steps(inputs, sizes, kept, parts)
    return dx, ddt, dA, dB, dC, dD, dz, dbias, initial


def run_gate(inputs: Inputs, sizes: Sizes, kept: Kept, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the output before z, and that of z."""
    assert inputs.z is not None
    shape = (sizes.batch, sizes.length, sizes.heads, sizes.P)
    inner, dz = (empty(shape, inputs.x.dtype, grad.device) for _ in range(2))
    start(
        backward_kernels.gate_gradients,
        triton.cdiv(sizes.length, GATED_ROWS) * sizes.batch * sizes.heads,
        kept.ungated,
        inputs.z,
        grad,
        dz,
        inner,
        *inputs.z.stride()[:3],
        *grad.stride()[:3],
        sizes.heads,
        sizes.length,
        P=sizes.P,
        BLOCK_P=sizes.block_p,
        ROWS=GATED_ROWS,
    )
    return inner, dz


def run_passing(
    added: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients of last states, parts of those of whole decays, and that of the initial states."""
    device, parts = added.device, triton.cdiv(sizes.P * sizes.N, PASSED)
    grads = empty(sizes.states, kept.states.dtype, device)
    carried = empty((*sizes.by_head, parts), torch.float32, device)
    shape = (sizes.batch, sizes.heads, sizes.P, sizes.N)
    initial = None if inputs.initial_states is None else empty(shape, torch.float32, device)
    start(
        backward_kernels.pass_gradients,
        sizes.batch * sizes.heads * parts,
        added,
        kept.states,
        kept.sums,
        inputs.index,
        added if final is None else contiguous(final),
        grads,
        added if initial is None else initial,
        carried,
        sizes.heads,
        sizes.length,
        sizes.chunks,
        SIZE=sizes.P * sizes.N,
        Q=sizes.Q,
        BLOCK=PASSED,
        HAS_FINAL=final is not None,
        HAS_INITIAL=initial is not None,
        **inputs.flags,
    )
    return grads, carried, initial


def run_values(
    products: Tensor, grads: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the gradients of x and of D, and by row those of its step size: whole, and by the last state."""
    x, row = inputs.x, options("value_gradients", inputs)
    constants = blocks(sizes, row)
    dx = empty((sizes.batch, sizes.length, sizes.heads, sizes.P), x.dtype, x.device)
    dsteps, reaching = (empty(tuple(kept.steps.shape), torch.float32, x.device) for _ in range(2))
    count = sizes.Q // constants["BLOCK_K"]
    skipped = empty((sizes.batch * sizes.chunks * count, sizes.heads, sizes.P), torch.float32, x.device)
    start(
        backward_kernels.value_gradients,
        count * sizes.programs,
        products,
        x,
        inputs.B,
        grad,
        grads,
        kept.steps,
        kept.sums,
        inputs.index,
        inputs.skip,
        dx,
        dsteps,
        reaching,
        skipped,
        *x.stride()[:3],
        *inputs.B.stride()[:3],
        *grad.stride()[:3],
        *inputs.skip_strides,
        sizes.heads,
        sizes.length,
        sizes.chunks,
        **constants,
        HAS_D=inputs.D is not None,
        **inputs.flags,
        **row.compiler(),
    )
    if inputs.D is None:
        return dx, None, dsteps, reaching
    return dx, summed(skipped, (0, 2) if inputs.D.dim() == 1 else (0,)), dsteps, reaching


def run_product_gradients(
    products: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the products of C and B, and sums with them over rows and over columns."""
    x, row = inputs.x, options("product_gradients", inputs)
    constants = blocks(sizes, row)
    del constants["N"], constants["BLOCK_N"]
    tall, wide = sizes.Q // constants["BLOCK_M"], sizes.Q // constants["BLOCK_K"]
    members, splits = split_of(sizes, tall * wide // 2)
    dproducts = empty((splits, *sizes.products), torch.float32, x.device)
    # Blocks above the diagonal are never written, and they are added.
    over_rows = zeros((*sizes.by_head, tall, sizes.Q), torch.float32, x.device)
    over_cols = zeros((*sizes.by_head, wide, sizes.Q), torch.float32, x.device)
    start(
        backward_kernels.product_gradients,
        tall * wide * splits * sizes.batch * sizes.chunks * sizes.groups,
        products,
        x,
        grad,
        kept.steps,
        kept.sums,
        inputs.index,
        dproducts,
        over_rows,
        over_cols,
        *x.stride()[:3],
        *grad.stride()[:3],
        sizes.heads,
        sizes.length,
        sizes.chunks,
        members,
        splits,
        products.numel(),
        **constants,
        **inputs.flags,
        **row.compiler(),
    )
    return (dproducts[0] if splits == 1 else summed(dproducts, (0,))), over_rows, over_cols


def run_projections(
    dproducts: Tensor, grads: Tensor, inputs: Inputs, sizes: Sizes, kept: Kept, grad: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the gradients of B and of C, and what rows have of the decay from the first state."""
    row, device = options("projection_gradients", inputs), inputs.x.device
    constants = blocks(sizes, row)
    parts, rows = triton.cdiv(sizes.N, constants["BLOCK_N"]), sizes.Q // constants["BLOCK_M"]
    members, splits = split_of(sizes, parts * rows)
    dtype = inputs.x.dtype if splits == 1 else torch.float32
    found = empty((2, splits, sizes.batch, sizes.length, sizes.groups, sizes.N), dtype, device)
    reading = empty((*sizes.by_head, parts, sizes.Q), torch.float32, device)
    for of_b in (False, True):
        x, other, states = (inputs.x, inputs.C, grads) if of_b else (grad, inputs.B, kept.states)
        start(
            backward_kernels.projection_gradients,
            parts * rows * splits * sizes.batch * sizes.chunks * sizes.groups,
            dproducts,
            other,
            x,
            states,
            inputs.C,
            kept.steps,
            kept.sums,
            inputs.index,
            found[0 if of_b else 1],
            reading,
            *other.stride()[:3],
            *x.stride()[:3],
            *inputs.C.stride()[:3],
            sizes.heads,
            sizes.length,
            sizes.chunks,
            members,
            splits,
            found[0, 0].numel(),
            **constants,
            OF_B=of_b,
            **inputs.flags,
            **row.compiler(),
        )
    whole = found[:, 0] if splits == 1 else converted(summed(found, (1,)), inputs.x.dtype)
    return (whole[0], whole[1]), reading


def run_steps(
    inputs: Inputs, sizes: Sizes, kept: Kept, parts: StepParts
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of dt, of A and of the bias of dt."""
    device, tile = inputs.x.device, sizes.heads_of_a_tile
    ddt = empty((sizes.batch, sizes.length, sizes.heads), inputs.dt.dtype, device)
    found = empty((2, *sizes.by_head), torch.float32, device)
    start(
        backward_kernels.step_gradients,
        triton.cdiv(sizes.heads, tile) * sizes.batch * sizes.chunks,
        inputs.dt,
        inputs.A,
        inputs.bias,
        kept.steps,
        parts.dsteps,
        parts.reaching,
        parts.over_rows,
        parts.over_cols,
        parts.reading,
        parts.carried,
        ddt,
        found[0],
        found[1],
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
        TALL=parts.over_rows.shape[3],
        WIDE=parts.over_cols.shape[3],
        READING=parts.reading.shape[3],
        CARRIED=parts.carried.shape[3],
    )
    dA, dbias = summed(found, (1, 3))
    return ddt, dA, (None if inputs.dt_bias is None else dbias)


def split_of(sizes: Sizes, blocks_of_a_chunk: int) -> tuple[int, int]:
    """Return how many heads of a group a program takes, and how many programs share a group."""
    programs = max(1, blocks_of_a_chunk) * sizes.batch * sizes.chunks * sizes.groups
    splits = min(sizes.group, max(1, -(-PROGRAMS // programs)))
    members = -(-sizes.group // splits)
    return members, -(-sizes.group // members)
