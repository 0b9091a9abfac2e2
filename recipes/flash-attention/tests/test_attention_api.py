"""What the functions refuse, how launch options are chosen, and what MPT's slopes are."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from twinrun_attention import (
    UnsupportedError,
    alibi_slopes,
    api,
    flash_attn_func,
    flash_attn_varlen_func,
    plans,
    scaled_dot_product_attention,
)
from twinrun_kernels.tuning import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = DEVICE) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(3)]


Q, K, V = tensors(1, 4, 3, 32)
STARTS = [torch.zeros(1), torch.zeros(1), 4, 4]


@pytest.mark.parametrize(
    ("function", "given", "options", "says"),
    [
        (flash_attn_func, tensors(1, 4, 2, 20), {}, "the head size is 20, not a multiple of 8 up to 256"),
        (flash_attn_func, tensors(1, 4, 2, 264), {}, "the head size is 264"),
        (flash_attn_func, tensors(1, 4, 2, 32, dtype=torch.float64), {}, "torch.float64"),
        (flash_attn_func, tensors(4, 2, 32), {}, "3, 3, 3 dimensions, not 4"),
        (flash_attn_func, [Q, K, V], {"dropout_p": 0.1}, "there is no dropout"),
        (flash_attn_func, [Q, K, V], {"softcap": -1.0}, "softcap is -1.0"),
        (flash_attn_func, [Q, K, V], {"softmax_scale": 0.0}, "the scale is 0.0"),
        (flash_attn_func, [Q, K, V], {"alibi_slopes": torch.ones(4)}, r"alibi_slopes are \(4,\)"),
        (flash_attn_func, [Q, K[:, :, :2], V[:, :, :2]], {}, "3 heads of queries are no multiple of 2"),
        (flash_attn_func, [Q, K, V[:, :3]], {}, "they differ"),
        (flash_attn_func, [Q, K.to("meta"), V], {}, "not on one device"),
        (scaled_dot_product_attention, [Q, K, V], {"attn_mask": torch.ones(3, 3)}, "a mask is given"),
        (scaled_dot_product_attention, [Q, K[:, :1], V[:, :1]], {}, "enable_gqa is off"),
        (flash_attn_varlen_func, [Q[0], K[0], V[0], *STARTS], {}, "cu_seqlens"),
    ],
    ids=str,
)
def test_what_is_refused(function: Any, given: list[Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        function(*given, **options)


def test_fp32_and_processors_are_for_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "INTERPRETED", False)
    with pytest.raises(UnsupportedError, match=r"torch\.float32"):
        flash_attn_func(*tensors(1, 4, 2, 32, dtype=torch.float32))
    with pytest.raises(UnsupportedError, match="cpu is no GPU: TRITON_INTERPRET=1"):
        flash_attn_func(*tensors(1, 4, 2, 32, device="cpu"))


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 40])
def test_slopes_are_those_of_mpt(heads: int) -> None:
    # github:mosaicml/llm-foundry@2e852dbf80fd:llmfoundry/models/layers/attention.py, gen_slopes
    count = 2 ** math.ceil(math.log2(heads))
    found = [1.0 / 2 ** (one * 8 / count) for one in range(1, count + 1)]
    wanted = found if count == heads else (found[1::2] + found[::2])[:heads]
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(wanted))


TABLE = Table(Path(plans.__file__).with_name("tuning.csv"))


@pytest.mark.parametrize("arch", ["sm90", "sm80", "gfx90a", "gfx942", "gfx950"])
def test_every_head_size_has_a_row(arch: str) -> None:
    kernels = ("forward", "backward_keys", "backward_queries", "decode")
    for kernel, size in itertools.product(kernels, (16, 32, 64, 128, 256)):
        row = TABLE.options(kernel, arch=arch, size=size, causal=True)
        assert row.arch == arch
        assert row.size >= size


def test_an_unknown_architecture_gets_the_default_and_that_is_said_once() -> None:
    with pytest.warns(UserWarning, match="no launch options for sm75: those of sm80 are used"):
        row = TABLE.options("forward", arch="sm75", size=64, causal=True)
    assert row.arch == "sm80"
    # A second warning would be an error.
    TABLE.options("forward", arch="sm75", size=128, causal=True)
