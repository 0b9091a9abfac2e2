"""The compilers, and how each makes the code of one kernel, or of the emulator, for an architecture."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
Usage = dict[str, int]
"""What a kernel needs: `threads` of a block; `registers` and `spills` in bytes of a thread; `shared_static`;
`registers_needed`, `shared_base` and `shared_per_state_tile` as its LaunchSizes say, see launch_sizes.h."""


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
            said = f"exit status {done.returncode}\n{done.stderr}{done.stdout}"
            raise CompileError(f"{' '.join(command)}: {said}")
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
class Target:
    """How an architecture's code is made: `build` compiles and returns what each kernel needs.

    It takes the compiler, the flags, what selects a kernel, the folder of the sources and the file to make.
    """

    suffix: str
    needs: str
    compiler: Callable[[], Compiler | None]
    flags: tuple[str, ...]
    """Of the architecture."""
    common: tuple[str, ...]
    """Of all architectures of the compiler, for the preprocessor too."""
    build: Callable[[Compiler, Sequence[str], Sequence[str], Path, Path], dict[str, Usage]]
    overlaps: bool = False
    """Kernels wait by themselves for the kernel before, and may start while that one runs."""


def _nvidia(
    nvcc: Compiler, flags: Sequence[str], defines: Sequence[str], sources: Path, out: Path
) -> dict[str, Usage]:
    ptx = out.with_suffix(".ptx")
    virtual = [flag.replace("sm_", "compute_") for flag in flags]
    nvcc.run(*NVIDIA_FLAGS, *virtual, *defines, "-ptx", sources / "unit.cpp", "-o", ptx)
    log = "" if out == ptx else nvcc.run(*flags, "-cubin", "-Xptxas", "-v", ptx, "-o", out)
    return usage_of_nvidia(ptx.read_text(encoding="ascii"), log)


def usage_of_nvidia(ptx: str, log: str) -> dict[str, Usage]:
    """Return what a kernel needs by its PTX and by what `ptxas -v` printed, where it was assembled."""
    kernel = re.search(r"\.entry (\w+)\(", ptx)
    words = re.search(r"_launch\[12\](?: = \{([\d, ]+)\})?;", ptx)
    assert kernel is not None
    assert words is not None
    # Zeros at the end are left out.
    listed = bytes(map(int, filter(None, (words[1] or "").split(", ")))).ljust(12, b"\0")
    usage = {
        "threads": _number(r"\.maxntid (\d+)", ptx),
        "registers": _number(r"Used (\d+) registers", log),
        "spills": _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        "shared_static": _number(r"(\d+) bytes smem", log),
    }
    return {kernel[1]: usage | _launch(int.from_bytes(listed[i : i + 4], "little") for i in (0, 4, 8))}


def _amd(
    clang: Compiler, flags: Sequence[str], defines: Sequence[str], sources: Path, out: Path
) -> dict[str, Usage]:
    clang.run(*AMD_FLAGS, *flags, *defines, "-save-temps=obj", sources / "unit.cpp", "-o", out)
    (assembly,) = out.parent.glob("*.s")
    text = assembly.read_text(encoding="utf-8")
    fields = dict(re.findall(r"^    \.(\w+): +(\w+)$", text.partition(".amdgpu_metadata")[2], re.MULTILINE))
    (listed,) = re.findall(r"_launch:\n((?:\t\.(?:long|zero)\t.+\n)+)", text)
    words: list[int] = []
    for kind, number in re.findall(r"\.(long|zero)\t(\d+)", listed):
        words += [int(number)] if kind == "long" else [0] * (int(number) // 4)
    # A frame is also given to a kernel that keeps scalar registers in lanes of vector registers, and is then
    # never touched.
    touched = re.search(r"^\s+(scratch|buffer)_(load|store)", text, re.MULTILINE)
    frame = int(fields["private_segment_fixed_size"]) if touched else 0
    usage = {
        "threads": int(fields["max_flat_workgroup_size"]),
        "registers": int(fields["vgpr_count"]),
        # Into scratch, or into accumulators.
        "spills": max(frame, 4 * int(fields["vgpr_spill_count"])),
        "shared_static": int(fields["group_segment_fixed_size"]),
    }
    return {fields["name"]: usage | _launch(words)}


def _emulator(
    cxx: Compiler, flags: Sequence[str], _defines: Sequence[str], sources: Path, out: Path
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
    library = ctypes.CDLL(str(out))
    library.emulator_kernels.restype = ctypes.c_char_p
    found: dict[str, tuple[int, ...]] = {}
    # Each is listed for both sizes of warps, the larger ones serve both.
    for line in library.emulator_kernels().decode().splitlines():
        name, *sizes = line.split()
        found[name] = tuple(map(max, map(int, sizes), found.get(name, (0, 0, 0, 0))))
    return {
        name: {"threads": threads, "registers": 0, "spills": 0, "shared_static": 0} | _launch(words)
        for name, (threads, *words) in found.items()
    }


def _launch(words: Iterable[int]) -> Usage:
    return dict(zip(("registers_needed", "shared_base", "shared_per_state_tile"), words))


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


# sm_90a is sm_90 with what later GPUs are not promised to have, such as registers that warps hand on to each
# other; its code runs on 9.0 alone, which is all that there is of 9.x. It also waits by itself for the kernel
# before, so that a launch may overlap that one.
_NVCC = ("nvcc", nvidia_compiler)
_CLANG = ("clang 19 with lld, or hipcc", amd_compiler)
# The oldest that were tried on it.
_NEWER = ("clang 22 with lld, or hipcc 7", partial(amd_compiler, 22, 7))
TARGETS = {
    "sm_80": Target(".cubin", *_NVCC, ("-arch=sm_80",), NVIDIA_FLAGS, _nvidia),
    "sm_90": Target(".cubin", *_NVCC, ("-arch=sm_90a",), NVIDIA_FLAGS, _nvidia, overlaps=True),
    "ptx": Target(".ptx", *_NVCC, ("-arch=compute_80",), NVIDIA_FLAGS, _nvidia),
    "gfx90a": Target(".hsaco", *_CLANG, ("--offload-arch=gfx90a",), AMD_FLAGS, _amd),
    "gfx942": Target(".hsaco", *_CLANG, ("--offload-arch=gfx942",), AMD_FLAGS, _amd),
    "gfx950": Target(".hsaco", *_NEWER, ("--offload-arch=gfx950",), AMD_FLAGS, _amd),
    "cpu": Target(
        ".so", "a C++17 compiler", cpu_compiler, CPU_FLAGS, ("-DEMULATED_WARP_SIZE=32",), _emulator
    ),
}
