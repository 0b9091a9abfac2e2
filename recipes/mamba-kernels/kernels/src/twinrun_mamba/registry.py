"""The compiled kernels, and which of them a device can run; a missing one is compiled when it is called."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from twinrun_mamba import compile as compiler
from twinrun_mamba import units
from twinrun_mamba.targets import TARGETS, CompileError
from twinrun_mamba.units import Unit

# Names the folder of compiled code, in place of the package's own.
OBJECTS = "TWINRUN_MAMBA_OBJECTS"

logger = logging.getLogger("twinrun_mamba")


class ArchitectureError(RuntimeError):
    """No compiled kernel runs on this device."""


@dataclass(frozen=True)
class Kernel:
    """How a kernel is launched, as its compiler recorded it."""

    threads: int
    shared_base: int
    shared_per_state_tile: int
    # The file of its code.
    path: Path = Path()

    def shared_bytes(self, states: int) -> int:
        """Return the dynamic shared memory of a block in bytes; a state tile is 16 states."""
        return self.shared_base + self.shared_per_state_tile * -(-states // 16)


@dataclass(frozen=True, eq=False)
class CodeObject:
    """The kernels of one architecture, in a folder of compiled code; what it lacks is compiled."""

    arch: str
    objects: Path
    _found: dict[str, Kernel] = field(default_factory=dict)

    @property
    def overlaps(self) -> bool:
        """Whether kernels wait by themselves for the kernel before, and may start while that one runs."""
        return TARGETS[self.arch].overlaps

    def kernel(self, name: str) -> Kernel:
        """Return a kernel; ArchitectureError when there is none of this name, or it cannot be compiled."""
        if name not in self._found:
            unit = Unit.of(self.arch, name, units.SOURCES)
            places = (self.objects, cache_folder())
            objects = next((one for one in places if unit.read(one)), None) or self._compile(name)
            entry = unit.read(objects)
            usage = entry["kernels"].get(name)
            if usage is None:
                raise ArchitectureError(f"{self.arch} has no kernel {name}")
            sizes = {key: usage[key] for key in ("threads", "shared_base", "shared_per_state_tile")}
            self._found[name] = Kernel(**sizes, path=objects / self.arch / entry["object"])
        return self._found[name]

    def _compile(self, name: str) -> Path:
        """Compile a kernel with those that are called with it; return the folder in which they are."""
        found = TARGETS[self.arch].compiler()
        names = units.kernels_of(self.arch, found, units.SOURCES) if found else []
        if name not in names:
            why = "it has none of this name" if names else f"needs {TARGETS[self.arch].needs}, found none"
            raise ArchitectureError(f"no kernel {name} for {self.arch}: {why}")
        objects = self.objects if _is_writable(self.objects) else cache_folder()
        wanted = [Unit.of(self.arch, one, units.SOURCES) for one in units.called_together(name, names)]
        try:
            compiler.make(wanted, sources=units.SOURCES, objects=objects, say=logger.warning)
        except CompileError as error:
            raise ArchitectureError(f"{name} cannot be compiled for {self.arch}: {error}") from error
        return objects


def folder() -> Path:
    """Return where code objects lie: TWINRUN_MAMBA_OBJECTS, else in the package."""
    return Path(os.environ.get(OBJECTS) or compiler.OBJECTS)


def sources_of(arch: str) -> str:
    """Return the start of a hash of an architecture's sources."""
    return units.digest(units.SOURCES, units.LISTING, (arch, *TARGETS[arch].flags))[:12] if arch else ""


def cache_folder() -> Path:
    """Return where kernels are compiled to when their own folder cannot be written."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinrun_mamba"


def _is_writable(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return os.access(there, os.W_OK)


@cache
def code_objects(where: Path) -> dict[str, CodeObject]:
    """Return the code objects of a folder by architecture; `ptx` and `cpu` are such.

    The package's own folder also has those whose compiler is here: their kernels are compiled when called.
    """
    index = where / compiler.INDEX
    found = [*compiler.read_index(where)["archs"]] if index.is_file() else []
    if where == compiler.OBJECTS:
        found += [arch for arch, target in TARGETS.items() if arch not in found and target.compiler()]
    if not found and not index.is_file():
        raise ArchitectureError(f'{index} does not exist: no kernel is built; allowed: backend="reference"')
    return {arch: CodeObject(arch, where) for arch in found}


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
