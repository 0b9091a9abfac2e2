"""The device of this rank and the software that drives it, as found."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version

import torch

from twinrun.protocol.job import Job
from twinrun.train import node, rank

# Distribution names, by the name a record uses.
DISTRIBUTIONS = {
    "torch": ("torch",),
    "composer": ("mosaicml",),
    "deepspeed": ("deepspeed",),
    "torchao": ("torchao",),
    "streaming": ("mosaicml-streaming",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "numpy": ("numpy",),
}


def device_of(job: Job) -> torch.device:
    """Return this rank's device and make it the current one."""
    if not job.accelerator:
        return torch.device("cpu")
    device = torch.device("cuda", rank.variable("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name(device: torch.device) -> str:
    """Return the device's model name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return node.processor()


def memory_bytes(device: torch.device) -> int:
    """Return the memory `device` has, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held so far, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def libraries(device: torch.device) -> dict[str, str]:
    """Return the versions of what computes and communicates; absent packages are left out."""
    found = {"python": platform.python_version(), "collectives": collectives(device)}
    for label, distributions in DISTRIBUTIONS.items():
        for distribution in distributions:
            try:
                found.setdefault(label, version(distribution))
            except PackageNotFoundError:
                continue
    found["torch"] = torch.__version__
    return found


def collectives(device: torch.device) -> str:
    """Return name and version of the library ranks would exchange gradients with."""
    if device.type == "cpu":
        return f"Gloo of PyTorch {torch.__version__}"
    library = "RCCL" if torch.version.hip else "NCCL"
    numbers: object = torch.cuda.nccl.version()
    return f"{library} {'.'.join(map(str, numbers)) if isinstance(numbers, tuple) else numbers}"
