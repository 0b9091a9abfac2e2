"""Fused attention, forward and backward, is softmax(QK/sqrt(d))V written out."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable

import torch
from device import first_device, named
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NEEDS = ("torch",)
# Batch, heads, sequence, width of a head.
SHAPE, SMALL = (2, 4, 256, 64), (1, 2, 70, 64)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def main() -> None:
    device = first_device()
    attentions: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
        "PyTorch, fp32": (fused, torch.float32),
        "PyTorch, bf16": (fused, torch.bfloat16),
    }
    if importlib.util.find_spec("flash_attn"):
        from flash_attn import flash_attn_func

        # Its kernels exist for GPUs only; on a processor the import above is all that can be tried.
        if device.type == "cuda":
            attentions["flash-attn, bf16"] = (transposed(flash_attn_func), torch.bfloat16)
        else:
            print("flash-attn: imported; it has no kernel for a CPU")
    for name, (attention, dtype) in attentions.items():
        compare(name, attention, dtype, device)
    absent = [name for name in ("twinrun_attention", "triton") if not importlib.util.find_spec(name)]
    if absent:
        print(f"twinrun-attention: not tried, the stack has no {' and no '.join(absent)}")
    else:
        interpreted = device.type != "cuda"
        name = f"twinrun-attention{', interpreted' * interpreted}, bf16"
        compare(name, ours(interpreted), torch.bfloat16, device, shape=SMALL if interpreted else SHAPE)


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(interpreted: bool) -> Callable[..., Tensor]:
    """Return our own kernel; on a processor Triton interprets it, which it decides when it is imported."""
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    from twinrun_attention import scaled_dot_product_attention as attention

    return lambda q, k, v: attention(q, k, v, is_causal=True)


def transposed(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `attention`, which takes heads behind the sequence, in PyTorch's order."""

    def ordered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (part.transpose(1, 2).contiguous() for part in (q, k, v))
        return attention(*parts, causal=True).transpose(1, 2)

    return ordered


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


def compare(
    name: str,
    attention: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    *,
    shape: tuple[int, ...] = SHAPE,
) -> None:
    """End the check when output or gradients are not those of `written_out` in double precision."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(3)]
    weight = torch.randn(shape, device=device).to(dtype)
    found = with_gradients(attention, inputs, weight)
    expected = with_gradients(written_out, [part.double() for part in inputs], weight.double())
    errors = [
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, expected, strict=True)
    ]
    print(f"{name} on {named(device)}: relative errors {', '.join(f'{error:.1e}' for error in errors)}")
    if not max(errors) <= TOLERANCES[dtype]:
        raise SystemExit(f"attention is wrong, tolerance {TOLERANCES[dtype]:g}")


def with_gradients(attention: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor) -> list[Tensor]:
    leaves = [part.detach().clone().requires_grad_() for part in inputs]
    output = attention(*leaves)
    (output * weight).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


if __name__ == "__main__":
    main()
