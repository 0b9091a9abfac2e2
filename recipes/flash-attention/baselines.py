"""What else computes the same attention: PyTorch's fused kernels, FlexAttention, the package flash-attn."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name
from attention import AttentionCase, Function
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Named = tuple[Function, str, str]
"""An implementation, its name and its version."""
FUSED = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


def baselines(one: AttentionCase, device: torch.device) -> tuple[list[Named], dict[str, str]]:
    """Return what runs here, and why the others do not."""
    found: list[Named] = []
    absent: dict[str, str] = {}
    fused = {name: partial(_fused, kind) for name, kind in FUSED.items()}
    makers: dict[str, Callable[..., Function]] = {**fused, "flex": flex_attention, "flash_attn": flash_attn}
    for name, make in makers.items():
        try:
            function = make(one) if device.type == "cuda" else _refuse("it needs a GPU")
            with torch.no_grad():
                function(one.q, one.k, one.v)
        except (ImportError, NotImplementedError, RuntimeError) as error:
            absent[name] = str(error).splitlines()[0][:200]
        else:
            package = importlib.import_module("flash_attn" if name == "flash_attn" else "torch")
            found.append((function, name, str(package.__version__)))
    return found, absent


def _refuse(why: str) -> Function:
    raise NotImplementedError(why)


def _fused(kind: SDPBackend, one: AttentionCase) -> Function:
    if one.mask in {"window", "alibi"}:
        return _refuse(f"it has no mask {one.mask}")
    grouped, causal = one.kv_heads != one.heads, one.causal and one.q.shape[1] > 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return _headed(F.scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def flex_attention(one: AttentionCase) -> Function:
    """Return FlexAttention, compiled for this case."""
    from torch.nn.attention import flex_attention as flex  # noqa: PLC0415 - only where the case asks for it

    if not one.flex:
        return _refuse("the case does not ask for it, since compiling takes a while")
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    slopes, window, mask = one.slopes, one.window, None

    def seen(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window) if one.mask == "window" else i >= j

    def biased(score: Tensor, _b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if slopes is None else score - slopes[h] * (i - j).abs()

    if one.causal and one.q.shape[1] > 1:
        mask = flex.create_block_mask(seen, None, None, one.length, one.length, device=one.q.device)
    options: dict[str, Any] = {"block_mask": mask, "enable_gqa": one.kv_heads != one.heads}
    if slopes is not None:
        options["score_mod"] = biased
    return lambda q, k, v: _headed(compiled, q, k, v, **options)


def flash_attn(one: AttentionCase) -> Function:
    """Return the package flash-attn's own function."""
    package = importlib.import_module("flash_attn")
    sides, slopes = (one.left, 0 if one.causal else -1), one.slopes
    return lambda q, k, v: package.flash_attn_func(q, k, v, window_size=sides, alibi_slopes=slopes)


def _headed(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call what wants heads before rows."""
    out: Tensor = function(*(one.transpose(1, 2) for one in (q, k, v)), **options)
    return out.transpose(1, 2)
