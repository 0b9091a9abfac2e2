"""Mamba's inner block: convolution, projections to delta, B and C, scan, output projection.

Everything stays (batch, channels, length) up to the output, so that nothing is transposed in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twinrun_mamba import validation
from twinrun_mamba.conv import causal_conv1d_fn, conv_backward, conv_forward
from twinrun_mamba.layout import cast
from twinrun_mamba.packing import sequence_index
from twinrun_mamba.reference import compute_type
from twinrun_mamba.scan import scan_backward, scan_forward, selective_scan_fn
from twinrun_mamba.validation import ArgumentError, ArgumentTypeError


class _Options(NamedTuple):
    softplus: bool
    epsilon: float
    backend: str


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the block's output (batch, length, features); positional arguments are upstream's.

    xz: (batch, 2 channels, length), what is convolved and then what gates.
    conv1d_weight: (channels, 1, width). x_proj_weight: (rank + 2 states, channels). delta_proj_weight:
        (channels, rank). out_proj_weight: (features, channels). Projections and xz have one dtype, to which
        autocast casts them.
    B, C: instead of those that x_proj_weight makes, as in selective_scan_fn.
    b_rms_weight, c_rms_weight: (states), dt_rms_weight: (channels), of RMS norms over B, C and delta;
        upstream gives them no gradient, here they have one.
    checkpoint_lvl: 1 keeps neither the convolution's output nor delta, and makes them again for the backward;
        0 keeps both. Blocks with B, C or a complex A of their own keep both.
    """
    validation.one_of("checkpoint_lvl", checkpoint_lvl, (0, 1))
    kind = _check(xz, conv1d_weight, x_proj_weight, delta_proj_weight, out_proj_weight, A)
    rows = (("B_proj_bias", B_proj_bias), ("C_proj_bias", C_proj_bias), ("b_rms_weight", b_rms_weight))
    _check_vectors(*rows, ("c_rms_weight", c_rms_weight), size=_states(A))
    _check_vectors(("dt_rms_weight", dt_rms_weight), size=A.shape[0])
    _check_vectors(("out_proj_bias", out_proj_bias), size=out_proj_weight.shape[0])
    index = sequence_index(seq_idx, cu_seqlens, xz)
    weights = (x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, B_proj_bias, C_proj_bias)
    x_proj, delta_proj, out_proj, out_bias, b_bias, c_bias = (cast(weight, kind) for weight in weights)
    xz, conv = cast(xz, kind), conv1d_weight.squeeze(1)
    options = _Options(delta_softplus, b_c_dt_rms_eps, backend or "")
    projections = (x_proj, delta_proj, b_bias, c_bias, b_rms_weight, c_rms_weight, dt_rms_weight)
    with torch.autocast(xz.device.type, enabled=False):
        if checkpoint_lvl == 0 or B is not None or C is not None or A.is_complex():
            out = _composed(xz, conv, conv1d_bias, projections, A, B, C, D, delta_bias, index, options)
        else:
            wide = compute_type(xz)
            scan = (cast(A, wide), cast(D, wide), cast(delta_bias, wide))
            filters = (cast(conv, wide), cast(conv1d_bias, wide))
            return _Recomputing.apply(xz, *filters, *projections, *scan, out_proj, out_bias, index, options)
        return F.linear(out.transpose(1, 2), out_proj, out_bias)


def _composed(
    xz: Tensor,
    conv: Tensor,
    conv_bias: Tensor | None,
    projections: tuple[Any, ...],
    A: Tensor,
    B: Tensor | None,
    C: Tensor | None,
    D: Tensor | None,
    delta_bias: Tensor | None,
    index: Tensor | None,
    options: _Options,
) -> Tensor:
    x, z = xz.chunk(2, 1)
    backend = options.backend or None
    u = causal_conv1d_fn(x, conv, conv_bias, index, activation="silu", backend=backend)
    made = _projected(torch.matmul(projections[0], u), projections, _states(A), options.epsilon)
    delta, b, c = (t.value for t in made)
    if A.is_complex():
        b, c = (t.unflatten(1, (-1, 2)).transpose(2, 3).flatten(2) for t in (b, c))
    B, C = (b if B is None else B), (c if C is None else C)
    given = (u, delta, A, B, C, D, z, delta_bias, options.softplus)
    return selective_scan_fn(*given, seq_idx=index, backend=backend)


