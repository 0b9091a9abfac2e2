"""Which results of a block's forward pass are kept for its backward pass; the others are computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

aten = torch.ops.aten
# Attention's kernels hold two products. All else, a scan and a convolution too, is cheap for what it writes.
PRODUCTS = (
    *("mm", "addmm", "bmm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)

recomputed: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Call a function, and again in the backward pass; of its first call the inputs alone are kept."""


def recomputed_but_products(function: Callable[..., Any], *given: Any) -> Any:
    """Call `function`, and compute all but its matrix products again in the backward pass; PyTorch 2.4."""
    return recomputed(function, *given, context_fn=_keep_products)


def _keep_products() -> Any:
    """Return the contexts of a forward pass that keeps matrix products, and of its second run."""
    # PyTorch 2.0, which a stack pins, has no such function.
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(
        [getattr(aten, name).default for name in PRODUCTS if hasattr(aten, name)]
    )
