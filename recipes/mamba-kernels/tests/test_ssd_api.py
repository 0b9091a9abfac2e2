"""What SSD's function refuses, and what it does where no kernel runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from twinrun_mamba import ArgumentError, mamba_chunk_scan_combined
from twinrun_mamba.ssd.reference import reference_chunk_scan

from twinrun.train.measure import distance

# What Triton's interpreter does with NumPy.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(
    length: int = 20, *, heads: int = 4, groups: int = 2, size: int = 32, states: int = 16, **options: Any
) -> dict[str, Any]:
    on: dict[str, Any] = {"device": DEVICE, "dtype": options.pop("dtype", torch.float32)}
    given: dict[str, Any] = {
        "x": torch.randn(1, length, heads, size, **on),
        "dt": torch.rand(1, length, heads, **on),
        "A": -torch.rand(heads, device=DEVICE),
        "B": torch.randn(1, length, groups, states, **on),
        "C": torch.randn(1, length, groups, states, **on),
        "chunk_size": 16,
    }
    return given | options


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"groups": 3}, "B: found 3 groups for 4 heads"),
        ({"x": [1.0]}, "x: found list, allowed a tensor"),
        ({"x": ones(20, 4, 32)}, r"x: found 3 dimensions \(20, 4, 32\), allowed 4"),
        ({"x": ones(1, 20, 4, 32, dtype=torch.int32)}, "x: found torch.int32, allowed bf16, fp16 or"),
        ({"dt": ones(1, 4, 20)}, r"dt: found shape \(1, 4, 20\), allowed \(batch, length"),
        ({"B": torch.ones(1, 20, 2, 16, device="meta")}, "B: found a tensor on meta, allowed"),
        ({"chunk_size": 64.0}, "chunk_size: found '64.0', allowed 16, 32"),
        ({"chunk_size": 512}, "chunk_size: found 512, allowed 16, 32"),
        ({"dt_limit": None}, "dt_limit: found None, allowed two numbers, the least and the most"),
        ({"dt_limit": (float("nan"), 1.0)}, r"dt_limit: found \(nan, 1.0\), allowed two numbers"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit: found"),
        ({"seq_idx": ones(1, 20)}, "seq_idx: found torch.float32, allowed torch.int32"),
        ({"seq_idx": ones(20, dtype=torch.int32)}, "seq_idx: found 1 dimensions"),
        ({"size": 129}, "x: found head size 129, allowed 1 to 128"),
        ({"states": 257}, "B: found 257 states, allowed 1 to 256"),
        ({"D": ones(4, 31)}, r"D: found shape \(4, 31\)"),
        ({"dt_bias": ones(4, dtype=torch.int32)}, "dt_bias: found torch.int32"),
        ({"initial_states": ones(1, 4, 16, 32)}, "initial_states: found shape"),
        ({"z": ones(1, 20, 4, 32, dtype=torch.float16)}, "z: found torch.float16"),
        ({"state_dtype": torch.float64}, "state_dtype: found torch.float64"),
        (
            {"return_varlen_states": True},
            "return_varlen_states: found True without cu_seqlens, allowed",
        ),
        ({"backend": "fast"}, "backend: found 'fast'"),
        ({"dtype": torch.float64, "backend": "native"}, "x: found torch.float64"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says) as refused:
        mamba_chunk_scan_combined(**arguments(**given))
    assert refused.value.allowed


@pytest.mark.parametrize("length", [1, 127, 100_000, 2**31 - 1])
def test_a_call_of_any_length_can_be_planned(length: int) -> None:
    pytest.importorskip("triton")
    given = arguments(1, heads=80, groups=1, size=64, states=128, chunk_size=256)
    rows = ("x", "dt", "B", "C")
    given |= {name: given[name].to("meta").expand(-1, length, *given[name].shape[2:]) for name in rows}
    given["A"] = given["A"].to("meta")
    out, last = mamba_chunk_scan_combined(**given, return_final_states=True)
    assert out.shape == (1, length, 80, 64)
    assert last.shape == (1, 80, 64, 128)


@pytest.mark.parametrize("boundaries", [(0, 20), (0, 0, 3, 16, 16, 20), (0, 15, 18, 20, 20), (0, 1, 2, 20)])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_each_packed_sequence_has_its_state(boundaries: tuple[int, ...], backend: str | None) -> None:
    state = torch.randn(1, 4, 32, 16, device=DEVICE)
    given = arguments(initial_states=state, dt_softplus=True, dt_bias=torch.randn(4, device=DEVICE))
    ends = torch.tensor(boundaries, device=DEVICE)
    packed = {"cu_seqlens": ends, "return_varlen_states": True, "backend": backend}
    _, last, found = mamba_chunk_scan_combined(**given, **packed, return_final_states=True)
    assert len(mamba_chunk_scan_combined(**given, **packed)) == 2
    assert found.shape == (len(boundaries) - 1, 4, 32, 16)
    for number, (start, end) in enumerate(pairwise(boundaries)):
        rows = {name: given[name][:, start:end] for name in ("x", "dt", "B", "C")}
        own = {"initial_states": state if start == 0 and end else None, "backend": "reference"}
        _, expected = mamba_chunk_scan_combined(**given | rows | own, return_final_states=True)
        assert distance(found[number], expected[0]) < 1e-5
    if boundaries[-2] < 20:
        assert distance(found[-1], last[0]) < 1e-5


def test_empty_batches_and_repeated_rows() -> None:
    given = arguments()
    rows = ("x", "dt", "B", "C")
    empty = given | {name: given[name][:0] for name in rows}
    assert mamba_chunk_scan_combined(**empty).shape == (0, 20, 4, 32)
    repeated = given | {name: given[name].expand(2, *given[name].shape[1:]) for name in rows}
    out = mamba_chunk_scan_combined(**repeated)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[:1], mamba_chunk_scan_combined(**given))


@pytest.mark.parametrize("backend", [None, "reference"])
def test_lengths_of_zero_return_the_initial_state(backend: str | None) -> None:
    state = torch.randn(1, 4, 32, 16, device=DEVICE, requires_grad=True)
    given = arguments(0, initial_states=state, backend=backend)
    leaf: Tensor = given["A"].requires_grad_()
    out, last = mamba_chunk_scan_combined(**given, return_final_states=True)
    assert out.shape == (1, 0, 4, 32)
    assert torch.equal(last, state)
    grad = torch.randn_like(last)
    of_state, of_leaf = torch.autograd.grad(last, (state, leaf), grad, allow_unused=True)
    assert torch.equal(of_state, grad)
    assert of_leaf is None or not of_leaf.any()
    packed = {"cu_seqlens": torch.tensor([0, 0, 0], device=DEVICE), "return_varlen_states": True}
    _, found = mamba_chunk_scan_combined(**arguments(0), **packed, backend=backend)
    assert found.shape == (2, 4, 32, 16)
    assert not found.any()


def test_float64_is_computed_by_torch() -> None:
    given = arguments(dtype=torch.float64, A=-torch.ones(4, device=DEVICE, dtype=torch.float64))
    out = mamba_chunk_scan_combined(**given)
    own = {name: value for name, value in given.items() if name != "chunk_size"}
    assert distance(out, reference_chunk_scan(**own)[0]) < 1e-12


@pytest.mark.parametrize("arch", ["sm90", "gfx90a", "gfx942", "gfx950"])
def test_every_kernel_has_a_row(arch: str) -> None:
    pytest.importorskip("triton")
    from twinrun_mamba.ssd.launch import TABLE

    for kernel in {row.kernel for row in TABLE.rows}:
        for width in (2, 4):
            row = TABLE.options(kernel, arch=arch, size=width)
            assert (row.arch, row.size) == (arch, width)
