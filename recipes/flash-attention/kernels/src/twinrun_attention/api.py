"""Attention with the signatures of torch's `scaled_dot_product_attention` and of the package flash-attn."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from twinrun_kernels.launches import INTERPRETED, REMEMBERED
from twinrun_kernels.operators import is_eager

from twinrun_attention import ops

HEAD_SIZES = range(8, 257, 8)
DTYPES = (torch.float16, torch.bfloat16)


class UnsupportedError(ValueError):
    """The call asks for what the kernels do not do; the message says what, and what they do."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,  # noqa: ARG001 - it always is
    return_attn_probs: bool = False,
) -> Any:
    """Attention of (batch, row, head, column) tensors, the last query beside the last key.

    It is deterministic whatever `deterministic` says. The output is returned; with `return_attn_probs` the
    output, the logarithms of the row sums, and None in place of probabilities.
    """
    _check(q, k, v, rank=4, dropout_p=dropout_p, softcap=softcap)
    slopes, sides = _slopes(alibi_slopes, q), _sides(window_size, causal)
    scale, q = _scale(softmax_scale, q)
    sizes = (q.shape[1], k.shape[1])
    out, lse = ops.attend(q, k, v, slopes, None, None, *sizes, scale, *sides, True, softcap)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = True,  # noqa: ARG001 - it always is
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed (row, head, column) tensors; `cu_seqlens` say where sequences begin and end."""
    _check(q, k, v, rank=3, dropout_p=dropout_p, softcap=softcap)
    starts = tuple(_starts(one, q) for one in (cu_seqlens_q, cu_seqlens_k))
    slopes, sides = _slopes(alibi_slopes, q), _sides(window_size, causal)
    scale, q = _scale(softmax_scale, q)
    sizes = (int(max_seqlen_q), int(max_seqlen_k))
    out, lse = ops.attend(q, k, v, slopes, *starts, *sizes, scale, *sides, True, softcap)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of new queries to a cache; new keys and values are written into it first, in place."""
    _check(q, k_cache, v_cache, rank=4, dropout_p=0.0, softcap=softcap)
    lengths = _lengths(cache_seqlens, q, k_cache)
    if k is not None and v is not None:
        batch = torch.arange(q.shape[0], device=q.device)[:, None]
        places = lengths[:, None] + torch.arange(k.shape[1], device=q.device)
        k_cache[batch, places], v_cache[batch, places] = k, v
        lengths += k.shape[1]
    slopes, sides = _slopes(alibi_slopes, q), _sides(window_size, causal)
    scale, q = _scale(softmax_scale, q)
    return ops.attend_to_cache(q, k_cache, v_cache, lengths, slopes, scale, *sides, softcap)[0]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of (batch, head, row, column) tensors, the first query beside the first key, as in torch."""
    if attn_mask is not None:
        raise UnsupportedError("a mask is given: causal, windows and ALiBi are arguments of flash_attn_func")
    if not enable_gqa and query.dim() == 4 and query.shape[1] != key.shape[1]:
        raise UnsupportedError(
            f"{query.shape[1]} heads of queries and {key.shape[1]} of keys: enable_gqa is off"
        )
    q, k, v = (one.transpose(1, 2) if one.dim() == 4 else one for one in (query, key, value))
    _check(q, k, v, rank=4, dropout_p=dropout_p, softcap=0.0)
    scale, q = _scale(scale, q)
    sizes, right = (q.shape[1], k.shape[1]), 0 if is_causal else -1
    out, _ = ops.attend(q, k, v, None, None, None, *sizes, scale, -1, right, False, 0.0)
    return out.transpose(1, 2)


def alibi_slopes(heads: int, *, bias_max: float = 8.0, device: torch.device | str | None = None) -> Tensor:
    """Return MPT's slopes for any number of heads: of the next power of two, every other one first."""
    count = 2 ** math.ceil(math.log2(heads))
    slopes = torch.pow(
        2.0, -torch.arange(1, count + 1, dtype=torch.float32, device=device) * bias_max / count
    )
    return slopes if count == heads else torch.cat([slopes[1::2], slopes[::2]])[:heads].contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor, *, rank: int, dropout_p: float, softcap: float) -> None:
    """Raise UnsupportedError for what the kernels cannot take."""
    if dropout_p:
        raise UnsupportedError(f"dropout_p is {dropout_p}: there is no dropout")
    if softcap < 0:
        raise UnsupportedError(f"softcap is {softcap}: it is 0 for none, or more")
    # Symbolic sizes cannot be looked up, nor does a compiler look into a cache.
    check = _check_once if is_eager(q) else _check_forms
    check(rank, INTERPRETED, *((one.shape, one.dtype, one.device) for one in (q, k, v)))


