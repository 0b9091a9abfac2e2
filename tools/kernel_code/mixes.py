"""What the loop of a compiled attention or scan kernel keeps busy, a wavefront's clocks by unit, and for how
much work.

    python -m tools.kernel_code.mixes FOLDER > tools/kernel_code/mixes.csv

FOLDER holds `ARCH-KERNEL-HEADSIZE-full` with .s of AMD or .cubin of NVIDIA, as Triton makes them. Clocks of
AMD: a vector instruction of 64 lanes takes 4, a transcendental one 16, a matrix instruction four a pass
(ISA documents, CDNA 2 and 3); LDS gives 128 and the first cache 64 bytes a clock to a compute unit (CDNA 3
white paper). Of NVIDIA: a quarter of a multiprocessor takes 32 lanes of fp32, 16 of integers and 4
transcendental ones a clock (CUDA guide, throughput of instructions, 9.0), and 1024 operations of bf16 (data
sheet: 989.5 TFLOP/s at 1.83 GHz on 132 multiprocessors).
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from tools.kernel_code.isa import Instruction, ToolError, disassembled

UNITS = ("matrix", "vector", "transcendental", "lds", "memory")
FIELDS = ("arch", "kernel", "head_size", "registers", *UNITS, "latency", "outside")
WIDTHS = {
    "dwordx4": 16,
    "dwordx2": 8,
    "b128": 16,
    "b64": 8,
    "2_b32": 8,
    "u16": 2,
    "short": 2,
    "b16": 2,
    "u8": 1,
}
# Clocks that a wavefront waits for what it asked last. AMD: in thread traces of an MI350 LDS took 28 to 52,
# scalar loads 730 to 780 (tinygrad, extra/sqtt/examples/gfx950). NVIDIA's are assumed.
AMD_LATENCY = {"lgkmcnt": 52, "vmcnt": 750}
NVIDIA_LATENCY = {"lds": 33, "memory": 270}
_AMD_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
Mix = dict[str, float]


def amd_clocks(code: Iterable[Instruction], arch: str) -> Mix:
    """Return the clocks of one wavefront by unit, and those it waits."""
    mix: Mix = dict.fromkeys((*UNITS, "latency"), 0.0)
    asked: set[str] = set()
    for one in code:
        if one.is_matrix:
            mix["matrix"] += 4 * one.passes(arch)
        elif one.is_vector:
            mix["transcendental" if _AMD_SLOW.match(one.name) else "vector"] += (
                16 if _AMD_SLOW.match(one.name) else 4
            )
        elif one.is_lds or one.is_memory:
            width = next((size for word, size in WIDTHS.items() if word in one.name), 4)
            # No access takes less than 64 lanes of a word.
            mix["lds" if one.is_lds else "memory"] += max(width, 4) * 64 / (128 if one.is_lds else 64)
        # One wait for many accesses is one latency: they are under way together.
        for counter in one.limits:
            if counter in asked:
                mix["latency"] += AMD_LATENCY[counter]
                asked.discard(counter)
        asked.update(one.counters)
    return mix


def nvidia_clocks(code: Iterable[str]) -> Mix:
    """Return the clocks of one warp on its quarter of a multiprocessor."""
    mix: Mix = dict.fromkeys((*UNITS, "latency"), 0.0)
    for name in code:
        shape = re.match(r"HGMMA\.64x(\d+)x16|HMMA\.(16816)", name)
        if shape:
            mix["matrix"] += int(shape[1]) / 2 if shape[1] else 4
        elif name.startswith("MUFU"):
            mix["transcendental"] += 8
        elif name.startswith(("LDS", "STS", "LDSM", "ATOMS", "SHFL")):
            mix["lds"] += 4 if ".128" in name or ".M88.4" in name else 2 if ".64" in name else 1
        elif name.startswith(("LDG", "STG", "LDGSTS")):
            mix["memory"] += 8 if ".128" in name else 4 if ".64" in name else 2
        elif name.startswith(("FFMA", "FADD", "FMUL", "FMNMX", "FSETP", "FSEL", "HFMA2", "MOV", "UMOV")):
            mix["vector"] += 1
        elif not name.startswith(
            ("BRA", "NOP", "BAR", "DEPBAR", "WARPSYNC", "UI", "UL", "US", "R2UR", "WARPGROUP")
        ):
            mix["vector"] += 2
    mix["latency"] = NVIDIA_LATENCY["lds"] * bool(mix["lds"]) + NVIDIA_LATENCY["lds"] * bool(mix["matrix"])
    return mix


def of_amd(code_object: Path, arch: str) -> Iterator[tuple[Mix, Mix, list[Instruction]]]:
    """Yield of each kernel the mix of its loop with most matrix instructions, and of what lies outside."""
    for code in disassembled(code_object):
        place = {one.address: index for index, one in enumerate(code.instructions)}
        loops = [
            (place[one.target], index)
            for index, one in enumerate(code.instructions)
            if one.target in place and place[one.target] <= index
        ]
        first, last = max(
            loops, key=lambda loop: sum(x.is_matrix for x in code.instructions[loop[0] : loop[1]])
        )
        loop = code.instructions[first : last + 1]
        outside = [*code.instructions[:first], *code.instructions[last + 1 :]]
        yield amd_clocks(loop, arch), amd_clocks(outside, arch), list(loop)


_SASS = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)\s*(?:.*?(0x[0-9a-f]+))?", re.MULTILINE
)


def of_nvidia(cubin: Path) -> Iterator[tuple[Mix, Mix, list[str]]]:
    """Yield the same of a cubin; ToolError without Triton's cuobjdump."""
    for code in sass(cubin):
        loops = [loop for loop in loops_of(code) if any("MMA" in name for name in names(code, loop))]
        if loops:
            loop = max(loops, key=lambda one: sum("MMA" in name for name in names(code, one)))
            outside = [name for at, name, _ in code if not loop[0] <= at <= loop[1]]
            yield nvidia_clocks(names(code, loop)), nvidia_clocks(outside), names(code, loop)


