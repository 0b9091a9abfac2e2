"""Mamba-2's layer and its single step against plain torch in float64, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu
from twinrun_mamba import ArgumentError, mamba_split_conv1d_scan_combined
from twinrun_mamba.ssd import selective_state_update
from twinrun_mamba.ssd.reference import reference_chunk_scan

LENGTH, HEADS, SIZE, GROUPS, STATES, WIDTH = 21, 4, 8, 2, 16, 4
INNER = HEADS * SIZE
CHANNELS = INNER + 2 * GROUPS * STATES


def layer(*, outer: int = 0, norm: bool = True, columns: bool = False, out: bool = True) -> dict[str, Any]:
    """Return the arguments of a layer, leaves of float64."""
    torch.manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {
        "zxbcdt": (2, LENGTH, 2 * outer + INNER + CHANNELS + HEADS),
        "conv1d_weight": (CHANNELS, WIDTH),
        "conv1d_bias": (CHANNELS,),
        "dt_bias": (HEADS,),
        "A": (HEADS,),
        "D": (HEADS, SIZE) if columns else (HEADS,),
    }
    shapes |= {"rmsnorm_weight": (INNER,)} if norm else {}
    shapes |= {"outproj_weight": (6, outer + INNER), "outproj_bias": (6,)} if out else {}
    given: dict[str, Any] = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    given["A"] = -given["A"].exp()
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    return leaves | {"chunk_size": 16, "ngroups": GROUPS, "headdim": None if columns else SIZE}


def plain(given: dict[str, Any], *, outer: int, before_gate: bool, index: Tensor | None = None) -> Tensor:
    """Return the layer's output step by step, as the paper has it."""
    gated, z, mixed, dt = given["zxbcdt"].split([2 * outer, INNER, CHANNELS, HEADS], dim=-1)
    weight, bias = given["conv1d_weight"][:, None], given["conv1d_bias"]
    rows = [
        silu(conv1d(part.T[None], weight, bias, padding=WIDTH - 1, groups=CHANNELS)[0, :, : len(part)]).T
        for row in range(2)
        for part in (mixed[row].split(13) if index is not None else [mixed[row]])
    ]
    x, B, C = torch.cat(rows).view(2, LENGTH, CHANNELS).split([INNER, *[GROUPS * STATES] * 2], dim=-1)
    norm = given.get("rmsnorm_weight")
    B, C = (one.unflatten(-1, (GROUPS, STATES)) for one in (B, C))
    x, gate = (one.unflatten(-1, (HEADS, SIZE)) for one in (x, z))
    options = {"dt_bias": given["dt_bias"], "seq_idx": index, "dt_softplus": True}
    options |= {"z": gate if norm is None else None}
    out, _ = reference_chunk_scan(x, dt, given["A"], B, C, given["D"], **options)
    out = out.flatten(2)
    if norm is not None:
        out = out if before_gate else out * silu(z)
        parts = [one / (one.square().mean(-1, keepdim=True) + 1e-6).sqrt() for one in out.chunk(GROUPS, -1)]
        out = torch.cat(parts, -1) * norm
        out = out * silu(z) if before_gate else out
    if outer:
        gate, value = gated.chunk(2, -1)
        out = torch.cat([silu(gate) * value, out], -1)
    return out @ given["outproj_weight"].T + given["outproj_bias"] if "outproj_weight" in given else out


