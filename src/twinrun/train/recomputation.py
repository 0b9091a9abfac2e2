"""Which results of a block's forward pass are kept for its backward pass; the others are computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
# Attention's kernels hold two products. All else, a scan and a convolution too, is cheap for what it writes.
PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]

recomputed: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Call a function, and again in the backward pass; of its first call the inputs alone are kept."""


def recomputed_but_products(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function, and all of it but matrix products again in the backward pass."""
    return recomputed(function, *given, context_fn=_keep_products)


def _keep_products() -> Any:
    """Return the contexts of a forward pass that keeps matrix products, and of its second run."""
    return create_selective_checkpoint_contexts(PRODUCTS)
