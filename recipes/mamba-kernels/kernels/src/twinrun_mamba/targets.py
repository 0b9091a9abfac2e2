"""The compilers, and how each makes the code of one kernel for an architecture."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from twinrun_mamba.resources import Usage, usage_of_amd, usage_of_cubin, usage_of_ptx
from twinrun_mamba.units import LISTING, Unit, units_of

GPU_ARCHS = ("sm_80", "sm_90", "ptx", "gfx90a", "gfx942", "gfx950")
# The emulator is for tests, and code of the machine that it was built on: wheels do without.
ARCHS = (*GPU_ARCHS, "cpu")
WARP_SIZES = (32, 64)

NVIDIA_FLAGS = ("-x", "cu", "-std=c++17", "-O3")
AMD_FLAGS = (
    *("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    # Version 5 is what ROCm 5.7 and newer load.
    *("-mcode-object-version=5", "-std=c++17", "-O3"),
    # A symbol of the code object would hold a hash of the output's path.
    "-fuse-cuid=none",
)
CPU_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas")


class CompileError(RuntimeError):
    """A compiler is missing or refused the source; says which and what it printed."""


@dataclass(frozen=True)
class Compiler:
    """A program that compiles for some architectures."""

    path: str
    version: str

    @property
    def release(self) -> str:
        """Return the line of its version that names the release."""
        lines = self.version.splitlines()
        return next((line for line in reversed(lines) if "release" in line), lines[0])

    @classmethod
    def first_of(cls, candidates: Iterable[str | None]) -> Compiler | None:
        """Return the first candidate that is there and answers --version."""
        for candidate in candidates:
            path = shutil.which(candidate) if candidate else None
            if path:
                answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
                if answer.returncode == 0:
                    return cls(path, answer.stdout.strip())
        return None

    def run(self, *arguments: str | Path) -> str:
        """Return what the compiler printed."""
        command = [self.path, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileError(
                f"{' '.join(command)}: exit status {done.returncode}\n{done.stderr}{done.stdout}"
            )
        return done.stderr + done.stdout


def nvidia_compiler() -> Compiler | None:
    """Return nvcc from NVCC, the PATH or NVIDIA's packages from PyPI."""
    packaged = [str(path) for entry in sys.path for path in sorted(Path(entry).glob("nvidia/*/bin/nvcc"))]
    return Compiler.first_of([os.environ.get("NVCC"), "nvcc", *packaged])


def amd_compiler(oldest: int = 19, oldest_hip: int = 0) -> Compiler | None:
    """Return clang with its linker, from TWINRUN_AMD_COMPILER or the PATH, or hipcc, none of them older."""
    clangs = [f"clang-{n}" for n in range(oldest, 30) if shutil.which(f"ld.lld-{n}")]
    plain = ["clang"] if shutil.which("ld.lld") and _major("clang") >= oldest else []
    hip = ["hipcc"] if _major("hipcc", r"HIP version: (\d+)") >= oldest_hip else []
    return Compiler.first_of([os.environ.get("TWINRUN_AMD_COMPILER"), *clangs, *plain, *hip])


def cpu_compiler() -> Compiler | None:
    """Return the C++ compiler from CXX or the PATH."""
    return Compiler.first_of([os.environ.get("CXX"), "c++", "g++", "clang++"])


def _major(program: str, pattern: str = r"version (\d+)") -> int:
    compiler = Compiler.first_of([program])
    match = re.search(pattern, compiler.version) if compiler else None
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class BuildTarget:
    """How an architecture's kernels are made: `build` compiles a unit and returns what its kernels need."""

    arch: str
    suffix: str
    needs: str
    compiler: Callable[[], Compiler | None]
    flags: Sequence[str]
    listing: Sequence[str]
    build: Callable[[Compiler, Sequence[str], Path, Unit, Path], dict[str, Usage]]
    entry: Mapping[str, list[int] | bool] = field(default_factory=dict)
    # All kernels are one unit, else each is.
    whole: bool = False
    # Its kernels are written to fit into registers; where a compiler lacks some, that is said.
    fits: bool = False

    def units(self, compiler: Compiler, sources: Path) -> list[Unit]:
        """Return the units that the sources have; CompileError where they have no kernel."""
        text = compiler.run(*self.listing, "-E", "-DLIST_KERNELS", sources / LISTING)
        found = units_of(text)
        if not found:
            raise CompileError(f"{sources / LISTING}: defines no kernel")
        return [Unit(tuple(unit.name for unit in found), LISTING)] if self.whole else found


