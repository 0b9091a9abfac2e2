"""The selective scan: upstream's function, and the operations that run it forwards and backwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from twinrun_kernels.operators import is_compiling, wants_gradient

from twinrun_mamba import reference, scan_kernels, validation
from twinrun_mamba.launch import launcher
from twinrun_mamba.layout import (
    LAYOUTS,
    cast,
    channel_first,
    copied_into,
    is_time_adjacent,
    new_projection,
    new_sequence,
)
from twinrun_mamba.ops import operators, saving
from twinrun_mamba.packing import sequence_index
from twinrun_mamba.validation import ArgumentError

Tensors = tuple[Tensor, ...]
# What has a gradient, in the order in which the operations take it.
GIVEN = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
RANKS = ((3,), (3,), (2,), (2, 3, 4), (2, 3, 4), (1,), (3,), (1,), (3,))
STEP = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
STEP_RANKS = ((3,), (2,), (2,), (2,), (2, 3), (2, 3), (1,), (2,), (1,))
_SCHEMA = (
    "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
    "Tensor? initial_state, Tensor? seq_idx, bool softplus"
)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    layout: str = "channel-first",
    backend: str | None = None,
) -> Any:
    """Return the scan's output, and with it the state after the last step when `return_last_state`.

    Positional arguments are upstream's. All tensors have gradients, the last state too; every bit repeats.

    u, delta, z: (batch, channels, length), or (batch, length, channels) when layout is "token-major"; bf16,
        fp16 or fp32 (float64 with backend="reference"), one dtype for u, delta, z, B and C.
    A: (channels, states) with 1 to 256 states; complex with backend="reference" only.
    B, C: (batch, states, length) or (batch, groups, states, length); when token-major (batch, length, states)
        or (batch, length, groups, states); (channels, states) with backend="reference" only.
    D, delta_bias: (channels). initial_state: (batch, channels, states), for the first sequence of each row.
    seq_idx: (batch, length), sorted integers; the state starts from zero where they change.
    cu_seqlens: the same as (sequences + 1) boundaries from 0 to length, for batch 1.
    backend: one of launch.BACKENDS; None takes TWINRUN_MAMBA_BACKEND, else native on a GPU and the reference
        elsewhere.
    Raises ArgumentError, a ValueError, that names the argument; ArchitectureError on a GPU without kernels.
    """
    given = (u, delta, A, B, C, D, z, delta_bias, initial_state)
    validation.ranks(*zip(GIVEN, given, RANKS), required=5)
    validation.one_of("layout", layout, LAYOUTS)
    u, delta = channel_first(u, layout), channel_first(delta, layout)
    z = None if z is None else channel_first(z, layout)
    index = sequence_index(seq_idx, cu_seqlens, u)
    B, C = _projections(u, A, B, C, layout != LAYOUTS[0], backend or "")
    weight = reference.compute_type(u)
    weights = cast(D, weight), z, cast(delta_bias, weight), cast(initial_state, weight)
    inputs = (u, delta, A if A.is_complex() else cast(A, weight), B, C, *weights, index)
    if A.is_complex():
        out, last = _complex(inputs, delta_softplus)
    else:
        out, last, _ = scan_forward(*inputs, delta_softplus, wants_gradient(inputs), backend or "")
    out = channel_first(out, layout)
    return (out, last) if return_last_state else out


def _complex(inputs: tuple[Any, ...], softplus: bool) -> tuple[Tensor, Tensor]:
    """Return output and last state of a scan with complex A, which torch computes."""
    u, delta, A, B, C, *rest = inputs
    weight = reference.compute_type(u)
    validation.scan(u, delta, A.real.to(weight), B.real.to(u.dtype), C.real.to(u.dtype), *rest, native=False)
    return reference.selective_scan(*inputs, softplus=softplus)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    *,
    backend: str | None = None,
) -> Tensor:
    """Return the scan's output at one more time, without gradient, and bring `state` up to date in place.

    Positional arguments are upstream's for Mamba-1, without heads and `state_batch_indices`. It is the scan
    of one time, by its kernels.

    state: (batch, channels, states) in bf16, fp16 or fp32; what is computed in fp32 is rounded to it.
    x, dt, z: (batch, channels). B, C: (batch, states) or (batch, groups, states). A is real; it, D, dt_bias,
        dtypes and backend are as in selective_scan_fn.
    Raises ArgumentError, a ValueError, that names the argument.
    """
    given = (state, x, dt, A, B, C, D, z, dt_bias)
    validation.ranks(*zip(STEP, given, STEP_RANKS), required=6)
    # A compiler cannot look into the choice, which comes again with the scan.
    native = not is_compiling() and launcher(backend or "", x.device) is not None
    validation.state_update(*given, native=native)
    u, delta, b, c = (tensor.unsqueeze(-1) for tensor in (x, dt, B, C))
    gate = None if z is None else z.unsqueeze(-1)
    with torch.no_grad():
        out, last = selective_scan_fn(
            *(u, delta, A, b, c, D, gate, dt_bias, dt_softplus, True), initial_state=state, backend=backend
        )
        state.copy_(last)
    return out.squeeze(-1)


def _projections(
    u: Tensor, A: Tensor, B: Tensor, C: Tensor, token_major: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Return B and C as (batch, groups, states, length), views where they can be."""
    constant = [name for name, t in (("B", B), ("C", C)) if t.dim() == 2]
    if constant or A.is_complex():
        name, found = (
            ("A", A.dtype) if A.is_complex() else (constant[0], "(channels, states), constant over time")
        )
        allowed = "a real dtype" if A.is_complex() else "B and C that vary over time"
        if launcher(backend, u.device) is not None:
            raise ArgumentError(name, found, f'{allowed}, or backend="reference"')
    B, C = (_grouped(t, A, token_major) for t in (B, C))
    if not constant:
        return B, C
    return _per_channel(B, u), _per_channel(C, u)


