"""Compile the kernels into code objects: `python -m twinrun_mamba.compile --archs sm_90 gfx90a cpu`.

One source, three compilers: nvcc makes cubins and PTX, clang (19 or newer, with its lld) or hipcc makes AMD
code objects without ROCm, any C++17 compiler makes the emulator. No GPU is needed. What the same compiler has
made before, with the same flags from the same source, is kept.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinrun_mamba import resources
from twinrun_mamba.resources import Usage, usage_of_cubin, usage_of_hsaco, usage_of_ptx

SOURCES = Path(__file__).resolve().parents[2] / "csrc"
OBJECTS = Path(__file__).resolve().parent / "objects"
VARIABLE = "TWINRUN_KERNEL_ARCHS"
GPU_ARCHS = ("sm_80", "sm_90", "ptx", "gfx90a", "gfx942")
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


def amd_compiler() -> Compiler | None:
    """Return clang with its linker, from TWINRUN_AMD_COMPILER or the PATH, or hipcc."""
    clangs = [f"clang-{n}" for n in range(19, 30) if shutil.which(f"ld.lld-{n}")]
    plain = ["clang"] if shutil.which("ld.lld") and _major("clang") >= 19 else []
    return Compiler.first_of([os.environ.get("TWINRUN_AMD_COMPILER"), *clangs, *plain, "hipcc"])


def cpu_compiler() -> Compiler | None:
    """Return the C++ compiler from CXX or the PATH."""
    return Compiler.first_of([os.environ.get("CXX"), "c++", "g++", "clang++"])


def _major(program: str) -> int:
    compiler = Compiler.first_of([program])
    match = re.search(r"version (\d+)", compiler.version) if compiler else None
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class BuildTarget:
    """How an architecture's code object is made: `build` writes it and returns its kernels."""

    arch: str
    object: str
    needs: str
    compiler: Callable[[], Compiler | None]
    flags: Sequence[str]
    build: Callable[[Compiler, Sequence[str], Path, Path], dict[str, Usage]]
    entry: Mapping[str, list[int] | bool] = field(default_factory=dict)


def _build_ptx(nvcc: Compiler, flags: Sequence[str], sources: Path, out: Path) -> dict[str, Usage]:
    nvcc.run(*NVIDIA_FLAGS, *flags, "-ptx", sources / "kernels.cpp", "-o", out)
    return usage_of_ptx(out.read_text(encoding="ascii"))


def _build_cubin(nvcc: Compiler, flags: Sequence[str], sources: Path, out: Path) -> dict[str, Usage]:
    ptx = out.with_suffix(".ptx")
    virtual = [flag.replace("sm_", "compute_") for flag in flags]
    _build_ptx(nvcc, virtual, sources, ptx)
    log = nvcc.run(*flags, "-cubin", "-Xptxas", "-v", ptx, "-o", out)
    return usage_of_cubin(ptx.read_text(encoding="ascii"), log)


def _build_hsaco(clang: Compiler, flags: Sequence[str], sources: Path, out: Path) -> dict[str, Usage]:
    clang.run(*AMD_FLAGS, *flags, sources / "kernels.cpp", "-o", out)
    return usage_of_hsaco(out)


def _build_emulator(cxx: Compiler, flags: Sequence[str], sources: Path, out: Path) -> dict[str, Usage]:
    units = {f"warp{size}.o": ("emulated_kernels.cpp", f"-DEMULATED_WARP_SIZE={size}") for size in WARP_SIZES}
    units["emulator.o"] = ("emulator.cpp", "-DNDEBUG")
    with ThreadPoolExecutor(len(units)) as pool:
        jobs = [
            pool.submit(cxx.run, *flags, define, "-c", sources / source, "-o", out.parent / name)
            for name, (source, define) in units.items()
        ]
        for job in jobs:
            job.result()
    cxx.run("-shared", *[out.parent / name for name in units], "-o", out, "-pthread", "-lstdc++")
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
    cubins = [
        BuildTarget(arch, f"{arch}.cubin", "nvcc", nvidia_compiler, (f"-arch={real}",), _build_cubin, entry)
        for arch, real, entry in (("sm_80", "sm_80", {}), ("sm_90", "sm_90a", {"overlaps": True}))
    ]
    clang = "clang 19 with lld, or hipcc"
    code_objects = [
        BuildTarget(arch, f"{arch}.hsaco", clang, amd_compiler, (f"--offload-arch={arch}",), _build_hsaco)
        for arch in ("gfx90a", "gfx942")
    ]
    ptx = BuildTarget("ptx", "compute_80.ptx", "nvcc", nvidia_compiler, ("-arch=compute_80",), _build_ptx)
    warp_sizes = {"warp_sizes": list(WARP_SIZES)}
    cpu = BuildTarget(
        "cpu", "emulator.so", "a C++17 compiler", cpu_compiler, CPU_FLAGS, _build_emulator, warp_sizes
    )
    return {target.arch: target for target in (*cubins, ptx, *code_objects, cpu)}


TARGETS = _build_targets()


def _described(kernels: dict[str, Usage]) -> dict[str, dict[str, int]]:
    """Return the kernels as kernels.json lists them; CompileError where one lacks registers it needs."""
    for name, usage in kernels.items():
        if usage.registers_needed not in (0, usage.registers):
            needed = f"needs {usage.registers_needed}, as its LaunchSizes say"
            raise CompileError(f"{name} is compiled with {usage.registers} registers, {needed}")
    return {name: usage.as_dict() for name, usage in sorted(kernels.items())}