def sass(cubin: Path) -> list[list[tuple[int, str, int]]]:
    """Return of each function address, name and last number of its instructions."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        raise ToolError("needs Triton, which brings cuobjdump")
    program = Path(found.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([program, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return [
        [(int(at, 16), name, int(number or "-1", 16)) for at, name, number in _SASS.findall(part)]
        for part in text.split("Function :")[1:]
    ]


def loops_of(code: Sequence[tuple[int, str, int]]) -> list[tuple[int, int]]:
    """Return first and last address of what a branch goes back over."""
    return [(target, at) for at, name, target in code if name.startswith("BRA") and 0 <= target < at]


def names(code: Sequence[tuple[int, str, int]], loop: tuple[int, int]) -> list[str]:
    """Return the instructions of a loop."""
    return [name for at, name, _ in code if loop[0] <= at <= loop[1]]


def main(arguments: Sequence[str]) -> int:
    """Write the table."""
    table = csv.DictWriter(sys.stdout, FIELDS, lineterminator="\n")
    table.writeheader()
    for path in sorted(Path(arguments[0]).glob("*-full.s")) + sorted(Path(arguments[0]).glob("*-full.cubin")):
        arch, kernel, head_size, _ = path.stem.split("-")
        amd = path.suffix == ".s"
        found = of_amd(path.with_suffix(".hsaco"), arch) if amd else of_nvidia(path)
        loop, outside, _ = next(iter(found))
        text = path.read_text(encoding="utf-8") if amd else ""
        registers = max(map(int, re.findall(r"\.vgpr_count: *(\d+)", text)), default=168)
        row = {"arch": arch, "kernel": kernel, "head_size": head_size, "registers": registers}
        row |= {unit: round(loop[unit], 1) for unit in (*UNITS, "latency")}
        table.writerow(row | {"outside": round(sum(outside.values()))})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
