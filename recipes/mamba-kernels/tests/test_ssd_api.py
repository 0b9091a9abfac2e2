"""What SSD's function refuses, and what it does where no kernel runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from twinrun_mamba import ArgumentError, mamba_chunk_scan_combined
from twinrun_mamba.ssd.reference import reference_chunk_scan

from twinrun.train.measure import distance

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


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"groups": 3}, "B: found 3 groups for 4 heads"),
        ({"size": 129}, "x: found head size 129, allowed 1 to 128"),
        ({"states": 257}, "B: found 257 states, allowed 1 to 256"),
        ({"chunk_size": 48}, "chunk_size: found 48, allowed 16, 32"),
        ({"A": torch.ones(3, device=DEVICE)}, r"A: found shape \(3,\)"),
        ({"D": torch.ones(4, 31, device=DEVICE)}, r"D: found shape \(4, 31\)"),
        ({"dt_bias": torch.ones(4, device=DEVICE, dtype=torch.int32)}, "dt_bias: found torch.int32"),
        ({"initial_states": torch.ones(1, 4, 16, 32, device=DEVICE)}, "initial_states: found shape"),
        ({"z": torch.ones(1, 20, 4, 32, device=DEVICE, dtype=torch.float16)}, "z: found torch.float16"),
        ({"seq_idx": torch.zeros(1, 19, device=DEVICE, dtype=torch.int32)}, "seq_idx: found shape"),
        ({"dt_limit": (1.0, 0.5)}, "dt_limit: found"),
        ({"state_dtype": torch.float64}, "state_dtype: found torch.float64"),
        ({"return_varlen_states": True}, "return_varlen_states: found True"),
        ({"backend": "fast"}, "backend: found 'fast'"),
        ({"dtype": torch.float64, "backend": "native"}, "x: found torch.float64"),
    ],
    ids=lambda given: ", ".join(given) if isinstance(given, dict) else "",
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        mamba_chunk_scan_combined(**arguments(**given))


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


def test_float64_is_computed_by_torch() -> None:
    given = arguments(dtype=torch.float64, A=-torch.ones(4, device=DEVICE, dtype=torch.float64))
    out = mamba_chunk_scan_combined(**given)
    own = {name: value for name, value in given.items() if name != "chunk_size"}
    assert distance(out, reference_chunk_scan(**own)[0]) < 1e-12


@pytest.fixture
def anew() -> Iterator[None]:
    pytest.importorskip("triton")
    from twinrun_mamba.ssd import tuning

    for cached in (tuning.options, tuning._say):
        cached.cache_clear()
    yield
    for cached in (tuning.options, tuning._say):
        cached.cache_clear()


@pytest.mark.parametrize("arch", ["sm90", "gfx90a", "gfx942", "gfx950"])
def test_every_kernel_has_a_row(arch: str, anew: None) -> None:
    from twinrun_mamba.ssd import tuning

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel in tuning.KERNELS:
            for width in (2, 4):
                row = tuning.options(kernel, arch=arch, element_bytes=width)
                assert (row.arch, row.bytes) == (arch, width)


def test_an_unknown_architecture_gets_the_default_and_that_is_said_once(anew: None) -> None:
    from twinrun_mamba.ssd import tuning

    with pytest.warns(UserWarning, match="no launch options of SSD for sm75: those of sm90 are used"):
        row = tuning.options("chunk_states", arch="sm75", element_bytes=2)
    assert row.arch == "sm90"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning.options("chunk_outputs", arch="sm75", element_bytes=2)
