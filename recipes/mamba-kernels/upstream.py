"""Upstream's own functions, where its packages are installed."""

from __future__ import annotations

import contextlib
import importlib
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from operation import Function

# By operation: the package, the module in it, its function, and what that takes beside tensors.
FUNCTIONS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "scan": ("mamba_ssm", ".ops.selective_scan_interface", "selective_scan_fn", {"delta_softplus": True}),
    "conv": ("causal_conv1d", "", "causal_conv1d_fn", {"activation": "silu"}),
    "update": ("causal_conv1d", "", "causal_conv1d_update", {"activation": "silu"}),
    "ssd": ("mamba_ssm", ".ops.triton.ssd_combined", "mamba_chunk_scan_combined", {"dt_softplus": True}),
}


def function(operation: str) -> Function:
    """Return upstream's implementation of an operation; ImportError says why there is none."""
    package, module, name, options = FUNCTIONS[operation]
    return partial(getattr(importlib.import_module(package + module), name), **options)


def implementation(operation: str) -> str:
    """Return the name of upstream's package for an operation."""
    return FUNCTIONS[operation][0]


def package_version(operation: str) -> str:
    """Return the version of the package; what is built in place has none."""
    with contextlib.suppress(PackageNotFoundError):
        return version(implementation(operation))
    return "unknown"
