"""The causal convolution in plain torch: y[t] = bias + sum of weight[k] x[t - width + 1 + k], then silu.

x is (batch, channels, length), weight (channels, width); before time 0 lies initial_states (batch, channels,
width - 1), or zeros. An input counts only for outputs of its own sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twinrun_mamba.reference import compute_type, silu_slope


def conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    silu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return output and last inputs (batch, channels, width - 1), differentiable by autograd.

    The last inputs are zero where they belong to another sequence than the last step.
    """
    conv = _Conv.of(x, weight, initial_states, seq_idx)
    y = conv.result(weight, bias)
    return (F.silu(y) if silu else y).to(x.dtype), conv.last().to(x.dtype)


def conv_backward(
    out_gradient: Tensor,
    last_gradient: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    *,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and initial_states, written out by hand."""
    conv = _Conv.of(x, weight, initial_states, seq_idx)
    gy = out_gradient.to(conv.inputs.dtype)
    if silu:
        gy = gy * silu_slope(conv.result(weight, bias))
    width, length = weight.shape[1], x.shape[2]
    ginputs, gweight = torch.zeros_like(conv.inputs), []
    for k in range(width):
        gweight.append((gy * conv.seen(k)).sum((0, 2)))
        ginputs[..., k : k + length] += conv.masked(gy * weight[:, k, None], k)
    if last_gradient is not None and width > 1:
        ginputs[..., length:] += conv.masked_last(last_gradient.to(gy.dtype))
    ginitial, gx = ginputs.split([width - 1, length], -1)
    return gx.to(x.dtype), torch.stack(gweight, 1), gy.sum((0, 2)), ginitial.to(x.dtype)


def conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    *,
    silu: bool,
) -> Tensor:
    """Return the output of more steps (batch, channels, steps) and bring `conv_state` up to date in place.

    The state (states, channels, state_length) keeps the newest inputs last; with cache_seqlens, the steps
    so far, that of time t at t % state_length. conv_state_indices says which state is whose, negative:
    nobody's.
    """
    batch, _, steps = x.shape
    width, kept = weight.shape[1], conv_state.shape[2]
    rows = torch.arange(batch, device=x.device) if conv_state_indices is None else conv_state_indices.long()
    here = rows >= 0
    state = conv_state[rows.clamp(min=0)]
    past = torch.zeros_like(rows) if cache_seqlens is None else cache_seqlens.long()
    if cache_seqlens is not None:
        # From here on the oldest comes first, as in the other form.
        order = (past[:, None] + torch.arange(kept, device=x.device)) % kept
        state = state.gather(2, order[:, None].expand_as(state))
    inputs = torch.cat((state, x), 2)
    y = conv_forward(inputs[..., kept - width + 1 :], weight, bias, silu=silu)[0][..., width - 1 :]
    newest = inputs[..., steps:]
    if cache_seqlens is not None:
        newest = torch.empty_like(newest).scatter_(
            2, ((order + steps) % kept)[:, None].expand_as(newest), newest
        )
    conv_state[rows[here]] = newest[here]
    return torch.where(here[:, None, None], y, 0)


@dataclass(frozen=True)
class _Conv:
    # All inputs from time 1 - width on, and the number of the sequence that each belongs to.
    inputs: Tensor
    number: Tensor | None
    width: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, initial_states: Tensor | None, seq_idx: Tensor | None) -> _Conv:
        kind, width = compute_type(x), weight.shape[1]
        if initial_states is None:
            inputs = F.pad(x.to(kind), (width - 1, 0))
        else:
            inputs = torch.cat((initial_states.to(kind), x.to(kind)), 2)
        number = None if seq_idx is None else (seq_idx[:, 1:] != seq_idx[:, :-1]).cumsum(1)
        return cls(inputs, None if number is None else F.pad(number, (width, 0)), width)

    @property
    def length(self) -> int:
        return int(self.inputs.shape[2]) - self.width + 1

    def seen(self, k: int) -> Tensor:
        """Return what tap `k` sees at every step."""
        return self.masked(self.inputs[..., k : k + self.length], k)

    def masked(self, values: Tensor, k: int) -> Tensor:
        """Return values of steps, zero where tap `k` reaches into another sequence, which may hold NaN."""
        if self.number is None:
            return values
        same = self.number[:, k : k + self.length] == self.number[:, self.width - 1 :]
        return torch.where(same[:, None], values, 0)

    def masked_last(self, values: Tensor) -> Tensor:
        """Return values of the last inputs, zero where they belong to another sequence than the last step."""
        if self.number is None:
            return values
        same = self.number[:, self.length :] == self.number[:, -1:]
        return torch.where(same[:, None], values, 0)

    def result(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = sum(weight[:, k, None] * self.seen(k) for k in range(self.width))
        return y if bias is None else y + bias[:, None]

    def last(self) -> Tensor:
        return self.masked_last(self.inputs[..., self.length :])
