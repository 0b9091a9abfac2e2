"""Mamba-2's SSD in Triton: one kernel source for AMD and NVIDIA GPUs, deterministic both ways."""

from twinrun_mamba.ssd.api import mamba_chunk_scan_combined
from twinrun_mamba.ssd.split import mamba_split_conv1d_scan_combined
from twinrun_mamba.ssd.step import selective_state_update

__all__ = ["mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined", "selective_state_update"]