def build(
    archs: Sequence[str],
    *,
    sources: Path = SOURCES,
    objects: Path = OBJECTS,
    jobs: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, str]:
    """Make the code objects of some architectures and kernels.json; return why others could not be made.

    Raises CompileError when an architecture is not known or a compiler refuses the source; what was there
    before for that architecture stays.
    """
    unknown = sorted(set(archs) - set(TARGETS))
    if unknown:
        raise CompileError(
            f"architectures: {', '.join(unknown)}; allowed: {', '.join(TARGETS)}; "
            "hint: ptx serves NVIDIA's newer GPUs, whose driver compiles it"
        )
    objects.mkdir(parents=True, exist_ok=True)
    index = objects / "kernels.json"
    built = read_index(objects)["archs"] if index.is_file() else {}
    compilers = {arch: TARGETS[arch].compiler() for arch in archs}
    missing = {arch: f"needs {TARGETS[arch].needs}, found none" for arch in archs if compilers[arch] is None}
    with (
        tempfile.TemporaryDirectory(dir=objects) as scratch,
        ThreadPoolExecutor(jobs or os.cpu_count()) as pool,
    ):
        waiting = {}
        for arch, compiler in compilers.items():
            target = TARGETS[arch]
            if compiler is None:
                built.pop(arch, None)
                continue
            key = _key(target, compiler, sources)
            if built.get(arch, {}).get("key") == key and (objects / target.object).is_file():
                say(f"{arch}: {target.object} is up to date")
                continue
            say(f"{arch}: {compiler.path} makes {target.object}")
            waiting[arch] = pool.submit(_make, target, compiler, key, sources, Path(scratch, arch))
        made, refused = {}, []
        for arch, job in waiting.items():
            try:
                made[arch] = job.result()
            except CompileError as error:
                refused.append(str(error))
        for arch in made:
            Path(scratch, arch, TARGETS[arch].object).replace(objects / TARGETS[arch].object)
    built |= made
    _write(index, {"archs": {arch: built[arch] for arch in TARGETS if arch in built}, "missing": missing})
    if refused:
        raise CompileError("\n".join(refused))
    return missing


def read_index(objects: Path) -> Any:
    """Return the content of kernels.json."""
    return json.loads((objects / "kernels.json").read_text(encoding="utf-8"))


def prune(objects: Path, archs: Sequence[str]) -> None:
    """Drop the code objects of other architectures."""
    index = objects / "kernels.json"
    content = read_index(objects)
    for arch in set(content["archs"]) - set(archs):
        (objects / content["archs"].pop(arch)["object"]).unlink(missing_ok=True)
    _write(index, content)


def _make(
    target: BuildTarget, compiler: Compiler, key: str, sources: Path, scratch: Path
) -> dict[str, object]:
    scratch.mkdir()
    kernels = target.build(compiler, target.flags, sources, scratch / target.object)
    described = _described(kernels)
    return {
        "object": target.object,
        **target.entry,
        "compiler": compiler.release,
        "key": key,
        "kernels": described,
    }


def _key(target: BuildTarget, compiler: Compiler, sources: Path) -> str:
    """Return a hash of all that a code object and what is listed of it are made from."""
    digest = hashlib.sha256()
    for path in (*sorted(sources.iterdir()), Path(__file__), Path(resources.__file__)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join((target.arch, *target.flags, compiler.version)).encode())
    return digest.hexdigest()


def _write(path: Path, content: object) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


def chosen(value: str | None, default: Sequence[str]) -> tuple[list[str], bool]:
    """Return the architectures that TWINRUN_KERNEL_ARCHS names, and whether it names any, all needed then."""
    named = [name for name in re.split(r"[,;\s]+", value or "") if name]
    return (named, True) if named else (list(default), False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the command line or TWINRUN_KERNEL_ARCHS names, else everything."""
    parser = argparse.ArgumentParser(prog="python -m twinrun_mamba.compile", description=__doc__)
    parser.add_argument(
        "--archs", nargs="+", metavar="ARCH", help=f"of {', '.join(ARCHS)}; default: {VARIABLE}, else all"
    )
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder of kernels.cpp")
    parser.add_argument(
        "--output", type=Path, default=OBJECTS, help="folder for code objects and kernels.json"
    )
    parser.add_argument(
        "--jobs", type=int, help="architectures compiled at once; default: as many as processors"
    )
    options = parser.parse_args(arguments)
    named, needed = (options.archs, True) if options.archs else chosen(os.environ.get(VARIABLE), ARCHS)
    try:
        if not (options.sources / "kernels.cpp").is_file():
            raise CompileError(
                f"{options.sources}: no kernels.cpp; hint: --sources, the folder csrc of a checkout"
            )
        missing = build(named, sources=options.sources, objects=options.output, jobs=options.jobs)
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            f"{options.output}: stopped; what was there before stays; hint: run the same command again\n"
        )
        return 130
    for arch, reason in missing.items():
        sys.stderr.write(f"{arch}: {reason}\n")
    return 2 if missing and needed else 0


if __name__ == "__main__":
    sys.exit(main())
