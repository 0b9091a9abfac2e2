"""What the packages of kernels share: operators of torch, launch options, and starts of Triton's kernels."""

__version__ = "0.2.0"
