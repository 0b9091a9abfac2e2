"""A wrong argument is named, with what was found and what is allowed, before anything is launched."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import EMULATED_BACKENDS, SCAN_OPTIONS, ConvCase, ScanCase
from test_ops import inner
from torch import tensor, zeros
from twinrun_mamba import (
    ArgumentError,
    ArgumentTypeError,
    causal_conv1d_fn,
    causal_conv1d_update,
    index_of,
    mamba_inner_fn,
    selective_scan_fn,
    selective_state_update,
)

SCAN = ScanCase(torch.bfloat16, 2, 6, 10, 4, 2, SCAN_OPTIONS - {"seq_idx"})
CONV = ConvCase(torch.bfloat16, 2, 6, 10, 4)
INT32 = torch.int32
half = partial(zeros, dtype=torch.bfloat16)
whole = partial(zeros, dtype=INT32)
EMULATED = {"backend": EMULATED_BACKENDS[0]}


STEP = {"x": (2, 6), "dt": (2, 6), "A": (6, 4), "B": (2, 4), "C": (2, 4), "state": (2, 6, 4)}
UPDATE = {"x": zeros(2, 6), "conv_state": zeros(2, 6, 4), "weight": zeros(6, 4)}
ROW = {"x": zeros(1, 6, 10), "weight": zeros(6, 4)}


# A function with right arguments, and what of them is refused: the argument, its value, what is said.
Wrong = tuple[tuple[str, Any, str], ...]
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Wrong]] = {
    "scan": (
        selective_scan_fn,
        lambda: SCAN.inputs(torch.Generator()) | EMULATED,
        (
            ("u", zeros(2, 6), "found 2 dimensions (2, 6), allowed 3 dimensions"),
            ("u", 3.0, "found float, allowed a tensor"),
            ("u", whole(2, 6, 10), "found torch.int32, allowed torch.bfloat16"),
            ("u", zeros(2, 6, 10, dtype=torch.float64), "torch.float64 with backend"),
            ("u", half(0, 6, 10), "found shape (0, 6, 10), allowed (batch, channels, length)"),
            ("delta", zeros(2, 6, 10), "found torch.float32, allowed torch.bfloat16"),
            ("delta", half(2, 6, 10, device="meta"), "found a tensor on meta, allowed cpu"),
            ("A", zeros(5, 4), "found shape (5, 4), allowed (channels, states) = (6, 4)"),
            ("A", zeros(6, 257), "found 257 states, allowed 1 to 256"),
            ("A", zeros(6, 4, dtype=torch.complex64), 'allowed a real dtype, or backend="reference"'),
            ("B", half(2, 4, 4, 10), "found 4 groups, allowed a divisor of the 6 channels"),
            ("B", zeros(6, 4), 'allowed B and C that vary over time, or backend="reference"'),
            ("C", half(2, 3, 4, 10), "(batch, groups, states, length) = (2, 2, 4, 10)"),
            ("D", zeros(5), "found shape (5,), allowed (channels) = (6,)"),
            ("delta_bias", zeros(6, 1), "found 2 dimensions (6, 1), allowed 1 dimensions"),
            ("initial_state", zeros(2, 6, 5), "(batch, channels, states) = (2, 6, 4)"),
            ("seq_idx", whole(2, 9), "found shape (2, 9), allowed (batch, length) = (2, 10)"),
            ("seq_idx", zeros(2, 10), "found torch.float32, allowed torch.int32 or torch.int64"),
            ("seq_idx", tensor([[0] * 5 + [2] * 2 + [1] * 3] * 2), "found values that decrease along a row"),
            ("seq_idx", tensor([[-1] * 5 + [0] * 5] * 2), "found a negative value, allowed 0 or more"),
            ("cu_seqlens", tensor([0, 10]), "found batch 2, allowed batch 1"),
            ("layout", "bdl", "found 'bdl', allowed 'channel-first', 'token-major'"),
            ("backend", "cuda", "found 'cuda', allowed 'native', 'ptx', 'reference', 'emulated-32', 'emul"),
            ("backend", "native", "found native for tensors on cpu"),
        ),
    ),
    "convolution": (
        causal_conv1d_fn,
        lambda: CONV.inputs(torch.Generator()) | EMULATED,
        (
            ("x", zeros(2, 6, 0), "of 1 or more each"),
            ("weight", zeros(5, 4), "found shape (5, 4), allowed (channels, width) = (6, 4)"),
            ("weight", zeros(6, 9), "found width 9, allowed 2 to 8"),
            ("initial_states", half(2, 6, 4), "(batch, channels, width - 1) = (2, 6, 3)"),
            ("activation", "relu", "found 'relu', allowed None, 'silu', 'swish'"),
            ("final_states_out", half(2, 6, 4), "(batch, channels, width - 1) = (2, 6, 3)"),
        ),
    ),
    "packed": (
        causal_conv1d_fn,
        lambda: ROW,
        (
            ("cu_seqlens", tensor([0, 6, 4, 10]), "found length -2 for sequence 1, allowed 0 or more"),
            ("cu_seqlens", tensor([0, 6]), "found 0 to 6, allowed 0 to the length 10"),
            ("cu_seqlens", tensor([1, 10]), "found 1 to 10, allowed 0 to the length 10"),
            ("cu_seqlens", tensor([10]), "found 1 boundaries, allowed 2 or more"),
        ),
    ),
    "update": (
        causal_conv1d_update,
        lambda: UPDATE,
        (
            ("x", zeros(6), "found 1 dimensions (6,), allowed 2 or 3 dimensions"),
            ("conv_state", zeros(2, 6, 2), "found 2 inputs, allowed 3 or more"),
            ("conv_state", zeros(1, 6, 4).expand(2, 6, 4), "memory of its own for each element"),
            ("conv_state", zeros(2, 6, 4, dtype=torch.float16), "found torch.float16, allowed torch.float32"),
            ("cache_seqlens", zeros(2, dtype=torch.int64), "found torch.int64, allowed torch.int32"),
            ("cache_seqlens", tensor([3, -1], dtype=INT32), "found -1, allowed 0 or more"),
            ("conv_state_indices", tensor([0, 2], dtype=INT32), "found 2, allowed less than the 2 states"),
            ("conv_state_indices", tensor([1, 1], dtype=INT32), "found a state given twice"),
        ),
    ),
    "step": (
        selective_state_update,
        lambda: {name: zeros(shape) for name, shape in STEP.items()} | EMULATED,
        (
            ("state", zeros(2, 6, 5), "found shape (2, 6, 5), allowed (batch, channels, states) = (2, 6, 4)"),
            ("state", zeros(1, 6, 4).expand(2, 6, 4), "memory of its own for each element"),
            ("x", whole(2, 6), "found torch.int32, allowed torch.bfloat16"),
            ("dt", zeros(2, 5), "found shape (2, 5), allowed (batch, channels) = (2, 6)"),
            ("A", zeros(6, 4, dtype=torch.complex64), "found torch.complex64, allowed a real dtype"),
            ("D", zeros(6, device="meta"), "found a tensor on meta, allowed cpu"),
        ),
    ),
    "block": (
        mamba_inner_fn,
        lambda: inner(torch.Generator()),
        (
            ("xz", zeros(2, 11, 11), "found 11 channels, allowed an even number"),
            ("x_proj_weight", zeros(9, 6), "allowed (8, 6)"),
            ("delta_proj_weight", zeros(5, 2), "allowed (6, 2)"),
            ("out_proj_weight", zeros(5, 7), "allowed (5, 6)"),
            ("conv1d_weight", zeros(6, 4), "allowed 3 dimensions"),
            ("out_proj_weight", zeros(5, 6, dtype=torch.float16), "allowed torch.float64, as xz"),
            ("checkpoint_lvl", 2, "allowed 0, 1"),
            ("dt_rms_weight", zeros(2), "allowed (6,)"),
        ),
    ),
}
ROWS = [(kind, *each) for kind, (*_, wrong) in REFUSED.items() for each in wrong]


@pytest.mark.parametrize(("kind", "name", "value", "message"), ROWS)
def test_what_is_refused(kind: str, name: str, value: Any, message: str) -> None:
    function, arguments, _ = REFUSED[kind]
    with pytest.raises(ArgumentError, match=rf"^{name}: .*{re.escape(message)}") as caught:
        function(**arguments() | {name: value})
    assert caught.value.argument == name


def test_kinds_of_errors() -> None:
    with pytest.raises(TypeError):
        selective_scan_fn(**SCAN.inputs(torch.Generator()) | {"delta": zeros(2, 6, 10)})
    assert issubclass(ArgumentTypeError, ValueError)


def test_boundaries() -> None:
    with pytest.raises(ArgumentError, match=r"^cu_seqlens: found both"):
        causal_conv1d_fn(**ROW, seq_idx=whole(1, 10), cu_seqlens=tensor([0, 10]))
    assert index_of(tensor([0, 2, 2, 5]), 5, "cpu").tolist() == [[0, 0, 2, 2, 2]]
