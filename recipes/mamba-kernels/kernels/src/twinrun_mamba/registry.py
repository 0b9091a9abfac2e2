"""The compiled kernels that this package carries, and which of them a device can run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

# Names the folder of compiled code, in place of the package's own.
OBJECTS = "TWINRUN_MAMBA_OBJECTS"


class ArchitectureError(RuntimeError):
    """No compiled kernel runs on this device."""


@dataclass(frozen=True)
class Kernel:
    """How a kernel is launched, as its compiler recorded it."""

    threads: int
    shared_base: int
    shared_per_state_tile: int

    def shared_bytes(self, states: int) -> int:
        """Return the dynamic shared memory of a block in bytes; a state tile is 16 states."""
        return self.shared_base + self.shared_per_state_tile * -(-states // 16)


@dataclass(frozen=True)
class CodeObject:
    """The code object of one architecture."""

    arch: str
    path: Path
    kernels: Mapping[str, Kernel]
    # Its kernels wait by themselves for the kernel before, and may start while that one runs.
    overlaps: bool = False

    def kernel(self, name: str) -> Kernel:
        """Return a kernel; ArchitectureError when this object lacks it."""
        if name not in self.kernels:
            raise ArchitectureError(f"{self.path.name} has no kernel {name}, has {', '.join(self.kernels)}")
        return self.kernels[name]


def folder() -> Path:
    """Return where code objects lie: TWINRUN_MAMBA_OBJECTS, else in the package."""
    return Path(os.environ.get(OBJECTS) or Path(__file__).with_name("objects"))


@cache
def code_objects(where: Path) -> dict[str, CodeObject]:
    """Return the code objects of a folder by architecture; `ptx` and `cpu` are such."""
    index = where / "kernels.json"
    if not index.is_file():
        raise ArchitectureError(f'{index} does not exist: no kernel is built; allowed: backend="reference"')
    found = json.loads(index.read_text(encoding="utf-8"))["archs"]
    return {arch: _target(arch, where, entry) for arch, entry in found.items()}


def code_object_of(device: torch.device, *, ptx: bool = False) -> CodeObject:
    """Return the code object that a GPU runs, or the PTX that its driver compiles if asked to."""
    built, arch = code_objects(folder()), architecture(device)
    chosen = "ptx" if ptx and torch.version.hip is None else compatible(arch, list(built))
    if chosen in built:
        return built[chosen]
    ways = 'backend="reference"'
    if "ptx" in built and torch.version.hip is None:
        ways = f'backend="ptx" (compiled by the driver when first used) or {ways}'
    listed = ", ".join(sorted(set(built) - {"cpu"})) or "none"
    raise ArchitectureError(f"{device} is {arch}, kernels are built for {listed}; allowed: {ways}")


def architecture(device: torch.device) -> str:
    """Return a GPU's architecture as compilers name it: sm_90, gfx90a."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is None:
        return f"sm_{properties.major}{properties.minor}"
    # Features follow the name, as in gfx90a:sramecc+:xnack-.
    return str(properties.gcnArchName).partition(":")[0]


def compatible(arch: str, built: list[str]) -> str | None:
    """Return the built architecture whose code `arch` runs: its own, or an older one of its generation.

    Binary compatibility: code for sm_80 runs on every sm_8x from sm_80 on; AMD's runs on its own alone.
    """
    if arch in built:
        return arch
    wanted = _compute_capability(arch)
    if wanted is None:
        return None
    older = [other for name in built if (other := _compute_capability(name)) and other <= wanted]
    same = [pair for pair in older if pair[0] == wanted[0]]
    return f"sm_{max(same)[0]}{max(same)[1]}" if same else None


def _compute_capability(arch: str) -> tuple[int, int] | None:
    # sm_90a and the like run on exactly that architecture. What is listed as sm_90 is compiled as sm_90a:
    # there is no other 9.x.
    match = re.fullmatch(r"sm_(\d+)(\d)", arch)
    return (int(match[1]), int(match[2])) if match else None


def _target(arch: str, where: Path, entry: Mapping[str, object]) -> CodeObject:
    kernels = entry["kernels"]
    assert isinstance(kernels, dict)
    fields = ("threads", "shared_base", "shared_per_state_tile")
    read = {
        name: Kernel(**{field: int(values[field]) for field in fields}) for name, values in kernels.items()
    }
    return CodeObject(arch, where / str(entry["object"]), read, overlaps=entry.get("overlaps") is True)
