"""The causal convolution: upstream's functions, and the operations that run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba import conv_kernels, reference_conv, validation
from twinrun_mamba.launch import launcher
from twinrun_mamba.layout import LAYOUTS, cast, channel_first, copied_into, is_time_adjacent, new_sequence
from twinrun_mamba.ops import operators, saving
from twinrun_mamba.packing import check_rows, sequence_index
from twinrun_mamba.reference import compute_type

ACTIVATIONS = (None, "silu", "swish")
Tensors = tuple[Tensor, ...]
_SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_states, Tensor? seq_idx, bool silu"


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    layout: str = "channel-first",
    backend: str | None = None,
) -> Any:
    """Return the causal convolution of each channel, and with it the last inputs when `return_final_states`.

    Positional arguments are upstream's. All tensors have gradients, the last inputs too; every bit repeats.

    x: (batch, channels, length), or (batch, length, channels) when layout is "token-major"; bf16, fp16 or
        fp32 (float64 with backend="reference"). What is adjacent in memory along neither is copied.
    weight: (channels, width) with width 2 to 8. bias: (channels). activation: None, "silu" or "swish".
    seq_idx, cu_seqlens, layout, backend: as in selective_scan_fn; no output sees another sequence's inputs.
    initial_states: (batch, channels, width - 1) in x's dtype, inputs before the first sequence of each row.
    final_states_out: memory for the last inputs, (batch, channels, width - 1); zero where an input belongs to
        another sequence than the last step.
    Raises ArgumentError, a ValueError, that names the argument.
    """
    given = (("x", x, (3,)), ("weight", weight, (2,)), ("bias", bias, (1,)))
    validation.ranks(*given, ("initial_states", initial_states, (3,)), required=2)
    validation.one_of("activation", activation, ACTIVATIONS)
    validation.one_of("layout", layout, LAYOUTS)
    x = channel_first(x, layout)
    index, kind = sequence_index(seq_idx, cu_seqlens, x), compute_type(x)
    shape, dims = (*x.shape[:2], weight.shape[1] - 1), ("batch", "channels", "width - 1")
    validation.like("final_states_out", final_states_out, x.dtype, x.device, shape, dims)
    keep = return_final_states or final_states_out is not None
    inputs = (x, cast(weight, kind), cast(bias, kind), initial_states, index)
    out, last = conv_forward(*inputs, activation is not None, keep, backend or "")
    if final_states_out is not None:
        last = final_states_out.copy_(last)
    out = channel_first(out, layout)
    return (out, last) if return_final_states else out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Return the output of more steps, without gradient, and bring `conv_state` up to date in place.

    x: (batch, channels) or (batch, channels, steps).
    conv_state: (states, channels, state_length) with state_length of width - 1 or more, x's dtype: the newest
        inputs last; with cache_seqlens (batch), the int32 numbers of steps so far, a ring in which time t is
        at t % state_length.
    conv_state_indices: (batch), int32, which state is whose; negative: nobody's, and the output is zero.
    """
    given = (
        ("x", x, (2, 3)),
        ("conv_state", conv_state, (3,)),
        ("weight", weight, (2,)),
        ("bias", bias, (1,)),
    )
    optional = (("cache_seqlens", cache_seqlens, (1,)), ("conv_state_indices", conv_state_indices, (1,)))
    validation.ranks(*given, *optional, required=3)
    validation.one_of("activation", activation, ACTIVATIONS)
    check_rows(cache_seqlens, conv_state_indices, conv_state.shape[0])
    steps = x.unsqueeze(-1) if x.dim() == 2 else x
    kind = compute_type(x)
    rest = (cache_seqlens, conv_state_indices, activation is not None, backend or "")
    out: Tensor = conv_update(steps, conv_state, cast(weight, kind), cast(bias, kind), *rest)
    return out.squeeze(-1) if x.dim() == 2 else out


def _forward(*arguments: Any) -> Tensors:
    *inputs, silu, last, backend = arguments
    launch = launcher(backend, inputs[0].device)
    validation.conv(*inputs, native=launch is not None)
    if launch is not None:
        return conv_kernels.forward(launch, tuple(inputs), silu=silu, last=last)
    out, states = reference_conv.conv_forward(*inputs, silu=silu)
    return copied_into(_fake_forward(*arguments), (out, states if last else None))


def _fake_forward(*arguments: Any) -> Tensors:
    x, weight, *_, last, _ = arguments
    batch, channels, _ = x.shape
    shape = (batch, channels, weight.shape[1] - 1) if last else (0,)
    return new_sequence(x, is_time_adjacent(x)), x.new_empty(shape)


def _backward(*arguments: Any) -> Tensors:
    out_gradient, last_gradient, *inputs, silu, backend = arguments
    x = inputs[0]
    launch = launcher(backend, x.device)
    validation.conv(*inputs, native=launch is not None)
    validation.like("gradient of out", out_gradient, x.dtype, x.device, x.shape, validation.SEQUENCE)
    gradients = (out_gradient, last_gradient)
    if launch is not None:
        found: Sequence[Tensor | None] = conv_kernels.backward(launch, *gradients, tuple(inputs), silu=silu)
        return tuple(x.new_empty(0) if t is None else t for t in found)
    found = reference_conv.conv_backward(*gradients, *inputs, silu=silu)
    return copied_into(_fake_backward(*arguments), (*found[:3], None if inputs[3] is None else found[3]))


def _fake_backward(*arguments: Any) -> Tensors:
    x, weight, _, initial_states = arguments[2:6]
    kind = compute_type(x)
    gweight, gbias = (x.new_empty(shape, dtype=kind) for shape in (weight.shape, (weight.shape[0],)))
    shape = (0,) if initial_states is None else tuple(initial_states.shape)
    return new_sequence(x, is_time_adjacent(x)), gweight, gbias, x.new_empty(shape)


def _update(*arguments: Any) -> Tensor:
    *inputs, silu, backend = arguments
    launch = launcher(backend, inputs[0].device)
    validation.conv_update(*inputs, native=launch is not None)
    if launch is not None:
        return conv_kernels.update(launch, *inputs, silu=silu)
    with torch.no_grad():
        out = reference_conv.conv_update(*inputs, silu=silu)
        return copied_into((_fake_update(*arguments),), (out,))[0]


def _fake_update(*arguments: Any) -> Tensor:
    x = arguments[0]
    return new_sequence(x, is_time_adjacent(x))


conv_backward = operators.define(
    f"conv_backward(Tensor out_gradient, Tensor? last_gradient, {_SCHEMA}, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
conv_forward = operators.differentiable(
    f"conv_forward({_SCHEMA}, bool last, str backend) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
    *saving(conv_backward, last_on_demand=True),
)
conv_update = operators.define(
    "conv_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, "
    "Tensor? conv_state_indices, bool silu, str backend) -> Tensor",
    _update,
    _fake_update,
)