def _check_forms(rank: int, interpreted: bool, *forms: tuple[Any, torch.dtype, torch.device]) -> None:
    """Raise UnsupportedError for queries, keys and values of forms that the kernels cannot take."""
    shapes, dtypes, devices = zip(*forms)
    q, k, v = shapes
    if any(len(one) != rank for one in shapes):
        raise UnsupportedError(f"tensors have {len(q)}, {len(k)}, {len(v)} dimensions, not {rank}")
    if len(set(devices)) > 1:
        raise UnsupportedError(f"tensors are on {', '.join(map(str, devices))}, not on one device")
    # The interpreter computes in fp32 whatever it is given, so it takes that too.
    if len(set(dtypes)) > 1 or dtypes[0] not in ((*DTYPES, torch.float32) if interpreted else DTYPES):
        raise UnsupportedError(f"tensors are {', '.join(map(str, dtypes))}, not all bfloat16 or float16")
    if devices[0].type != "cuda" and not interpreted:
        raise UnsupportedError(
            f"{devices[0]} is no GPU: TRITON_INTERPRET=1 runs the kernels on a processor, slowly"
        )
    size, heads, kv_heads = q[-1], q[-2], k[-2]
    if size not in HEAD_SIZES:
        raise UnsupportedError(f"the head size is {size}, not a multiple of 8 up to 256")
    if k != v or k[-1] != size:
        raise UnsupportedError(f"shapes are {tuple(q)}, {tuple(k)} and {tuple(v)}: they differ")
    if rank == 4 and q[0] != k[0]:
        raise UnsupportedError(f"the batch is {q[0]} of queries and {k[0]} of keys")
    if not kv_heads or heads % kv_heads:
        raise UnsupportedError(f"{heads} heads of queries are no multiple of {kv_heads} of keys")


_check_once = functools.lru_cache(maxsize=REMEMBERED)(_check_forms)


def _sides(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """Return how far a query sees to the left and to the right; -1 is no limit."""
    left, right = (-1 if side < 0 else side for side in window_size)
    return left, 0 if causal else right


def _scale(scale: float | None, q: Tensor) -> tuple[float, Tensor]:
    """Return a positive scale, and queries that carry its sign."""
    found = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(found) or found == 0:
        raise UnsupportedError(f"the scale is {found}: it is finite and not zero")
    return (found, q) if found > 0 else (-found, -q)


def _slopes(slopes: Tensor | None, q: Tensor) -> Tensor | None:
    """Return slopes in fp32, (head) or (batch, head); raises UnsupportedError for others."""
    if slopes is None:
        return None
    heads = q.shape[-2]
    allowed = ((heads,), (q.shape[0], heads)) if q.dim() == 4 else ((heads,),)
    if tuple(slopes.shape) not in allowed or slopes.device != q.device:
        raise UnsupportedError(
            f"alibi_slopes are {tuple(slopes.shape)} on {slopes.device}, not {heads} on {q.device}"
        )
    return slopes.detach().to(torch.float32).contiguous()


def _starts(starts: Tensor, q: Tensor) -> Tensor:
    if starts.dim() != 1 or starts.numel() < 2 or starts.device != q.device:
        raise UnsupportedError(
            f"cu_seqlens are {tuple(starts.shape)} on {starts.device}, not one more than sequences"
        )
    return starts.to(torch.int32).contiguous()


def _lengths(given: int | Tensor | None, q: Tensor, cache: Tensor) -> Tensor:
    """Return how much of the cache each sequence fills, in a tensor of its own."""
    if isinstance(given, Tensor):
        return given.to(torch.int32, copy=True)
    filled = cache.shape[1] if given is None else given
    return torch.full((q.shape[0],), filled, dtype=torch.int32, device=q.device)
