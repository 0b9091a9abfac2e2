"""Output and gradients against float64, for every option; on a processor in Triton's interpreter."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from twinrun_attention import (
    alibi_slopes,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from twinrun_attention.reference import reference_attention

from twinrun.train.measure import distance, poisoned

# What Triton's interpreter does with NumPy, and with the logarithm of a sum of nothing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALLOWED = {torch.float16: 1e-3, torch.bfloat16: 5e-3}

# Queries, keys, heads of queries, heads of keys, head size, and the options.
CASES: dict[str, tuple[tuple[int, int, int, int, int], dict[str, Any]]] = {
    "full": ((40, 40, 1, 1, 32), {}),
    "causal": ((70, 70, 1, 1, 32), {"causal": True}),
    "fewer queries": ((33, 70, 1, 1, 64), {"causal": True}),
    "fewer keys": ((70, 33, 1, 1, 32), {"causal": True}),
    "one query and one key": ((1, 1, 1, 1, 32), {"causal": True}),
    "one query": ((1, 45, 1, 1, 32), {"causal": True}),
    "length 127": ((127, 127, 1, 1, 16), {"causal": True}),
    "window": ((70, 70, 1, 1, 32), {"window_size": (20, 10)}),
    "causal window": ((100, 100, 1, 1, 32), {"causal": True, "window_size": (9, 0)}),
    "window to the right": ((50, 70, 1, 1, 32), {"window_size": (-1, 5)}),
    "grouped": ((40, 40, 4, 2, 32), {"causal": True}),
    "multi-query": ((40, 40, 3, 1, 32), {}),
    "alibi": ((50, 50, 3, 3, 32), {"causal": True, "alibi": True}),
    "alibi both ways": ((50, 40, 2, 1, 32), {"alibi": True}),
    "softcap": ((50, 50, 1, 1, 32), {"softcap": 2.0}),
    "all": ((45, 60, 2, 1, 40), {"window_size": (30, 5), "softcap": 3.0, "alibi": True}),
    "head size 8": ((40, 40, 1, 1, 8), {"causal": True}),
    "head size 80": ((40, 40, 1, 1, 80), {"causal": True}),
    "head size 256": ((40, 40, 1, 1, 256), {"causal": True}),
    "scale": ((40, 40, 1, 1, 32), {"softmax_scale": 0.7}),
    "negative scale": ((40, 40, 1, 1, 32), {"softmax_scale": -0.3, "causal": True}),
}


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_()


def expected(leaves: Iterable[Tensor], options: dict[str, Any]) -> Tensor:
    q, k, v = leaves
    left, right = options.get("window_size", (-1, -1))
    right, scale = 0 if options.get("causal") else right, options.get("softmax_scale", q.shape[-1] ** -0.5)
    slopes, softcap = options.get("alibi_slopes"), options.get("softcap", 0.0)
    return reference_attention(
        q, k, v, scale=scale, left=left, right=right, end=True, slopes=slopes, softcap=softcap
    )


def with_slopes(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """Return options with the slopes of so many heads in place of `alibi`."""
    options = dict(options)
    if options.pop("alibi", False):
        options["alibi_slopes"] = alibi_slopes(heads, device=DEVICE)
    return options


def hold(found: Tensor, leaves: tuple[Tensor, ...], options: dict[str, Any], grad: Tensor) -> None:
    """Hold output and gradients against those in float64."""
    exact = tuple(one.detach().double().requires_grad_() for one in leaves)
    out = expected(exact, options)
    assert distance(found, out) < ALLOWED[found.dtype]
    with poisoned():
        gradients = torch.autograd.grad(found, leaves, grad)
    for one, other in zip(gradients, torch.autograd.grad(out, exact, grad.double()), strict=True):
        assert distance(one, other) < 2 * ALLOWED[found.dtype]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case: str) -> None:
    (rows, keys, heads, kv_heads, size), options = CASES[case]
    options = with_slopes(options, heads)
    dtype = torch.bfloat16 if case in ("causal", "all") else torch.float16
    q = random(1, rows, heads, size, dtype=dtype)
    k, v = (random(1, keys, kv_heads, size, dtype=dtype) for _ in range(2))
    with poisoned():
        out = flash_attn_func(q, k, v, **options)
    hold(out, (q, k, v), options, torch.randn_like(out))


def test_a_row_of_100_000_keys() -> None:
    q, k, v = random(1, 1, 1, 16), random(1, 100_000, 1, 16), random(1, 100_000, 1, 16)
    options: dict[str, Any] = {"causal": True, "window_size": (150, 0)}
    with torch.no_grad(), poisoned():
        out = flash_attn_func(q, k, v, **options)
    assert distance(out, expected((one.double() for one in (q, k, v)), options)) < ALLOWED[out.dtype]


def test_slopes_of_each_sequence() -> None:
    q, k, v = (random(2, 40, 2, 32) for _ in range(3))
    options = {"alibi_slopes": torch.rand(2, 2, device=DEVICE)}
    out = flash_attn_func(q, k, v, **options)
    hold(out, (q, k, v), options, torch.randn_like(out))


@pytest.mark.parametrize("causal", [True, False])
def test_torch_signature(causal: bool) -> None:
    q, k, v = random(1, 4, 33, 32), random(1, 2, 50, 32), random(1, 2, 50, 32)
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    exact = [one.detach().double() for one in (q, k, v)]
    torch_own = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    assert out.shape == torch_own.shape
    assert distance(out, torch_own) < 1e-3


SEEN_BY_ALL = ({"window_size": (7, 3)}, {"alibi": True, "softcap": 2.0})
CAUSAL = ({"causal": True}, {"causal": True, "alibi": True}, {"causal": True, "softcap": 2.0})


@pytest.mark.parametrize("options", [*SEEN_BY_ALL, *CAUSAL], ids=str)
def test_packed_sequences_do_not_see_each_other(options: dict[str, Any]) -> None:
    options, starts = with_slopes(options, 2), [0, 17, 17, 60]
    q, k, v = (random(60, 2, 32) for _ in range(3))
    grad = torch.randn_like(q)
    packed = torch.tensor(starts, device=DEVICE)
    out = flash_attn_varlen_func(q, k, v, packed, packed, 43, 43, **options)
    gradients = torch.autograd.grad(out, (q, k, v), grad)
    for first, end in ((0, 17), (17, 60)):
        part = tuple(one[None, first:end].detach().double().requires_grad_() for one in (q, k, v))
        exact = expected(part, options)
        assert distance(out[first:end], exact[0]) < 1e-3
        wanted = torch.autograd.grad(exact, part, grad[None, first:end].double())
        for one, other in zip(gradients, wanted, strict=True):
            assert distance(one[first:end], other[0]) < 2e-3


def test_rows_with_nothing_to_attend_give_zeros() -> None:
    q, k, v = random(1, 50, 1, 32), random(1, 20, 1, 32), random(1, 20, 1, 32)
    with poisoned():
        out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        (dq,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert not out[:, :30].any()
    assert not dq[:, :30].any()
    assert torch.isposinf(lse[:, :, :30]).all()
    assert out[:, 30:].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_head(bad: float) -> None:
    q, k, v = (random(1, 40, 3, 32) for _ in range(3))
    spoilt = k.detach().clone()
    spoilt[0, 3, 1, 5] = bad
    good, found = flash_attn_func(q, k, v), flash_attn_func(q, spoilt, v)
    assert torch.equal(good[:, :, [0, 2]], found[:, :, [0, 2]])
    assert found[:, :, 1].isnan().any()


def test_lengths_of_zero() -> None:
    q, k, v = (random(1, 20, 2, 32) for _ in range(3))
    assert flash_attn_func(q[:, :0], k, v).shape == (1, 0, 2, 32)
    out = flash_attn_func(q, k[:, :0], v[:, :0])
    assert not out.any()
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert not dq.any()


def test_strides_of_all_kinds() -> None:
    packed = torch.randn(1, 40, 3, 2, 32, device=DEVICE, dtype=torch.float16)
    q, k, v = packed.unbind(2)
    wanted = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), wanted)
    odd = [torch.randn(1, 40, 2, 33, device=DEVICE, dtype=torch.float16)[..., 1:] for _ in range(3)]
    copies = [one.contiguous() for one in odd]
    assert torch.equal(flash_attn_func(*odd), flash_attn_func(*copies))
    turned = [one.transpose(1, 3).contiguous().transpose(1, 3) for one in copies]
    assert torch.equal(flash_attn_func(*turned), flash_attn_func(*copies))
    shared = copies[1][:, :, :1].expand(-1, -1, 2, -1)
    wanted = flash_attn_func(copies[0], shared.clone(), shared.clone())
    assert torch.equal(flash_attn_func(copies[0], shared, shared), wanted)


@pytest.mark.parametrize("options", [{}, {"window_size": (20, 0)}, {"softcap": 2.0, "alibi": True}], ids=str)
def test_decoding_is_attention_at_the_end_of_the_cache(options: dict[str, Any]) -> None:
    options = with_slopes(options, 4)
    q, k, v = random(2, 2, 4, 32), random(2, 100, 2, 32), random(2, 100, 2, 32)
    lengths = torch.tensor([70, 100], device=DEVICE)
    with torch.no_grad(), poisoned():
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **options)
    for row, length in enumerate(lengths.tolist()):
        exact = [one[row, None].double() for one in (q, k[:, :length], v[:, :length])]
        assert distance(out[row, None], expected(exact, options | {"causal": True})) < 1e-3


def test_new_keys_are_written_into_the_cache() -> None:
    q, k, v = random(1, 1, 2, 32), random(1, 1, 2, 32), random(1, 1, 2, 32)
    cache_k, cache_v = (torch.randn(1, 50, 2, 32, device=DEVICE, dtype=torch.float16) for _ in range(2))
    with torch.no_grad():
        out = flash_attn_with_kvcache(q, cache_k, cache_v, k, v, cache_seqlens=20, causal=True)
    assert torch.equal(cache_k[:, 20], k[:, 0])
    exact = [one.double() for one in (q, cache_k[:, :21], cache_v[:, :21])]
    assert distance(out, expected(exact, {})) < 1e-3


def test_gradients_repeat_bit_for_bit() -> None:
    q, k, v = (random(1, 70, 2, 32) for _ in range(3))
    out = flash_attn_func(q, k, v, causal=True)
    grad = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    for _ in range(1000 if DEVICE == "cuda" else 2):
        again = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_the_operators_are_whole() -> None:
    q, k, v = (random(1, 20, 1, 16) for _ in range(3))
    forward, decode = (getattr(torch.ops.twinrun_attention, name).default for name in ("forward", "decode"))
    lengths = torch.tensor([20], dtype=torch.int32, device=DEVICE)
    cache = tuple(one.detach() for one in (q, k, v))
    for operator, given in (
        (forward, (q, k, v, None, None, None, 20, 20, 0.25, -1, 0, True, 0.0)),
        (decode, (*cache, lengths, None, 0.25, -1, 0, 0.0)),
    ):
        assert set(torch.library.opcheck(operator, given).values()) == {"SUCCESS"}


def test_a_policy_of_checkpointing_keeps_the_product() -> None:
    """Selective checkpointing sees one operator, and runs it once where its policy keeps it."""
    calls: list[str] = []

    class Counted(TorchDispatchMode):  # type: ignore[misc] # torch is Any where types are checked
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = (random(1, 20, 1, 16) for _ in range(3))
    name, found = "twinrun_attention.forward.default", {}
    for kept in ([], [torch.ops.twinrun_attention.forward.default]):
        calls.clear()
        contexts = functools.partial(create_selective_checkpoint_contexts, kept)
        with Counted():
            out = checkpoint(
                lambda q, k, v: flash_attn_func(q, k, v, causal=True) * 2,
                *(q, k, v),
                use_reentrant=False,
                context_fn=contexts,
            )
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        found[calls.count(name)] = grads
    assert found.keys() == {1, 2}
    assert all(torch.equal(a, b) for a, b in zip(found[1], found[2], strict=True))