class _Normed(NamedTuple):
    """What a projection gives, and what the norm after it is made from."""

    value: Tensor
    raw: Tensor
    weight: Tensor | None


def _projected(
    small: Tensor, projections: tuple[Any, ...], states: int, epsilon: float
) -> tuple[_Normed, _Normed, _Normed]:
    """Return delta, B and C, each (batch, channels or states, length), from the projection of the inputs."""
    _, delta_proj, b_bias, c_bias, b_rms, c_rms, dt_rms = projections
    rank = delta_proj.shape[1]
    low, b, c = small.split([rank, states, states], 1)
    b = b if b_bias is None else b + b_bias[:, None]
    c = c if c_bias is None else c + c_bias[:, None]
    pairs = ((torch.matmul(delta_proj, low), dt_rms), (b, b_rms), (c, c_rms))
    delta, b, c = (_Normed(_rms(raw, weight, epsilon), raw, weight) for raw, weight in pairs)
    return delta, b, c


class _Recomputing(torch.autograd.Function):
    """The block, keeping its input, the small projection, the scan's checkpoints and the scan's output."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        xz, conv, conv_bias, *rest, out_proj, out_bias, index, options = arguments
        projections, (A, D, delta_bias) = tuple(rest[:7]), rest[7:]
        x, z = xz.chunk(2, 1)
        u = conv_forward(x, conv, conv_bias, None, index, True, False, options.backend)[0]
        small = torch.matmul(projections[0], u)
        delta, b, c = (t.value for t in _projected(small, projections, _states(A), options.epsilon))
        given = (u, delta, A, b.unsqueeze(1), c.unsqueeze(1), D, z, delta_bias, None, index)
        out, _, checkpoints = scan_forward(*given, options.softplus, True, options.backend)
        ctx.save_for_backward(*arguments[:-1], small, out, checkpoints)
        ctx.options = options
        return F.linear(out.transpose(1, 2), out_proj, out_bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *arguments, small, out, checkpoints = ctx.saved_tensors
        xz, conv, conv_bias, *rest, out_proj, out_bias, index = arguments
        projections, (A, D, delta_bias), options = tuple(rest[:7]), rest[7:], ctx.options
        x, z = xz.chunk(2, 1)
        u = conv_forward(x, conv, conv_bias, None, index, True, False, options.backend)[0]
        made = _projected(small, projections, _states(A), options.epsilon)
        delta, b, c = (t.value for t in made)
        gout_proj = torch.einsum("blf,bdl->fd", gradient, out)
        gout_bias = None if out_bias is None else gradient.sum((0, 1))
        gout = torch.matmul(out_proj.t(), gradient.transpose(1, 2))
        given = (u, delta, A, b.unsqueeze(1), c.unsqueeze(1), D, z, delta_bias, None, index)
        found = scan_backward(gout, None, checkpoints, *given, options.softplus, options.backend)
        gu, gdelta, gA, gb, gc, gD, gz, gdelta_bias, _ = found
        gu_small, gprojections = _projection_gradients(
            u, small, made, (gdelta, gb.squeeze(1), gc.squeeze(1)), projections, options.epsilon
        )
        found = conv_backward(gu + gu_small, None, x, conv, conv_bias, None, index, True, options.backend)
        gx, gconv, gconv_bias, _ = found
        weights = (gconv, gconv_bias, *gprojections, gA, gD, gdelta_bias, gout_proj, gout_bias)
        gradients = (torch.cat((gx, gz), 1), *weights)
        given = (xz, conv, conv_bias, *projections, A, D, delta_bias, out_proj, out_bias)
        return (*(None if t is None else g for t, g in zip(given, gradients)), None, None)


def _projection_gradients(
    u: Tensor,
    small: Tensor,
    made: tuple[_Normed, ...],
    gradients: tuple[Tensor, ...],
    projections: tuple[Any, ...],
    epsilon: float,
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the gradient of the convolution's output through delta, B and C, and those of `projections`."""
    x_proj, delta_proj = projections[:2]
    pairs = [_rms_gradients(normed, g, epsilon) for normed, g in zip(made, gradients)]
    (graw, gdt_rms), (gb, gb_rms), (gc, gc_rms) = pairs
    low = small[:, : delta_proj.shape[1]]
    gdelta_proj = torch.einsum("bdl,brl->dr", graw, low)
    gsmall = torch.cat((torch.matmul(delta_proj.t(), graw), gb, gc), 1)
    gx_proj = torch.einsum("brl,bdl->rd", gsmall, u)
    biases = (gb.sum((0, 2)), gc.sum((0, 2)))
    return torch.matmul(x_proj.t(), gsmall), (gx_proj, gdelta_proj, *biases, gb_rms, gc_rms, gdt_rms)