def _build_ptx(
    nvcc: Compiler, flags: Sequence[str], sources: Path, unit: Unit, out: Path
) -> dict[str, Usage]:
    nvcc.run(*NVIDIA_FLAGS, *flags, *unit.defines, "-ptx", sources / "unit.cpp", "-o", out)
    return usage_of_ptx(out.read_text(encoding="ascii"))


def _build_cubin(
    nvcc: Compiler, flags: Sequence[str], sources: Path, unit: Unit, out: Path
) -> dict[str, Usage]:
    ptx = out.with_suffix(".ptx")
    virtual = [flag.replace("sm_", "compute_") for flag in flags]
    _build_ptx(nvcc, virtual, sources, unit, ptx)
    log = nvcc.run(*flags, "-cubin", "-Xptxas", "-v", ptx, "-o", out)
    return usage_of_cubin(ptx.read_text(encoding="ascii"), log)


def _build_hsaco(
    clang: Compiler, flags: Sequence[str], sources: Path, unit: Unit, out: Path
) -> dict[str, Usage]:
    clang.run(*AMD_FLAGS, *flags, *unit.defines, "-save-temps=obj", sources / "unit.cpp", "-o", out)
    (assembly,) = out.parent.glob("*.s")
    return usage_of_amd(assembly.read_text(encoding="utf-8"))


def _build_emulated(
    cxx: Compiler, flags: Sequence[str], sources: Path, _unit: Unit, out: Path
) -> dict[str, Usage]:
    """Compile all kernels for both sizes of warps, side by side, and the emulator that runs them."""
    made = {
        out.with_name(f"warp{size}.o"): (f"-DEMULATED_WARP_SIZE={size}", sources / "emulated_kernels.cpp")
        for size in WARP_SIZES
    }
    made[out.with_name("emulator.o")] = ("-DNDEBUG", sources / "emulator.cpp")
    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(lambda path: cxx.run(*flags, *made[path], "-c", "-o", path), made))
    cxx.run("-shared", "-s", *made, "-o", out, "-pthread", "-lstdc++")
    return usage_of_emulator(out)


def usage_of_emulator(path: Path) -> dict[str, Usage]:
    """Return the emulator's kernels: it lists each for both sizes of warps, the larger ones serve both."""
    library = ctypes.CDLL(str(path))
    library.emulator_kernels.restype = ctypes.c_char_p
    found: dict[str, tuple[int, ...]] = {}
    for line in library.emulator_kernels().decode().splitlines():
        name, *sizes = line.split()
        found[name] = tuple(map(max, map(int, sizes), found.get(name, (0, 0, 0, 0))))
    return {
        name: Usage(threads, registers_needed=needed, shared_base=base, shared_per_state_tile=a_tile)
        for name, (threads, needed, base, a_tile) in found.items()
    }


def _build_targets() -> dict[str, BuildTarget]:
    # sm_90a is sm_90 with what later GPUs are not promised to have, such as registers that warps hand on to
    # each other; its code runs on 9.0 alone, which is all that there is of 9.x.
    # It also waits by itself for the kernel before, so that a launch may overlap that one.
    nvcc = ("nvcc", nvidia_compiler)
    cubins = [
        BuildTarget(arch, ".cubin", *nvcc, (f"-arch={real}",), NVIDIA_FLAGS, _build_cubin, entry)
        for arch, real, entry in (("sm_80", "sm_80", {}), ("sm_90", "sm_90a", {"overlaps": True}))
    ]
    clang = ("clang 19 with lld, or hipcc", amd_compiler)
    # The oldest that were tried on it.
    newer = ("clang 22 with lld, or hipcc 7", partial(amd_compiler, 22, 7))
    code_objects = [
        BuildTarget(
            arch=arch,
            suffix=".hsaco",
            needs=needs,
            compiler=found,
            flags=(f"--offload-arch={arch}",),
            listing=(*AMD_FLAGS, f"--offload-arch={arch}"),
            build=_build_hsaco,
            fits=True,
        )
        for arch, (needs, found) in (("gfx90a", clang), ("gfx942", clang), ("gfx950", newer))
    ]
    ptx = BuildTarget("ptx", ".ptx", *nvcc, ("-arch=compute_80",), NVIDIA_FLAGS, _build_ptx)
    cxx = ("a C++17 compiler", cpu_compiler)
    listing, sizes = ("-DEMULATED_WARP_SIZE=32",), {"warp_sizes": list(WARP_SIZES)}
    cpu = BuildTarget("cpu", ".so", *cxx, CPU_FLAGS, listing, _build_emulated, sizes, whole=True)
    return {target.arch: target for target in (*cubins, ptx, *code_objects, cpu)}


TARGETS = _build_targets()
