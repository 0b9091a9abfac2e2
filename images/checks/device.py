"""The device that a check runs on: a GPU where the machine has one, else the processor."""

from __future__ import annotations

import os
import platform

import torch


def device_count() -> int:
    """Return how many GPUs there are; ends the check when PyTorch does not see those of the machine."""
    expected, found = int(os.environ.get("TWINRUN_DEVICES", "0")), torch.cuda.device_count()
    if found != expected:
        raise SystemExit(f"PyTorch {torch.__version__} sees {found} GPUs, the machine has {expected}")
    return found


def first_device() -> torch.device:
    """Return the first GPU, or the processor."""
    return torch.device("cuda", 0) if device_count() else torch.device("cpu")


def named(device: torch.device) -> str:
    """Return `device` as a log names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