@pytest.mark.parametrize(
    ("options", "before_gate", "packed"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"norm": False, "columns": True}, True, False),
        ({"outer": 5}, False, False),
        ({"norm": False, "out": False, "outer": 3}, True, True),
    ],
)
def test_a_layer_is_its_parts(options: dict[str, Any], before_gate: bool, packed: bool) -> None:
    given = layer(**options)
    index = (torch.arange(LENGTH) // 13).expand(2, -1) if packed else None
    found = mamba_split_conv1d_scan_combined(**given, norm_before_gate=before_gate, seq_idx=index)
    expected = plain(given, outer=options.get("outer", 0), before_gate=before_gate, index=index)
    torch.testing.assert_close(found, expected)
    leaves = [one for one in given.values() if isinstance(one, Tensor)]
    grad = torch.randn_like(found)
    both = (torch.autograd.grad(one, leaves, grad) for one in (found, expected))
    for mine, other in zip(*both, strict=True):
        torch.testing.assert_close(mine, other)


def step(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the arguments of a step, as models expand them."""
    torch.manual_seed(6)
    row, whole = (3, HEADS, SIZE), (HEADS, SIZE, STATES)
    return {
        "state": torch.randn(3, *whole, dtype=dtype),
        "x": torch.randn(row, dtype=dtype),
        "dt": torch.randn(3, HEADS, 1, dtype=dtype).expand(row),
        "A": -torch.rand(HEADS, 1, 1).expand(whole),
        "B": torch.randn(3, GROUPS, STATES, dtype=dtype),
        "C": torch.randn(3, GROUPS, STATES, dtype=dtype),
        "D": torch.randn(HEADS, 1).expand(HEADS, SIZE),
        "z": torch.randn(row, dtype=dtype),
        "dt_bias": torch.randn(HEADS, 1).expand(HEADS, SIZE),
    }


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_step_is_a_scan_of_one_time(dtype: torch.dtype, allowed: float) -> None:
    given = step(dtype)
    wide = {name: tensor.double() for name, tensor in given.items()}
    x, dt, B, C, z = (wide[name][:, None] for name in ("x", "dt", "B", "C", "z"))
    options = {"z": z, "dt_bias": wide["dt_bias"][:, 0], "initial_states": wide["state"], "dt_softplus": True}
    expected, last = reference_chunk_scan(x, dt[..., 0], wide["A"][:, 0, 0], B, C, wide["D"], **options)
    out = selective_state_update(**given, dt_softplus=True)
    torch.testing.assert_close(out.double(), expected[:, 0], rtol=allowed, atol=10 * allowed)
    torch.testing.assert_close(given["state"].double(), last, rtol=allowed, atol=10 * allowed)


def test_a_step_without_heads_is_mamba_1s() -> None:
    given = step()
    first = {"A": 0, "D": 0, "dt_bias": 0, "state": 1, "x": 1, "dt": 1, "z": 1}
    flat = given | {name: given[name].flatten(one, one + 1).clone() for name, one in first.items()}
    out = selective_state_update(**given, dt_softplus=True)
    assert torch.equal(selective_state_update(**flat, dt_softplus=True), out.flatten(1))
    assert torch.equal(flat["state"], given["state"].flatten(1, 2))


@pytest.mark.parametrize(
    ("function", "changed", "says"),
    [
        ("layer", {"headdim": None}, r"headdim: found None, allowed 1 or more where D is \(heads\)"),
        ("layer", {"D": torch.ones(HEADS, SIZE), "headdim": 7}, "headdim: found 7, allowed None or 8"),
        ("layer", {"ngroups": 3}, "ngroups: found 3 for 4 heads, allowed a divisor of heads"),
        ("layer", {"conv1d_weight": torch.ones(97, 4)}, "conv1d_weight: found 97 channels, allowed inner 32"),
        ("layer", {"zxbcdt": torch.ones(2, 3, 133)}, "zxbcdt: found 133 columns, allowed inner 32, 96"),
        ("layer", {"outproj_weight": None}, "outproj_bias: found a tensor without outproj_weight"),
        ("layer", {"outproj_weight": torch.ones(6, 31)}, r"outproj_weight: found shape \(6, 31\), allowed"),
        ("layer", {"activation": "gelu"}, "activation: found 'gelu', allowed None, 'silu', 'swish'"),
        (
            "step",
            {"C": torch.ones(3, 1, 16)},
            r"C: found shape \(3, 1, 16\), allowed \(batch, groups",
        ),
        ("step", {"state": torch.ones(3, 4, 8, 15)}, r"state: found shape \(3, 4, 8, 15\), allowed \(batch"),
        ("step", {"state": torch.ones(3, 8, 4, 16).transpose(1, 2)}, "state: found strides"),
        ("step", {"D": torch.ones(4)}, r"D: found 1 dimensions \(4,\), allowed 2 dimensions"),
        ("step", {"state_batch_indices": torch.ones(3)}, "state_batch_indices: found a tensor, allowed None"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_what_is_refused(function: str, changed: dict[str, Any], says: str) -> None:
    call: Callable[..., Any] = mamba_split_conv1d_scan_combined
    given = layer()
    if function == "step":
        call, given = selective_state_update, dict(step())
    with pytest.raises(ArgumentError, match=says):
        call(**given | changed)
