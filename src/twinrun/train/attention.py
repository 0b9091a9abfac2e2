"""Which fused attention kernel runs: found by running each, then fixed for the whole run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.functional import scaled_dot_product_attention

from twinrun.foundation.errors import MachineError

# What a model without attention runs on.
NONE = "none"
# Fastest first: cuDNN's backward pass is about 1.6 times as fast as FlashAttention-2 on an H200.
KERNELS = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def only(kernel: str) -> AbstractContextManager[None]:
    """Restrict `scaled_dot_product_attention` to one kernel, or to nothing for `NONE`.

    torch.compile fixes the kernel when it first traces a graph: enter this around the whole
    training loop, not inside the model.

    Raises:
        NotImplementedError: this PyTorch does not have `kernel`.
    """
    context: AbstractContextManager[None]
    if kernel == NONE:
        return nullcontext()
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:  # PyTorch 2.2 and older
        if kernel == "cudnn":
            raise NotImplementedError(kernel) from None
        context = torch.backends.cuda.sdp_kernel(
            enable_flash=kernel == "flash",
            enable_mem_efficient=kernel == "efficient",
            enable_math=kernel == "math",
        )
        return context
    backend = getattr(SDPBackend, KERNELS[kernel], None)
    if backend is None:
        raise NotImplementedError(kernel)
    context = sdpa_kernel(backend)
    return context


def fastest(size_BSHE: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> str:
    """Return the first of `KERNELS` that runs forward and backward on queries of the run's own size.

    Raises:
        MachineError: none does.
    """
    for kernel in KERNELS:
        if _runs(kernel, size_BSHE, dtype=dtype, device=device):
            return kernel
    raise MachineError("no attention kernel of this PyTorch runs", found=f"{dtype} on {device}")


def _runs(kernel: str, size_BSHE: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> bool:
    q_BSHE = torch.ones(size_BSHE, dtype=dtype, device=device, requires_grad=True)
    q_BHSE = q_BSHE.transpose(1, 2)
    try:
        # Every kernel that is refused warns about its reason.
        with warnings.catch_warnings(), only(kernel):
            warnings.simplefilter("ignore")
            scaled_dot_product_attention(q_BHSE, q_BHSE, q_BHSE, is_causal=True).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):
        return False
    return True
