"""What compiled kernels need of a GPU, measured without one: python recipes/mamba-kernels/tools/budgets.py.

Of each kernel and architecture: registers a thread (on AMD of the vector file, accumulators included),
bytes spilled, static shared memory of a block, and warps that fit on a multiprocessor at once. Of AMD's
kernels also flat accesses, which wait for LDS and for global memory; none is allowed. Of AMD's scan kernels
also VALU slots per state element in each innermost loop over steps, counted in the disassembly: an
exponential stands for a state element, a vector instruction takes one slot and a transcendental one four,
having a quarter of the rate; matrix instructions run beside them and take none. Where a loop branches, the
cheapest way through it counts: the others restart a sequence or repeat a step.
"""

from __future__ import annotations

import argparse
import heapq
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels" / "src"))
from twinrun_mamba import compile as compiler
from twinrun_mamba.targets import TARGETS, CompileError

KERNELS = Path(__file__).parents[1] / "kernels"
BUDGETS = KERNELS / "budgets.toml"
ARCHS = ("gfx90a", "gfx942", "gfx950", "sm_80", "sm_90")
# A lane steps through 4 states x 4 or 8 times at once; fewer exponentials are those of the step sizes alone.
LEAST_EXPONENTIALS = 16
# The major release of a compiler.
_RELEASE = re.compile(r"(?:version |release )(\d+)")
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_f32")

Budget = dict[str, int | list[float]]
Budgets = dict[str, dict[str, Budget]]


