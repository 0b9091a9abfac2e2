"""Likely effect of a changed pin on a run."""

from __future__ import annotations

import fnmatch

# The first match counts.
_EFFECTS = (
    ("base", "system libraries and toolkit below everything"),
    ("torch|torchvision|*triton*", "numerics and speed"),
    ("*nccl*|*rccl*|*mpi*|*ucx*|*shmem*", "collectives: speed, and order of summation"),
    ("*blas*|*dnn*|*solver*|*sparse*|*fft*|*rand*|*miopen*|*tensile*", "numerics and speed of libraries"),
    ("flash-att*", "attention: numerics and speed"),
    ("mosaicml", "training loop and sharding"),
    ("mosaicml-streaming", "order of the data"),
    ("tokenizers|transformers", "tokens"),
    ("numpy|scipy", "numerics on the host"),
    ("*nvcc*|*nvvm*|*nvrtc*|hipcc*|*clang*|*llvm*|gcc*|g++*|cpp*", "compiled kernels"),
    ("libc6*|libstdc++*|libgcc*", "system libraries below everything"),
    ("python3*|libpython3*", "interpreter"),
)


def likely_effect(name: str) -> str:
    """Return the likely effect of another version of the package or source called `name`."""
    for patterns, effect in _EFFECTS:
        if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns.split("|")):
            return effect
    return "none expected"
