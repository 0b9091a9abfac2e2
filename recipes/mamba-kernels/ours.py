"""Our kernels by the backends that a device has, and the float64 reference that all are held to."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version as version_of

import torch
import twinrun_mamba
from operation import Function
from torch import Tensor
from twinrun_mamba import causal_conv1d_fn, causal_conv1d_update, mamba_chunk_scan_combined, selective_scan_fn
from twinrun_mamba.launch import describe
from twinrun_mamba.reference import selective_scan
from twinrun_mamba.reference_conv import conv_forward
from twinrun_mamba.registry import ArchitectureError

EMULATED = ("emulated-32", "emulated-64")
# Triton compiles its kernels where they run; all others are code objects of the package.
TRITON = "ssd"


def reference_scan(**tensors: Tensor) -> Tensor:
    """Return the scan in plain torch, one step after the other."""
    return selective_scan(**tensors, softplus=True)[0]


def reference_conv(**tensors: Tensor) -> Tensor:
    """Return the convolution in plain torch, a product for each step of the filter."""
    return conv_forward(**tensors, silu=True)[0]


# By operation, what runs where there is no kernel: operations of torch, one after the other.
EAGER = {"scan": reference_scan}


def backends(device: torch.device, operation: str) -> tuple[str, ...]:
    """Return what runs here: on a processor the emulated kernels, and without those the reference."""
    if device.type != "cpu":
        return ("native",)
    if operation == TRITON:
        return ("reference",)
    try:
        for backend in EMULATED:
            describe(device, backend)
    except ArchitectureError as error:
        print(f"the kernels are not run, only their reference: {error}")
        return ("reference",)
    return EMULATED


def function(operation: str, backend: str) -> Function:
    """Return our implementation of an operation."""
    functions = {
        "scan": partial(selective_scan_fn, delta_softplus=True),
        "conv": partial(causal_conv1d_fn, activation="silu"),
        "update": partial(causal_conv1d_update, activation="silu"),
        "ssd": partial(mamba_chunk_scan_combined, dt_softplus=True),
    }
    return partial(functions[operation], backend=backend)


def implementation(device: torch.device, operation: str, backend: str) -> str:
    """Return the name in records: package, backend, architecture and a hash of its sources.

    Of what Triton compiles, the name says which Triton.
    """
    if operation == TRITON:
        compiled_by = f"triton-{version_of('triton')}" if backend == "native" else "torch"
        return f"twinrun-mamba {backend} {compiled_by}"
    found = describe(device, backend)
    return " ".join(filter(None, ("twinrun-mamba", backend, found["arch"], found["sources"])))


def version() -> str:
    """Return the version of the package that was imported."""
    return str(twinrun_mamba.__version__)