@dataclass(frozen=True)
class Multiprocessor:
    """What the warps on it share: vector registers in lanes x 32 bits, shared memory in bytes."""

    registers: int
    granule: int
    lanes: int
    shared: int
    reserved: int
    most_warps: int
    # Parts with registers of their own; a warp cannot straddle two.
    parts: int

    def warps(self, registers: int, shared: int, threads: int) -> int:
        """Return how many warps of such blocks fit at once."""
        rounded = -(-max(registers, 1) // self.granule) * self.granule
        a_part = min(self.most_warps // self.parts, self.registers // self.parts // (rounded * self.lanes))
        warps = threads // self.lanes
        blocks = a_part * self.parts // warps
        if shared + self.reserved:
            blocks = min(blocks, self.shared // (shared + self.reserved))
        return blocks * warps


# CDNA 2 to 4 ISA documents: four SIMDs of 512 registers a lane, 8 warps each, 64 KiB of LDS, 160 in CDNA 4.
# CUDA guide,
# table of compute capabilities: 64 Ki registers, 64 warps, 164 and 228 KiB of shared memory, of which a block
# reserves 1 KiB.
CDNA = Multiprocessor(4 * 512 * 64, 8, 64, 64 * 1024, 0, 32, 4)
MULTIPROCESSORS = {
    "gfx90a": CDNA,
    "gfx942": CDNA,
    "gfx950": replace(CDNA, shared=160 * 1024),
    "sm_80": Multiprocessor(64 * 1024, 8, 32, 164 * 1024, 1024, 64, 4),
    "sm_90": Multiprocessor(64 * 1024, 8, 32, 228 * 1024, 1024, 64, 4),
}


def measure(arch: str) -> dict[str, Budget]:
    """Return what each kernel of an architecture uses; compiles it when its code object is not up to date."""
    missing = compiler.build([arch], say=lambda _: None)
    if missing:
        raise CompileError(f"{arch}: {missing[arch]}")
    amd = arch.startswith("gfx")
    found: dict[str, Budget] = {}
    for name, kernel in compiler.read_kernels(compiler.OBJECTS, arch).items():
        code = dict(_disassembled(compiler.OBJECTS / arch / kernel["object"])) if amd else {}
        shared = kernel["shared_static"] + kernel["shared_base"] + kernel["shared_per_state_tile"]
        warps = MULTIPROCESSORS[arch].warps(kernel["registers"], shared, kernel["threads"])
        used = {key: kernel[key] for key in ("registers", "spills", "shared_static")}
        found[name] = {**used, "warps": warps}
        if name in code:
            found[name]["flat"] = flat_accesses(code[name])
        if name.startswith("scan_") and (loops := slots(code.get(name, ()))):
            found[name]["slots"] = loops
    return found


def version(arch: str) -> str:
    """Return the release of the compiler for an architecture, nothing when there is none."""
    found = TARGETS[arch].compiler()
    return found.release if found else ""


def exceeded(found: dict[str, Budget], budget: dict[str, Budget]) -> list[str]:
    """Return a line for each number that is worse than its budget."""
    lines = [f"{name}: not in the budget" for name in sorted(set(found) - set(budget))]
    lines += [f"{name}: in the budget, not compiled" for name in sorted(set(budget) - set(found))]
    for name in sorted(set(found) & set(budget)):
        for key in ("registers", "spills", "shared_static", "warps", "flat", "slots"):
            now, allowed = found[name].get(key), budget[name].get(key)
            if now != allowed and _worse(key, now, allowed):
                lines.append(f"{name}: {key} {now}, budget {allowed}")
    return lines


def _worse(key: str, now: int | list[float] | None, allowed: int | list[float] | None) -> bool:
    if isinstance(now, list) and isinstance(allowed, list) and len(now) == len(allowed):
        return any(a > b for a, b in zip(sorted(now), sorted(allowed), strict=True))
    if isinstance(now, int) and isinstance(allowed, int):
        return now < allowed if key == "warps" else now > allowed
    return True


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly; `target` is the address that a branch may go to."""

    address: int
    name: str
    target: int | None

    @property
    def slots(self) -> int:
        if not self.name.startswith("v_") or self.name.startswith("v_mfma"):
            return 0
        return 4 if TRANSCENDENTAL.match(self.name) else 1

    @property
    def exponentials(self) -> int:
        return int(self.name.startswith("v_exp_f32"))


_FUNCTION = re.compile(r"^([0-9a-f]+) <(\w+)>:$(.*?)(?=^[0-9a-f]+ <|\Z)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s+(\w+).*?// ([0-9A-F]+):[^<\n]*(?:<\w+(?:\+0x([0-9a-f]+))?>)?$", re.MULTILINE)


def slots(code: Sequence[Instruction]) -> list[float]:
    """Return slots per state element in the innermost loops over steps of a scan kernel, in code order."""
    return [round(a_loop, 1) for a_loop in loop_slots(code)]


def flat_accesses(code: Sequence[Instruction]) -> int:
    """Return how many accesses do not say whether they go to global memory or to LDS, and wait for both."""
    return sum(instruction.name.startswith("flat_") for instruction in code)


def _disassembled(code_object: Path) -> list[tuple[str, list[Instruction]]]:
    # The newest knows every architecture.
    programs = (*(f"llvm-objdump-{number}" for number in range(29, 18, -1)), "llvm-objdump")
    objdump = next(filter(None, map(shutil.which, programs)), None)
    if objdump is None:
        raise CompileError("needs llvm-objdump, of Debian's llvm-19 or newer")
    text = subprocess.run([objdump, "-d", code_object], capture_output=True, text=True, check=True).stdout
    found = _FUNCTION.findall(text)
    return [(name, list(_instructions(int(start, 16), body))) for start, name, body in found]


def _instructions(start: int, body: str) -> Iterator[Instruction]:
    for name, address, offset in _LINE.findall(body):
        branches = name.startswith(("s_cbranch", "s_branch"))
        yield Instruction(int(address, 16), name, start + int(offset or "0", 16) if branches else None)


def loop_slots(code: Sequence[Instruction]) -> Iterable[float]:
    """Return slots per exponential of every innermost loop that has many."""
    place = {instruction.address: index for index, instruction in enumerate(code)}
    jumps = {i: place[x.target] for i, x in enumerate(code) if x.target is not None and x.target in place}
    # A loop that is left in several places has as many backward branches: the last one closes it.
    loops: dict[int, int] = {}
    for last, first in jumps.items():
        if first <= last:
            loops[first] = max(last, loops.get(first, 0))
    for first, last in sorted(loops.items()):
        if any(first < other <= last for other in loops):
            continue
        cost, elements = _cheapest(code, jumps, first, last)
        if elements >= LEAST_EXPONENTIALS:
            yield cost / elements


def _cheapest(code: Sequence[Instruction], jumps: dict[int, int], first: int, last: int) -> tuple[int, int]:
    """Return slots and exponentials on the cheapest way from a loop's first instruction to its last.

    Rarely run parts of a loop may lie behind it, so ways through the whole function are looked at.
    """
    done: set[int] = set()
    waiting = [(0, 0, first)]
    while waiting:
        cost, elements, index = heapq.heappop(waiting)
        if index in done or index >= len(code):
            continue
        done.add(index)
        cost, elements = cost + code[index].slots, elements + code[index].exponentials
        if index == last:
            return cost, elements
        if code[index].name not in ("s_branch", "s_endpgm"):
            heapq.heappush(waiting, (cost, elements, index + 1))
        if index in jumps:
            heapq.heappush(waiting, (cost, elements, jumps[index]))
    # A jump back to code that an earlier part of the function falls into: no loop.
    return 0, 0


def read() -> tuple[dict[str, str], Budgets]:
    """Return the compilers that the budgets hold for, and the budgets."""
    content = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    return content.pop("compilers"), content


def table_of(arch: str, compilers: Mapping[str, str]) -> str:
    """Return the table of an architecture for the compiler that is here.

    The first compiler that an architecture was measured with has its name, any other `ARCH-RELEASE`.
    """
    release = _RELEASE.search(version(arch))
    for table, known in compilers.items():
        other = _RELEASE.search(known)
        if arch_of(table) == arch and release and other and release[1] == other[1]:
            return table
    return f"{arch}-{release[1]}" if arch in compilers and release else arch


def arch_of(table: str) -> str:
    """Return the architecture of a table of budgets.toml."""
    return table.partition("-")[0]


def write(archs: Sequence[str]) -> None:
    """Write budgets.toml anew for some architectures and the compiler that is here, keeping the others."""
    compilers, budgets = read() if BUDGETS.is_file() else ({}, {})
    # Together, so that no core waits for the last kernel of an architecture.
    compiler.build(archs)
    for arch in archs:
        table = table_of(arch, compilers)
        compilers[table], budgets[table] = version(arch), measure(arch)
    tables = sorted(compilers, key=lambda table: (ARCHS.index(arch_of(table)), table))
    lines = [
        "# Made by `python recipes/mamba-kernels/tools/budgets.py`, which says what the numbers are.",
        "",
        "[compilers]",
    ]
    lines += [f'{table} = "{compilers[table]}"' for table in tables]
    for table in tables:
        lines += ["", f"[{table}]"]
        lines += [f"{name} = {_inline(budget)}" for name, budget in sorted(budgets[table].items())]
    BUDGETS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _inline(budget: Budget) -> str:
    return "{ " + ", ".join(f"{key} = {value}" for key, value in budget.items()) + " }"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the budgets that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archs", nargs="*", metavar="ARCH", help=f"of {', '.join(ARCHS)}; default: all")
    archs = parser.parse_args(arguments).archs or ARCHS
    unknown = [arch for arch in archs if arch not in ARCHS]
    if unknown:
        parser.error(f"architectures: found {', '.join(unknown)}, allowed {', '.join(ARCHS)}")
    try:
        write(archs)
    except CompileError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(130, f"{BUDGETS}: stopped, and left as it was; hint: run the same command again\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
