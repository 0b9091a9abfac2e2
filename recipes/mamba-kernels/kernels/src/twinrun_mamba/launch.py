"""Which backend serves a device, and starting kernels on it.

A result has the same bits on every device. So whatever decides the order of a sum, such as the parts into
which time and batch go, is a function of sizes and of numbers that are the same everywhere: those stand in
scan_kernels.py and conv_kernels.py. `Timing` is what decides time alone, by architecture.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

import torch

from twinrun_mamba.drivers import Driver, Handle, Launch, LaunchError, driver
from twinrun_mamba.registry import (
    ArchitectureError,
    CodeObject,
    code_object_of,
    code_objects,
    folder,
    sources_of,
)
from twinrun_mamba.validation import ArgumentError, one_of

BACKENDS = ("native", "ptx", "reference", "emulated-32", "emulated-64")

logger = logging.getLogger("twinrun_mamba")


@dataclass(frozen=True)
class Timing:
    """What changes how long a launch takes, and no bit of what it computes."""

    # While a first kernel has blocks on some multiprocessors, those of one that overlaps it gather on the
    # others, which takes longer than it saves unless there is room for all of both, or so many that they are
    # everywhere.
    overlap_room: int
    overlap_many: int
    # Elements of a convolution from which a lane does many steps, which is less work; fewer make enough
    # blocks of a small tensor. Aligned rows must be long, too, and of 16 bits five times as many.
    medium_elements: int
    large_elements: int
    long_row: int


# An H200, of 132 multiprocessors.
MEASURED = Timing(
    overlap_room=132, overlap_many=330, medium_elements=2**21, large_elements=2**22, long_row=2048
)
# Architectures that were measured; the others are launched as the first is.
TIMING: Mapping[str, Timing] = MappingProxyType({"sm_90": MEASURED})


def timing(arch: str) -> Timing:
    """Return what holds for an architecture as kernels.json names it."""
    return TIMING.get(arch, MEASURED)


@dataclass(frozen=True)
class Launcher:
    """Starts kernels of one code object on one device."""

    code_object: CodeObject
    driver: Driver
    index: int
    _ready: dict[tuple[str, int], tuple[Handle, int, int]] = field(default_factory=dict)

    def __call__(
        self, name: str, blocks: int, params: bytes, states: int = 0, *, overlap: bool = False
    ) -> None:
        """Start a kernel on torch's current stream; `params` is the struct that the kernel takes.

        With `overlap` it may start while the kernel before it runs, where code object and driver can: for
        what follows at once on a kernel of this package, and reads nothing else that is being written.
        """
        function, threads, shared = self._ready.get((name, states)) or self._prepare(name, states)
        if blocks > self.driver.most_blocks or blocks * threads > self.driver.most_threads:
            most = min(self.driver.most_blocks, self.driver.most_threads // threads)
            raise LaunchError(f"{name}: {blocks} blocks of {threads} threads, at most {most} blocks")
        overlap = overlap and self.code_object.overlaps
        launch = Launch(function, blocks, threads, shared, params, overlap)
        self.driver.launch(self.index, launch)

    def _prepare(self, name: str, states: int) -> tuple[Handle, int, int]:
        kernel = self.code_object.kernel(name)
        shared = kernel.shared_bytes(states)
        # The allowance belongs to the function, so asking for less must not take it from another size.
        most = max([shared, *(ready[2] for (other, _), ready in self._ready.items() if other == name)])
        function = self.driver.function(self.index, kernel.path, name, most)
        self._ready[name, states] = function, kernel.threads, shared
        return self._ready[name, states]


@cache
def launcher(backend: str, device: torch.device) -> Launcher | None:
    """Return what launches kernels for a backend on a device, None for the reference; logged once.

    An empty name leaves the choice to TWINRUN_MAMBA_BACKEND, and else to the device.
    """
    chosen, reason = _chosen(backend, device)
    one_of("backend", chosen, BACKENDS)
    if chosen == "reference":
        logger.info("reference on %s: %s", device, reason)
        return None
    made = _emulated(chosen, device) if chosen.startswith("emulated") else _native(chosen, device)
    logger.info("%s on %s: %s, %s", chosen, device, made.code_object.arch, reason)
    return made


def describe(device: torch.device | str, backend: str | None = None) -> dict[str, str]:
    """Return what serves a device, for a run's record: backend, architecture, sources."""
    device = torch.empty(0, device=device).device
    chosen, reason = _chosen(backend or "", device)
    made = launcher(backend or "", device)
    arch = "" if made is None else made.code_object.arch
    return {"backend": chosen, "reason": reason, "arch": arch, "sources": sources_of(arch)}


def _chosen(backend: str, device: torch.device) -> tuple[str, str]:
    if backend:
        return backend, "asked for"
    if preset := os.environ.get("TWINRUN_MAMBA_BACKEND"):
        return preset, "TWINRUN_MAMBA_BACKEND"
    if device.type == "cuda":
        return "native", "the tensors are on a GPU"
    return "reference", f"the tensors are on {device.type}"


def _emulated(backend: str, device: torch.device) -> Launcher:
    if device.type != "cpu":
        raise ArgumentError("backend", f"{backend} for tensors on {device}", "tensors on the CPU")
    built = code_objects(folder())
    if "cpu" not in built:
        raise ArchitectureError(f"no emulator is built, only {', '.join(built)}")
    return Launcher(built["cpu"], driver(backend.removeprefix("emulated-")), 0)


def _native(backend: str, device: torch.device) -> Launcher:
    if device.type != "cuda":
        raise ArgumentError(
            "backend", f"{backend} for tensors on {device}", '"reference", or tensors on a GPU'
        )
    return Launcher(code_object_of(device, ptx=backend == "ptx"), driver("gpu"), device.index or 0)
