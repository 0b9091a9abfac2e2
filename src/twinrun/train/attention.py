"""How attention is computed, and which fused kernel of PyTorch runs: found by running each, then fixed.

Shape suffixes: B sequences, S tokens of one, H heads, G heads of keys and values, E width of a head.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from twinrun.foundation.errors import MachineError

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Causal attention of queries (B, S, H, E), keys and values (B, S, G, E), with ALiBi's slopes (H) or none.

H / G neighbouring heads of queries share a head of keys and values.
"""

# Backends that PyTorch lacks: that of a model without attention, and our own kernel.
NONE, TRITON = "none", "triton"
# Fastest first: cuDNN's backward pass is about 1.6 times as fast as FlashAttention-2 on an H200.
_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
_BACKENDS |= {"math": "MATH"}
# PyTorch before 2.5 has no cuDNN's.
KERNELS = {name: getattr(SDPBackend, one) for name, one in _BACKENDS.items() if hasattr(SDPBackend, one)}


def only(kernel: str) -> contextlib.AbstractContextManager[None]:
    """Restrict `scaled_dot_product_attention` to one kernel; nothing to restrict for any other name.

    torch.compile fixes the kernel when it first traces a graph: enter this around the whole
    training loop, not inside the model.
    """
    if kernel not in KERNELS:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[None] = sdpa_kernel(KERNELS[kernel])
    return context


def fastest(
    size_BSHE: Sequence[int],
    *,
    key_heads: int | None = None,
    dtype: torch.dtype,
    device: torch.device,
    alibi: bool = False,
) -> str:
    """Return the first of `KERNELS` that runs forward and backward on tensors of the run's own size.

    Args:
        key_heads: heads of keys and values, as many as of queries where not given.

    Raises:
        MachineError: none does.
    """
    batch, rows, heads, width = size_BSHE
    slopes_H = alibi_slopes(heads).to(device) if alibi else None
    made = functools.partial(torch.ones, dtype=dtype, device=device, requires_grad=True)
    q_BSHE, k_BSGE = (made((batch, rows, count, width)) for count in (heads, key_heads or heads))
    for kernel in KERNELS:
        # Every kernel that is refused warns about its reason.
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError), only(kernel):
            warnings.simplefilter("ignore")
            try:
                fused(q_BSHE, k_BSGE, k_BSGE, slopes_H).sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except torch.cuda.OutOfMemoryError as error:
                raise MemoryError(str(error)) from None
            return kernel
    raise MachineError("no attention kernel of this PyTorch runs", found=f"{dtype} on {device}")


def chosen(name: str) -> Attend:
    """Return what the setting `attention` names; raises MachineError where a package lacks."""
    return _ours() if name == TRITON else {"sdpa": fused, "math": written_out}[name]


def fused(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, slopes_H: Tensor | None) -> Tensor:
    """Attend to the past by a fused kernel of PyTorch; it takes ALiBi as a matrix."""
    q_BHSE, k_BHSE, v_BHSE = _by_head(q_BSHE, k_BSGE, v_BSGE)
    if slopes_H is None:
        return scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True).transpose(1, 2)
    bias_HSS = _bias(slopes_H, q_BSHE.shape[1]).to(q_BSHE.dtype)
    biased = scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, attn_mask=bias_HSS[None])
    return biased.transpose(1, 2)


def written_out(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, slopes_H: Tensor | None) -> Tensor:
    """Attend to the past by the written-out formula, the softmax in fp32."""
    q_BHSE, k_BHSE, v_BHSE = _by_head(q_BSHE, k_BSGE, v_BSGE)
    scores_BHSS = (q_BHSE @ k_BHSE.transpose(-2, -1) / math.sqrt(q_BHSE.shape[-1])).float()
    if slopes_H is None:
        slopes_H = torch.zeros(q_BHSE.shape[1], device=q_BHSE.device)
    scores_BHSS = scores_BHSS + _bias(slopes_H, q_BHSE.shape[-2])
    y_BHSE = torch.softmax(scores_BHSS, dim=-1).to(v_BHSE.dtype) @ v_BHSE
    return y_BHSE.transpose(1, 2)


def alibi_slopes(heads: int) -> Tensor:
    """Return MPT's slopes of ALiBi for any number of heads: of the next power of two, every other one first.

    github:mosaicml/llm-foundry@2e852dbf80fd:llmfoundry/models/layers/attention.py, gen_slopes.
    """
    count = 2 ** math.ceil(math.log2(heads))
    slopes = torch.exp2(-torch.arange(1, count + 1, dtype=torch.float32) * 8 / count)
    return slopes if count == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads]


def package(name: str, *, place: str, found: str, allowed: str, hint: str) -> Any:
    """Return a package with kernels; raises MachineError where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        message = f"cannot import {name}: {error}"
        raise MachineError(message, place=place, found=found, allowed=allowed, hint=hint) from None


def _ours() -> Attend:
    hint = 'recipe.toml names the kernels: kernels = ["flash-attention"]'
    told = {"found": TRITON, "allowed": "sdpa or math, or an environment with Triton", "hint": hint}
    ours = package("twinrun_attention", place="attention", **told)

    def attend(q_BSHE: Tensor, k_BSGE: Tensor, v_BSGE: Tensor, slopes_H: Tensor | None) -> Tensor:
        out: Tensor = ours.flash_attn_func(q_BSHE, k_BSGE, v_BSGE, causal=True, alibi_slopes=slopes_H)
        return out

    return attend


def _by_head(q_BSHE: Tensor, *shared_BSGE: Tensor) -> Iterator[Tensor]:
    """Yield queries, keys and values by head; each head of queries has keys and values of its own.

    They are repeated: not every kernel takes groups, and PyTorch before 2.5 has none that does.
    """
    for part in (q_BSHE, *shared_BSGE):
        times = q_BSHE.shape[2] // part.shape[2]
        yield (part if times == 1 else part.repeat_interleave(times, dim=2)).transpose(1, 2)


def _bias(slopes_H: Tensor, rows: int) -> Tensor:
    """Return what ALiBi adds to the scores (H, S, S), with minus infinity for the future."""
    positions_S = torch.arange(rows, device=slopes_H.device)
    distances_SS = positions_S[:, None] - positions_S[None, :]
    bias_HSS = -slopes_H[:, None, None] * distances_SS
    return bias_HSS.masked_fill(distances_SS < 0, -torch.inf)
