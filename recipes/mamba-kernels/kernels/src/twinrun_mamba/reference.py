"""The selective scan in plain torch: any device, float32 or float64, the meaning that kernels are held to.

h[t] = exp(dt[t] A) h[t-1] + dt[t] u[t] B[t],  y[t] = C[t].h[t] + D u[t],  out[t] = y[t] silu(z[t]),
dt = delta + delta_bias, through softplus if asked for. Sequences are (batch, channels, length), B and C
(batch, groups, states, length); other layouts are views that the caller makes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Steps whose states exist at the same time, and between two states that are kept; the kernels' number.
CHUNK = 32
Gradients = dict[str, Tensor]


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output and last state, by one step after the other, differentiable by autograd in every tensor.

    A may be complex: then C.h counts twice its real part, for the conjugate half that is not stored.
    """
    scan = _Scan.of(u, delta, A, B, C, delta_bias, seq_idx, softplus=softplus)
    state, y = _first_state(u, A, initial_state), []
    for t in range(u.shape[2]):
        now = slice(t, t + 1)
        state = scan.decays(now)[0] * scan.kept(state, t) + scan.entering(now)[0]
        y.append((scan.per_channel(scan.c, now)[0] * state).sum(-1))
    read = torch.stack(y, 2)
    return _gated(2 * read.real if read.is_complex() else read, u, D, z), state


def scan_forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    initial_state: Tensor | None,
    seq_idx: Tensor | None,
    *,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, last state and the states before every chunk (batch, channels, chunks, states)."""
    scan = _Scan.of(u, delta, A, B, C, delta_bias, seq_idx, softplus=softplus)
    state, read, checkpoints = _first_state(u, A, initial_state), [], []
    for chunk in _chunks(u.shape[2]):
        checkpoints.append(state)
        _, after = scan.states(chunk, scan.decays(chunk), state)
        read.append(torch.einsum("tbdn,tbdn->bdt", after, scan.per_channel(scan.c, chunk)))
        state = after[-1]
    return _gated(torch.cat(read, 2), u, D, z), state, torch.stack(checkpoints, 2)


def scan_backward(
    out_gradient: Tensor,
    last_gradient: Tensor | None,
    checkpoints: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    seq_idx: Tensor | None,
    *,
    softplus: bool,
) -> Gradients:
    """Return the gradients of `scan_forward`'s tensors by name, written by hand: autograd is off in an op."""
    scan = _Scan.of(u, delta, A, B, C, delta_bias, seq_idx, softplus=softplus)
    skip = torch.zeros((), dtype=scan.x.dtype, device=u.device) if D is None else D[:, None]
    gout = out_gradient.to(scan.x.dtype)
    gy = gout if z is None else gout * F.silu(z.to(gout.dtype))
    carry = torch.zeros_like(checkpoints[:, :, 0]) if last_gradient is None else last_gradient
    found: list[Gradients] = []
    for index, chunk in reversed(list(enumerate(_chunks(u.shape[2])))):
        part, carry = scan.chunk_gradients(chunk, checkpoints[:, :, index], carry, gy[..., chunk])
        found.insert(0, part)
    whole = {name: torch.cat([part[name] for part in found], -1) for name in ("u", "dt", "B", "C", "read")}
    gradients = {
        "u": (whole["u"] + gy * skip).to(u.dtype),
        "A": torch.stack([part["A"] for part in found]).sum(0),
        "B": whole["B"].to(B.dtype),
        "C": whole["C"].to(C.dtype),
        "initial_state": carry,
    }
    gdelta = whole["dt"] * scan.slope(delta, delta_bias) if softplus else whole["dt"]
    gradients["delta"] = gdelta.to(delta.dtype)
    if D is not None:
        gradients["D"] = (gy * scan.x).sum((0, 2))
    if delta_bias is not None:
        gradients["delta_bias"] = gdelta.sum((0, 2))
    if z is not None:
        gradients["z"] = (gout * (whole["read"] + scan.x * skip) * silu_slope(z.to(gout.dtype))).to(z.dtype)
    return gradients


