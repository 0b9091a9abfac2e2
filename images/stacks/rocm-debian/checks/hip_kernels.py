"""hipcc compiles every HIP kernel of the repository for the stack's GPUs, and says what each kernel needs."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[3]
PROBE = HERE / "probe.hip"
# By this name a kernels folder has the one translation unit that compiles to code for GPUs.
UNIT = "kernels.cpp"
REMARK = re.compile(r"remark:.*?\s(?P<what>[A-Za-z][A-Za-z /()\[\]-]*?)(?: \[[^]]*\])?: (?P<value>\S+)")
COLUMNS = {
    "VGPRs": "VGPRs",
    "AGPRs": "AGPRs",
    "SGPRs": "SGPRs",
    "VGPRs Spill": "VGPR spills",
    "SGPRs Spill": "SGPR spills",
    "ScratchSize": "scratch bytes",
    "LDS Size": "LDS bytes",
    "Occupancy": "waves/SIMD",
}


class Usage(NamedTuple):
    """What one kernel needs on one architecture."""

    kernel: str
    arch: str
    figures: dict[str, str]


def main() -> None:
    archs = os.environ["TWINRUN_KERNEL_ARCHS"].split()
    units = [PROBE, *sorted(PROJECT.glob(f"recipes/*/kernels/**/{UNIT}"))]
    print(version())
    for unit in units:
        with ThreadPoolExecutor() as pool:
            found = list(chain.from_iterable(pool.map(partial(compiled, unit), archs)))
        kernels = {usage.kernel for usage in found}
        if any({usage.arch for usage in found if usage.kernel == kernel} != set(archs) for kernel in kernels):
            raise SystemExit(f"{unit.name}: a kernel is missing for one of {', '.join(archs)}")
        print(f"{unit.relative_to(PROJECT)}: {len(kernels)} kernel(s) for {', '.join(archs)}")
        show(found)
    print(linked(PROBE))


def version() -> str:
    lines = run(["hipcc", "--version"]).stdout.splitlines()
    return ", ".join(line for line in lines if "version" in line)


def compiled(unit: Path, arch: str) -> list[Usage]:
    """Compile `unit` to a code object and return what the compiler remarks of each kernel."""
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            [
                *("hipcc", "-x", "hip", "-std=c++17", "-O3", f"--offload-arch={arch}", "--cuda-device-only"),
                *("-Rpass-analysis=kernel-resource-usage", "-c", str(unit), "-o", f"{folder}/{arch}.o"),
            ]
        )
    usages: list[Usage] = []
    for remark in REMARK.finditer(done.stderr):
        if remark["what"] == "Function Name":
            usages.append(Usage(readable(remark["value"]), arch, {}))
        elif usages and remark["what"] in COLUMNS:
            usages[-1].figures[remark["what"]] = remark["value"]
    if not usages:
        raise SystemExit(f"{unit.name}: the compiler found no kernel for {arch}")
    return usages


def readable(symbol: str) -> str:
    """Return the name in a mangled symbol: its first length and that many letters."""
    match = re.match(r"_Z(\d+)", symbol)
    return symbol[match.end() : match.end() + int(match[1])] if match else symbol


def show(usages: list[Usage]) -> None:
    width = max(len(usage.kernel) for usage in usages)
    print(f"  {'kernel':{width}}  arch    {'  '.join(COLUMNS.values())}")
    for kernel, arch, figures in sorted(usages):
        cells = (f"{figures.get(name, '-'):>{len(title)}}" for name, title in COLUMNS.items())
        print(f"  {kernel:{width}}  {arch:6}  {'  '.join(cells)}")


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
