"""Mamba-2's SSD in Triton: one kernel source for AMD and NVIDIA GPUs, deterministic both ways."""

from twinrun_mamba.ssd.api import mamba_chunk_scan_combined

__all__ = ["mamba_chunk_scan_combined"]