@dataclass(frozen=True)
class _Scan:
    """A scan's inputs in the type it is computed in."""

    x: Tensor
    dt: Tensor
    A: Tensor
    b: Tensor
    c: Tensor
    # True where a step belongs to another sequence than the one before it, (batch, length).
    starts: Tensor | None

    @classmethod
    def of(
        cls,
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        delta_bias: Tensor | None,
        seq_idx: Tensor | None,
        *,
        softplus: bool,
    ) -> _Scan:
        kind = compute_type(u)
        dt = delta.to(kind) if delta_bias is None else delta.to(kind) + delta_bias[:, None]
        starts = None if seq_idx is None else F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        b, c = (t.to(torch.promote_types(kind, t.dtype)) for t in (B, C))
        # torch's softplus is the identity above 20, as upstream's is.
        return cls(u.to(kind), F.softplus(dt) if softplus else dt, A, b, c, starts)

    def decays(self, chunk: slice) -> Tensor:
        """Return exp(dt A), (steps, batch, channels, states)."""
        return torch.exp(self.dt[..., chunk].permute(2, 0, 1).unsqueeze(-1) * self.A)

    def entering(self, chunk: slice) -> Tensor:
        """Return dt u B, (steps, batch, channels, states)."""
        scaled = (self.dt[..., chunk] * self.x[..., chunk]).permute(2, 0, 1)
        return scaled.unsqueeze(-1) * self.per_channel(self.b, chunk)

    def per_channel(self, projection: Tensor, chunk: slice) -> Tensor:
        """Return B or C, (steps, batch, channels, states)."""
        times = projection[..., chunk].permute(3, 0, 1, 2)
        return times.repeat_interleave(self.x.shape[1] // times.shape[2], 2)

    def kept(self, state: Tensor, t: int) -> Tensor:
        """Return what of a state enters step `t`: nothing where a sequence starts, not even a NaN."""
        if self.starts is None or t == 0:
            return state
        return torch.where(self.starts[:, t, None, None], 0, state)

    def states(self, chunk: slice, decays: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states that enter each step of a chunk and those that leave it."""
        before, after = torch.empty_like(decays), self.entering(chunk)
        for step, t in enumerate(range(chunk.start, chunk.stop)):
            before[step] = self.kept(state, t)
            state = after[step].addcmul_(decays[step], before[step])
        return before, after

    def chunk_gradients(
        self, chunk: slice, state: Tensor, carry: Tensor, gy: Tensor
    ) -> tuple[Gradients, Tensor]:
        """Return a chunk's gradients and that of the state before it, from that of the state after it."""
        decays = self.decays(chunk)
        before, after = self.states(chunk, decays, state)
        c, b = self.per_channel(self.c, chunk), self.per_channel(self.b, chunk)
        gstate, gexponent = gy.permute(2, 0, 1).unsqueeze(-1) * c, torch.empty_like(decays)
        for step, t in reversed(list(enumerate(range(chunk.start, chunk.stop)))):
            gstate[step] += carry
            carry = self.kept(decays[step] * gstate[step], t)
            gexponent[step] = carry * before[step]
        gentering = (gstate * b).sum(-1).permute(1, 2, 0)
        x, dt = self.x[..., chunk], self.dt[..., chunk]
        return {
            "u": gentering * dt,
            "dt": gentering * x + torch.einsum("tbdn,dn->bdt", gexponent, self.A),
            "A": torch.einsum("tbdn,bdt->dn", gexponent, dt),
            "B": self._per_group(gstate * (x * dt).permute(2, 0, 1).unsqueeze(-1)),
            "C": self._per_group(after * gy.permute(2, 0, 1).unsqueeze(-1)),
            "read": torch.einsum("tbdn,tbdn->bdt", after, c),
        }, carry

    def _per_group(self, gradient: Tensor) -> Tensor:
        return gradient.unflatten(2, (self.b.shape[1], -1)).sum(3).permute(1, 2, 3, 0)

    @staticmethod
    def slope(delta: Tensor, delta_bias: Tensor | None) -> Tensor:
        """Return the derivative of the softplus that dt went through."""
        raw = delta.to(compute_type(delta))
        raw = raw if delta_bias is None else raw + delta_bias[:, None]
        return torch.where(raw > 20, 1, torch.sigmoid(raw))


def compute_type(tensor: Tensor) -> torch.dtype:
    """Return the type that sums are made in: float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(length: int) -> list[slice]:
    return [slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]


def _first_state(u: Tensor, A: Tensor, initial_state: Tensor | None) -> Tensor:
    kind = torch.promote_types(compute_type(u), A.dtype)
    if initial_state is not None:
        return initial_state.to(kind)
    return torch.zeros(u.shape[0], *A.shape, dtype=kind, device=u.device)


def _gated(read: Tensor, u: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    y = read if D is None else read + u.to(read.dtype) * D[:, None]
    return (y if z is None else y * F.silu(z.to(y.dtype))).to(u.dtype)


def silu_slope(x: Tensor) -> Tensor:
    """Return the derivative of x sigmoid(x)."""
    return torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))