def _rms(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Return x over its root mean square along dimension 1, times weight."""
    if weight is None:
        return x
    wide = x.to(compute_type(x))
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + epsilon)
    return (wide * scale * weight[:, None]).to(x.dtype)


def _rms_gradients(normed: _Normed, gradient: Tensor, epsilon: float) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of what was normed and of the norm's weight."""
    if normed.weight is None:
        return gradient, None
    wide = normed.raw.to(compute_type(normed.raw))
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + epsilon)
    unit, g = wide * scale, gradient.to(wide.dtype)
    inner = g * normed.weight[:, None]
    graw = scale * (inner - unit * (inner * unit).mean(1, keepdim=True))
    return graw.to(gradient.dtype), (g * unit).sum((0, 2)).to(normed.weight.dtype)


def _states(A: Tensor) -> int:
    """Return how many rows of the small projection B has: a complex state takes two."""
    return int(A.shape[1]) * (2 if A.is_complex() else 1)


def _check(
    xz: Tensor, conv: Tensor, x_proj: Tensor, delta_proj: Tensor, out_proj: Tensor, A: Tensor
) -> torch.dtype:
    """Raise unless the weights fit each other; return the dtype to compute in."""
    given = (("xz", xz, (3,)), ("conv1d_weight", conv, (3,)), ("x_proj_weight", x_proj, (2,)))
    matrices = (("delta_proj_weight", delta_proj, (2,)), ("out_proj_weight", out_proj, (2,)), ("A", A, (2,)))
    validation.ranks(*given, *matrices, required=6)
    if xz.shape[1] % 2:
        raise ArgumentError("xz", f"{xz.shape[1]} channels", "an even number, twice the block's")
    channels, rank = xz.shape[1] // 2, delta_proj.shape[1]
    shapes = (
        ("conv1d_weight", conv, (channels, 1, conv.shape[2])),
        ("x_proj_weight", x_proj, (rank + 2 * _states(A), channels)),
        ("delta_proj_weight", delta_proj, (channels, rank)),
        ("out_proj_weight", out_proj, (out_proj.shape[0], channels)),
        ("A", A, (channels, A.shape[1])),
    )
    device = xz.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    for name, tensor, shape in shapes:
        if tensor.shape != shape:
            raise ArgumentError(name, f"shape {tuple(tensor.shape)}", shape)
        if name.endswith("proj_weight") and tensor.dtype is not xz.dtype and autocast is None:
            raise ArgumentTypeError(name, tensor.dtype, f"{xz.dtype}, as xz")
    return autocast or xz.dtype


def _check_vectors(*given: tuple[str, Tensor | None], size: int) -> None:
    for name, tensor in given:
        if tensor is not None and tensor.shape != (size,):
            raise ArgumentError(name, f"shape {tuple(tensor.shape)}", (size,))
