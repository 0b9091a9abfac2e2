"""A wrong argument is named, with what was found and what is allowed, before anything is launched."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import EMULATED_BACKENDS, SCAN_OPTIONS, ConvCase, ScanCase
from test_ops import inner
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

WRONG_SCANS: tuple[tuple[str, Any, str], ...] = (
    ("u", torch.zeros(2, 6), "found 2 dimensions (2, 6), allowed 3 dimensions"),
    ("u", 3.0, "found float, allowed a tensor"),
    ("u", torch.zeros(2, 6, 10, dtype=torch.int32), "found torch.int32, allowed torch.bfloat16"),
    ("u", torch.zeros(2, 6, 10, dtype=torch.float64), "torch.float64 with backend"),
    (
        "u",
        torch.zeros(0, 6, 10, dtype=torch.bfloat16),
        "found shape (0, 6, 10), allowed (batch, channels, length)",
    ),
    ("delta", torch.zeros(2, 6, 10), "found torch.float32, allowed torch.bfloat16"),
    (
        "delta",
        torch.zeros(2, 6, 10, dtype=torch.bfloat16, device="meta"),
        "found a tensor on meta, allowed cpu",
    ),
    ("A", torch.zeros(5, 4), "found shape (5, 4), allowed (channels, states) = (6, 4)"),
    ("A", torch.zeros(6, 257), "found 257 states, allowed 1 to 256"),
    ("A", torch.zeros(6, 4, dtype=torch.complex64), 'allowed a real dtype, or backend="reference"'),
    (
        "B",
        torch.zeros(2, 4, 4, 10, dtype=torch.bfloat16),
        "found 4 groups, allowed a divisor of the 6 channels",
    ),
    ("B", torch.zeros(6, 4), 'allowed B and C that vary over time, or backend="reference"'),
    ("C", torch.zeros(2, 3, 4, 10, dtype=torch.bfloat16), "(batch, groups, states, length) = (2, 2, 4, 10)"),
    ("D", torch.zeros(5), "found shape (5,), allowed (channels) = (6,)"),
    ("delta_bias", torch.zeros(6, 1), "found 2 dimensions (6, 1), allowed 1 dimensions"),
    ("initial_state", torch.zeros(2, 6, 5), "(batch, channels, states) = (2, 6, 4)"),
    ("seq_idx", torch.zeros(2, 9, dtype=INT32), "found shape (2, 9), allowed (batch, length) = (2, 10)"),
    ("seq_idx", torch.zeros(2, 10), "found torch.float32, allowed torch.int32 or torch.int64"),
    ("seq_idx", torch.tensor([[0] * 5 + [2] * 2 + [1] * 3] * 2), "found values that decrease along a row"),
    ("seq_idx", torch.tensor([[-1] * 5 + [0] * 5] * 2), "found a negative value, allowed 0 or more"),
    ("cu_seqlens", torch.tensor([0, 10]), "found batch 2, allowed batch 1"),
    ("layout", "bdl", "found 'bdl', allowed 'channel-first', 'token-major'"),
    ("backend", "cuda", "found 'cuda', allowed 'native', 'ptx', 'reference', 'emulated-32', 'emulated-64'"),
    ("backend", "native", "found native for tensors on cpu"),
)

WRONG_CONVOLUTIONS: tuple[tuple[str, Any, str], ...] = (
    ("x", torch.zeros(6, 10), "found 2 dimensions (6, 10)"),
    ("x", torch.zeros(2, 6, 0), "of 1 or more each"),
    ("weight", torch.zeros(5, 4), "found shape (5, 4), allowed (channels, width) = (6, 4)"),
    ("weight", torch.zeros(6, 9), "found width 9, allowed 2 to 8"),
    (
        "initial_states",
        torch.zeros(2, 6, 4, dtype=torch.bfloat16),
        "(batch, channels, width - 1) = (2, 6, 3)",
    ),
    ("seq_idx", torch.zeros(1, 10, dtype=INT32), "found shape (1, 10)"),
    ("activation", "relu", "found 'relu', allowed None, 'silu', 'swish'"),
    (
        "final_states_out",
        torch.zeros(2, 6, 4, dtype=torch.bfloat16),
        "(batch, channels, width - 1) = (2, 6, 3)",
    ),
)

WRONG_UPDATES: tuple[tuple[str, Any, str], ...] = (
    ("x", torch.zeros(6), "found 1 dimensions (6,), allowed 2 or 3 dimensions"),
    ("conv_state", torch.zeros(2, 6, 2), "found 2 inputs, allowed 3 or more"),
    ("conv_state", torch.zeros(1, 6, 4).expand(2, 6, 4), "memory of its own for each element"),
    ("conv_state", torch.zeros(2, 6, 4, dtype=torch.float16), "found torch.float16, allowed torch.float32"),
    ("cache_seqlens", torch.zeros(2, dtype=torch.int64), "found torch.int64, allowed torch.int32"),
    ("cache_seqlens", torch.tensor([3, -1], dtype=INT32), "found -1, allowed 0 or more"),
    ("conv_state_indices", torch.tensor([0, 2], dtype=INT32), "found 2, allowed less than the 2 states"),
    ("conv_state_indices", torch.tensor([1, 1], dtype=INT32), "found a state given twice"),
)

WRONG_STATE_UPDATES: tuple[tuple[str, Any, str], ...] = (
    ("state", torch.zeros(2, 6, 5), "found shape (2, 6, 5), allowed (batch, channels, states) = (2, 6, 4)"),
    ("state", torch.zeros(1, 6, 4).expand(2, 6, 4), "memory of its own for each element"),
    ("x", torch.zeros(2, 6, dtype=torch.int32), "found torch.int32, allowed torch.bfloat16"),
    ("dt", torch.zeros(2, 5), "found shape (2, 5), allowed (batch, channels) = (2, 6)"),
    ("A", torch.zeros(5, 4), "found shape (5, 4), allowed (channels, states) = (6, 4)"),
    ("A", torch.zeros(6, 4, dtype=torch.complex64), "found torch.complex64, allowed a real dtype"),
    ("B", torch.zeros(2, 4, 4), "found 4 groups, allowed a divisor of the 6 channels"),
    ("D", torch.zeros(6, device="meta"), "found a tensor on meta, allowed cpu"),
)


@pytest.mark.parametrize(("name", "value", "message"), WRONG_SCANS)
@pytest.mark.parametrize("backend", EMULATED_BACKENDS[:1])
def test_wrong_scans(name: str, value: Any, message: str, backend: str) -> None:
    arguments = SCAN.inputs(torch.Generator()) | {"backend": backend, name: value}
    with pytest.raises(ArgumentError, match=rf"^{name}: .*{re.escape(message)}") as caught:
        selective_scan_fn(**arguments)
    assert caught.value.argument == name


@pytest.mark.parametrize(("name", "value", "message"), WRONG_CONVOLUTIONS)
def test_wrong_convolutions(name: str, value: Any, message: str) -> None:
    arguments = CONV.inputs(torch.Generator()) | {"backend": EMULATED_BACKENDS[0], name: value}
    with pytest.raises(ArgumentError, match=rf"^{name}: .*{re.escape(message)}"):
        causal_conv1d_fn(**arguments)


@pytest.mark.parametrize(("name", "value", "message"), WRONG_UPDATES)
@pytest.mark.parametrize("backend", ["reference", EMULATED_BACKENDS[0]])
def test_wrong_updates(name: str, value: Any, message: str, backend: str) -> None:
    arguments = {"x": torch.zeros(2, 6), "conv_state": torch.zeros(2, 6, 4), "weight": torch.zeros(6, 4)}
    with pytest.raises(ArgumentError, match=rf"^{name}: .*{re.escape(message)}"):
        causal_conv1d_update(**arguments | {"backend": backend, name: value})


@pytest.mark.parametrize(("name", "value", "message"), WRONG_STATE_UPDATES)
@pytest.mark.parametrize("backend", ["reference", EMULATED_BACKENDS[0]])
def test_wrong_state_updates(name: str, value: Any, message: str, backend: str) -> None:
    step, projection = torch.zeros(2, 6), torch.zeros(2, 4)
    arguments = {"state": torch.zeros(2, 6, 4), "x": step, "dt": step, "A": torch.zeros(6, 4)}
    arguments |= {"B": projection, "C": projection if name != "B" else value, "backend": backend}
    with pytest.raises(ArgumentError, match=rf"^{name}: .*{re.escape(message)}"):
        selective_state_update(**arguments | {name: value})


def test_kinds_of_errors() -> None:
    with pytest.raises(TypeError):
        selective_scan_fn(**SCAN.inputs(torch.Generator()) | {"delta": torch.zeros(2, 6, 10)})
    assert issubclass(ArgumentTypeError, ValueError)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 6, 4, 10], "found length -2 for sequence 1, allowed 0 or more"),
        ([0, 6], "found 0 to 6, allowed 0 to the length 10"),
        ([1, 10], "found 1 to 10, allowed 0 to the length 10"),
        ([10], "found 1 boundaries, allowed 2 or more"),
    ],
)
def test_wrong_boundaries(boundaries: list[int], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^cu_seqlens: {message}"):
        index_of(torch.tensor(boundaries), 10, "cpu")


def test_index_of_boundaries() -> None:
    assert index_of(torch.tensor([0, 2, 2, 5]), 5, "cpu").tolist() == [[0, 0, 2, 2, 2]]


def test_both_kinds_of_packing() -> None:
    x, weight = torch.zeros(1, 2, 5), torch.zeros(2, 3)
    with pytest.raises(ArgumentError, match=r"^cu_seqlens: found both"):
        causal_conv1d_fn(x, weight, None, torch.zeros(1, 5, dtype=INT32), cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("xz", torch.zeros(2, 11, 11), "found 11 channels, allowed an even number"),
        ("x_proj_weight", torch.zeros(9, 6), r"allowed \(8, 6\)"),
        ("delta_proj_weight", torch.zeros(5, 2), r"allowed \(6, 2\)"),
        ("out_proj_weight", torch.zeros(5, 7), r"allowed \(5, 6\)"),
        ("conv1d_weight", torch.zeros(6, 4), "allowed 3 dimensions"),
        ("out_proj_weight", torch.zeros(5, 6, dtype=torch.float16), "allowed torch.float64, as xz"),
        ("checkpoint_lvl", 2, "allowed 0, 1"),
        ("dt_rms_weight", torch.zeros(2), r"allowed \(6,\)"),
    ],
)
def test_wrong_blocks(name: str, value: Any, message: str) -> None:
    arguments = inner(torch.Generator()) | {name: value}
    with pytest.raises(ArgumentError, match=f"^{name}: .*{message}"):
        mamba_inner_fn(**arguments)