def _grouped(projection: Tensor, A: Tensor, token_major: bool) -> Tensor:
    """Return (batch, groups, states, length) of a projection that varies over time."""
    if projection.dim() == 2:
        return projection
    if token_major:
        order = (0, 2, 3, 1) if projection.dim() == 4 else (0, 2, 1)
        projection = projection.permute(order)
    if A.is_complex():
        # Upstream keeps real and imaginary parts side by side in time.
        dtype = reference.compute_type(projection)
        projection = torch.view_as_complex(projection.to(dtype).unflatten(-1, (-1, 2)).contiguous())
    return projection if projection.dim() == 4 else projection.unsqueeze(1)


def _per_channel(projection: Tensor, u: Tensor) -> Tensor:
    batch, channels, length = u.shape
    if projection.dim() == 2:
        return projection[None, :, :, None].expand(batch, -1, -1, length)
    groups = projection.shape[1]
    if groups == 0 or channels % groups:
        raise ArgumentError("B or C", f"{groups} groups", f"a divisor of the {channels} channels")
    return projection.repeat_interleave(channels // groups, 1)


def _forward(*arguments: Any) -> Tensors:
    *inputs, softplus, save, backend = arguments
    launch = launcher(backend, inputs[0].device)
    sizes = validation.scan(*inputs, native=launch is not None)
    if launch is not None:
        return scan_kernels.forward(launch, sizes, inputs, softplus=softplus, save=save)
    promised = _fake_forward(*arguments)
    found = reference.scan_forward(*inputs, softplus=softplus)
    return copied_into(promised, found if save else (*found[:2], None))


def _fake_forward(*arguments: Any) -> Tensors:
    u, _, A, *_, save, _ = arguments
    batch, channels, length = u.shape
    states, dtype = A.shape[1], reference.compute_type(u)
    chunks = (length + scan_kernels.CHUNK - 1) // scan_kernels.CHUNK
    last = u.new_empty((batch, channels, states), dtype=dtype)
    checkpoints = last.new_empty((batch, channels, chunks, states) if save else (0,))
    return new_sequence(u, is_time_adjacent(u)), last, checkpoints


def _backward(*arguments: Any) -> Tensors:
    out_gradient, last_gradient, checkpoints, *inputs, softplus, backend = arguments
    u = inputs[0]
    launch = launcher(backend, u.device)
    sizes = validation.scan(*inputs, native=launch is not None)
    validation.like("gradient of out", out_gradient, u.dtype, u.device, u.shape, validation.SEQUENCE)
    if checkpoints.numel() == 0:
        checkpoints = _forward(*inputs, softplus, True, backend)[2]
    gradients: tuple[Any, ...] = (out_gradient, last_gradient, checkpoints)
    if launch is not None:
        made = scan_kernels.backward(launch, sizes, *gradients, inputs=inputs, softplus=softplus)
        return tuple(u.new_empty(0) if t is None else t for t in made)
    tensors: list[Any] = [*inputs[:8], inputs[9]]
    named = reference.scan_backward(*gradients, *tensors, softplus=softplus)
    found = [None if t is None else named[name] for name, t in zip(GIVEN, inputs)]
    return copied_into(_fake_backward(*arguments), found)


def _fake_backward(*arguments: Any) -> Tensors:
    u, delta, A, B, C, D, z, delta_bias, initial_state = arguments[3:12]
    time_adjacent = is_time_adjacent(u)

    def like(tensor: Tensor | None) -> Tensor:
        return u.new_empty((0,) if tensor is None else tensor.shape, dtype=reference.compute_type(u))

    def like_u(tensor: Tensor | None) -> Tensor:
        return like(None).to(u.dtype) if tensor is None else new_sequence(u, time_adjacent)

    gb, gc = new_projection(B), new_projection(C)
    rest = (like(D), like_u(z), like(delta_bias), like(initial_state))
    return (like_u(u), like_u(delta), like(A), gb, gc, *rest)


scan_backward = operators.define(
    "scan_backward(Tensor out_gradient, Tensor? last_gradient, Tensor checkpoints, "
    f"{_SCHEMA}, str backend) -> ({', '.join(['Tensor'] * len(GIVEN))})",
    _backward,
    _fake_backward,
)
scan_forward = operators.differentiable(
    f"scan_forward({_SCHEMA}, bool save, str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    *saving(scan_backward),
)
