"""hipcc compiles every HIP kernel of the repository for the stack's GPUs, and says how many there are."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[3]
PROBE = HERE / "probe.hip"
# By this name a kernels folder has the one translation unit that compiles to code for GPUs.
UNIT = "kernels.cpp"


def main() -> None:
    archs = os.environ["TWINRUN_KERNEL_ARCHS"].split()
    print(version())
    for unit in [PROBE, *sorted(PROJECT.glob(f"recipes/*/kernels/**/{UNIT}"))]:
        with ThreadPoolExecutor() as pool:
            kernels = list(pool.map(partial(compiled, unit), archs))
        if len({*kernels}) > 1 or not kernels[0]:
            counts = ", ".join(f"{arch} {len(names)}" for arch, names in zip(archs, kernels, strict=True))
            raise SystemExit(f"{unit.name}: not one set of kernels for every architecture: {counts}")
        print(f"{unit.relative_to(PROJECT)}: {len(kernels[0])} kernel(s) for {', '.join(archs)}")
    print(linked(PROBE))


def version() -> str:
    lines = run(["hipcc", "--version"]).stdout.splitlines()
    return ", ".join(line for line in lines if "version" in line)


def compiled(unit: Path, arch: str) -> frozenset[str]:
    """Compile `unit` to a code object and return the names of its kernels, as the compiler remarks them."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            [
                *("hipcc", "-x", "hip", "-std=c++17", "-O3", f"--offload-arch={arch}", "--cuda-device-only"),
                *("-Rpass-analysis=kernel-resource-usage", "-c", str(unit), "-o", f"{folder}/{arch}.o"),
            ]
        )
    lines = [line for line in done.stderr.splitlines() if "Function Name: " in line]
    return frozenset(line.partition("Function Name: ")[2].split()[0] for line in lines)


def linked(unit: Path) -> str:
    """Compile, link and start the program around the probe's kernel; it asks RCCL for its version."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/probe"
        run(["hipcc", "-std=c++17", "--offload-arch=gfx90a", str(unit), "-lrccl", "-o", program])
        return run([program]).stdout.strip()


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


if __name__ == "__main__":
    main()
