"""Mamba-2's layer behind its first projection: convolution, SSD, gated norm, last projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from twinrun_mamba.conv import causal_conv1d_fn
from twinrun_mamba.ssd.api import NO_LIMIT, mamba_chunk_scan_combined
from twinrun_mamba.validation import ArgumentError, ranks

REQUIRED = ("zxbcdt", "conv1d_weight", "dt_bias", "A", "D")
RANKS = ((3,), (2,), (1,), (1,), (1, 2))


@dataclass(frozen=True)
class Widths:
    """How the columns of a layer are divided."""

    heads: int
    size: int
    groups: int
    states: int
    outer: int
    """Columns that pass by the scan, gated by as many."""

    @classmethod
    def of(cls, zxbcdt: Tensor, conv1d_weight: Tensor, D: Tensor, headdim: int | None, groups: int) -> Widths:
        """Return the widths that fit these tensors."""
        heads, size = _heads(D, headdim)
        inner, channels = heads * size, conv1d_weight.shape[0]
        if groups < 1 or heads % groups:
            raise ArgumentError("ngroups", f"{groups} for {heads} heads", "a divisor of heads")
        states, left = divmod(channels - inner, 2 * groups)
        if states < 1 or left:
            allowed = f"inner {inner} and a multiple of 2 * {groups} groups"
            raise ArgumentError("conv1d_weight", f"{channels} channels", allowed)
        outer, odd = divmod(zxbcdt.shape[-1] - inner - channels - heads, 2)
        if outer < 0 or odd:
            allowed = f"inner {inner}, {channels} for the convolution, {heads} heads, and an even number more"
            raise ArgumentError("zxbcdt", f"{zxbcdt.shape[-1]} columns", allowed)
        return cls(heads, size, groups, states, outer)

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.size

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """What passes by, z, what the convolution takes, and dt."""
        return 2 * self.outer, self.inner, self.inner + 2 * self.groups * self.states, self.heads

    def projections(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x, B and C of (batch, channels, length)."""
        projection = self.groups * self.states
        x, B, C = mixed.transpose(1, 2).split([self.inner, projection, projection], dim=-1)
        group = self.groups, self.states
        return x.unflatten(-1, (self.heads, self.size)), B.unflatten(-1, group), C.unflatten(-1, group)

    def check(self, norm: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> None:
        """Raise unless the norm and the last projection fit."""
        _shape("rmsnorm_weight", norm, (self.inner,), "(inner)")
        if weight is None:
            if bias is not None:
                raise ArgumentError("outproj_bias", "a tensor without outproj_weight", "None")
            return
        _shape("outproj_weight", weight, (len(weight), self.outer + self.inner), "(outputs, outer + inner)")
        _shape("outproj_bias", bias, (len(weight),), "(outputs)")


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Return the layer's output, and the state after the last step when `return_final_states`.

    Positional arguments are upstream's. All tensors have gradients; every bit of the kernels repeats. The
    norm and the last projection are torch's operations, and nothing is computed again in the backward pass.

    zxbcdt: (batch, length, 2 outer + 2 inner + 2 groups states + heads), inner = heads times head size: a
        gated part that no scan sees, z, what the convolution takes, and dt.
    conv1d_weight: (inner + 2 groups states, width). D: (heads) with headdim, or (heads, head size).
    rmsnorm_weight: (inner), a norm in as many groups as B has; None: z gates the scan itself.
    outproj_weight: (outputs, outer + inner); None: the output is (batch, length, outer + inner).
    All others are as in mamba_chunk_scan_combined, with softplus.
    Raises ArgumentError, a ValueError, that names the argument.
    """
    ranks(*zip(REQUIRED, (zxbcdt, conv1d_weight, dt_bias, A, D), RANKS), required=len(REQUIRED))
    widths = Widths.of(zxbcdt, conv1d_weight, D, headdim, ngroups)
    widths.check(rmsnorm_weight, outproj_weight, outproj_bias)
    gated, z, mixed, dt = zxbcdt.split(widths.columns, dim=-1)
    x, B, C = widths.projections(
        causal_conv1d_fn(
            mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation
        )
    )
    out, final = mamba_chunk_scan_combined(
        *(x, dt, A, B, C, chunk_size, D),
        z=z.unflatten(-1, x.shape[2:]) if rmsnorm_weight is None else None,
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        state_dtype=state_dtype,
    )
    out = out.flatten(2)
    if rmsnorm_weight is not None:
        out = gated_norm(out, z, rmsnorm_weight, rmsnorm_eps, ngroups, before_gate=norm_before_gate)
    out = _projected(out, gated, outproj_weight, outproj_bias)
    return (out, final) if return_final_states else out


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float, groups: int, *, before_gate: bool) -> Tensor:
    """Return the norm by root mean square of each group, gated by silu of z before or after it."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide, gate = x.to(kind), silu(z.to(kind))
    grouped = (wide if before_gate else wide * gate).unflatten(-1, (groups, -1))
    scaled = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    out = scaled.flatten(-2) * weight.to(kind)
    return (out * gate if before_gate else out).to(x.dtype)


def _projected(out: Tensor, gated: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the output beside what passes by, and what the last projection makes of them."""
    if gated.shape[-1]:
        gate, value = gated.chunk(2, dim=-1)
        out = torch.cat([silu(gate) * value, out], dim=-1)
    return out if weight is None else linear(out, weight, bias)


def _shape(name: str, tensor: Tensor | None, shape: tuple[int, ...], dims: str) -> None:
    if tensor is not None and tensor.shape != shape:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{dims} = {shape}")


def _heads(D: Tensor, headdim: int | None) -> tuple[int, int]:
    """Return heads and head size."""
    if D.dim() == 2:
        heads, size = D.shape
        if headdim not in (None, size):
            raise ArgumentError("headdim", headdim, f"None or {size}, the columns of D")
        return heads, size
    if headdim is None or headdim < 1:
        raise ArgumentError("headdim", headdim, "1 or more where D is (heads)")
    return len(D), headdim
