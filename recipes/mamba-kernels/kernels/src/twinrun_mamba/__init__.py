"""Mamba-1's selective scan and causal convolution: one kernel source for AMD and NVIDIA GPUs."""

from twinrun_mamba.conv import causal_conv1d_fn, causal_conv1d_update
from twinrun_mamba.inner import mamba_inner_fn
from twinrun_mamba.launch import BACKENDS, describe
from twinrun_mamba.packing import index_of
from twinrun_mamba.registry import ArchitectureError
from twinrun_mamba.scan import selective_scan_fn, selective_state_update
from twinrun_mamba.validation import ArgumentError, ArgumentTypeError

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "ArchitectureError",
    "ArgumentError",
    "ArgumentTypeError",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "describe",
    "index_of",
    "mamba_inner_fn",
    "selective_scan_fn",
    "selective_state_update",
]
