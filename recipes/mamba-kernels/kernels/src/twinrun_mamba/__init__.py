"""Mamba-1's selective scan and causal convolution: one kernel source for AMD and NVIDIA GPUs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinrun_mamba.conv import causal_conv1d_fn, causal_conv1d_update
    from twinrun_mamba.inner import mamba_inner_fn
    from twinrun_mamba.installation import Installation, InstallError, install, uninstall
    from twinrun_mamba.launch import BACKENDS, describe
    from twinrun_mamba.packing import index_of
    from twinrun_mamba.registry import ArchitectureError
    from twinrun_mamba.scan import selective_scan_fn, selective_state_update
    from twinrun_mamba.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
    from twinrun_mamba.validation import ArgumentError, ArgumentTypeError

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "ArchitectureError",
    "ArgumentError",
    "ArgumentTypeError",
    "InstallError",
    "Installation",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "describe",
    "index_of",
    "install",
    "mamba_chunk_scan_combined",
    "mamba_inner_fn",
    "mamba_split_conv1d_scan_combined",
    "selective_scan_fn",
    "selective_state_update",
    "uninstall",
]
_MODULES = {
    "conv": ("causal_conv1d_fn", "causal_conv1d_update"),
    "inner": ("mamba_inner_fn",),
    "installation": ("InstallError", "Installation", "install", "uninstall"),
    "launch": ("BACKENDS", "describe"),
    "packing": ("index_of",),
    "registry": ("ArchitectureError",),
    "scan": ("selective_scan_fn", "selective_state_update"),
    "ssd": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    "validation": ("ArgumentError", "ArgumentTypeError"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `twinrun_mamba.compile` runs without torch."""
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
