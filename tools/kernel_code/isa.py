"""AMD's instructions as `llvm-objdump -d` prints them: registers read and written, counters raised, branches.

Registers are numbers: v0 is 0, a0 is 256, s0 is 512; vcc is s106 and s107. The status bits, exec and m0 are
left out, since the hardware itself waits for them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ACCUMULATION, SCALAR = 256, 512
_LINE = re.compile(
    r"^\t(\w+)[ \t]*(.*?)\s*// ([0-9A-F]+):[^<\n]*(?:<[\w.$]+(?:\+0x([0-9a-f]+))?>)?$", re.MULTILINE
)
_FUNCTION = re.compile(r"^([0-9a-f]+) <([\w.$]+)>:\n(.*?)(?=^[0-9a-f]+ <|\Z)", re.MULTILINE | re.DOTALL)
_REGISTER = re.compile(r"\b([vas])(?:(\d+)\b|\[(\d+)(?::(\d+))?\])|\b(vcc)(_lo|_hi)?\b")
_COUNT = re.compile(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
# What reads its first operand too, or nothing but operands.
_TIED = re.compile(r"v_(\w*fmac|writelane|dot\w*c_|swap|mac_)|\w*_d16|\w*_dpp|\w*_sdwa")
_NO_RESULT = re.compile(
    r"s_(cmp|bitcmp|cbranch|branch|waitcnt|nop|barrier|endpgm|set|sleep|sendmsg|dcache|icache|code_end|trap)"
    r"|(global|buffer|flat|scratch)_(store|wb|inv|gl)|ds_(write|add_u|add_f|nop|gws)|buffer_wb|v_nop"
)
_CARRY = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_|v_mad_[ui]64|v_div_scale")


class ToolError(RuntimeError):
    """A program is missing, or a code object is not what it should be."""


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly; `target` is the address of a branch."""

    address: int
    name: str
    operands: str
    target: int | None = None

    @cached_property
    def _places(self) -> list[frozenset[int]]:
        text = re.sub(r"\b(offset|quad_perm|row_|bank_mask|op_sel|neg_)\w*:\S+", "", self.operands)
        return [frozenset(_registers(part)) for part in text.split(",")]

    @cached_property
    def _results(self) -> int:
        if _NO_RESULT.match(self.name) or (
            "atomic" in self.name and not re.search(r"glc|sc0", self.operands)
        ):
            return 0
        return 2 if _CARRY.match(self.name) or self.name.startswith("v_swap") else 1

    @cached_property
    def written(self) -> frozenset[int]:
        return frozenset[int]().union(*self._places[: self._results])

    @cached_property
    def read(self) -> frozenset[int]:
        first = 0 if _TIED.match(self.name) or self.name.startswith("v_swap") else self._results
        implied = {SCALAR + 106, SCALAR + 107} if "vccz" in self.name or "vccnz" in self.name else set()
        return frozenset(implied).union(*self._places[first:])

    @cached_property
    def sources(self) -> list[frozenset[int]]:
        """Return the registers of each operand behind the results."""
        return self._places[self._results :]

    @property
    def is_matrix(self) -> bool:
        return self.name.startswith(("v_mfma", "v_smfmac"))

    @property
    def is_vector(self) -> bool:
        return self.name.startswith("v_") and not self.is_matrix

    @property
    def is_lds(self) -> bool:
        return self.name.startswith("ds_")

    @property
    def is_scalar_load(self) -> bool:
        return self.name.startswith(("s_load", "s_buffer_load", "s_scratch_load"))

    @property
    def is_memory(self) -> bool:
        return bool(re.match(r"(global|buffer|flat|scratch)_(load|store|atomic)", self.name))

    @property
    def counters(self) -> tuple[str, ...]:
        """Return the counters that the instruction raises when it begins and lowers when it is done."""
        vector = ("vmcnt",) if self.is_memory else ()
        local = self.is_lds or self.is_scalar_load or self.name.startswith("flat_")
        return (*vector, *(("lgkmcnt",) if local else ()))

    @cached_property
    def limits(self) -> dict[str, int]:
        """Return what s_waitcnt lets each counter stand at."""
        if self.name != "s_waitcnt":
            return {}
        return {counter: int(count) for counter, count in _COUNT.findall(self.operands)}

    @property
    def states(self) -> int:
        """Return the wait states that pass while it is issued."""
        return int(self.operands, 0) + 1 if self.name == "s_nop" else 1

    def passes(self, arch: str) -> int:
        """Return the passes of a matrix instruction, of four clocks each (ISA documents, CDNA 2 and 3).

        llvm-mca 22.1.8 gives the same for the seven shapes of fp16, bf16 and fp32 on gfx90a and on gfx942
        (LLVM, llvm/lib/Target/AMDGPU/SISchedule.td, HWXDL and MFMA writes).
        """
        old = arch == "gfx90a"
        if "4x4x4" in self.name:
            return 2
        if "32x32" in self.name:
            wide = re.search(r"32x32x(8|16)_?(bf|f)", self.name)
            return 8 if wide and not old else 16
        narrow = re.search(r"16x16x(16|32)_?(bf|f)", self.name)
        return 4 if narrow and not old else 8


def _registers(text: str) -> Iterator[int]:
    for kind, one, low, high, vcc, half in _REGISTER.findall(text):
        if vcc:
            yield from {"_lo": (SCALAR + 106,), "_hi": (SCALAR + 107,)}.get(
                half, (SCALAR + 106, SCALAR + 107)
            )
            continue
        first = int(one or low)
        start = {"v": 0, "a": ACCUMULATION, "s": SCALAR}[kind]
        yield from range(start + first, start + int(high or first) + 1)


@dataclass(frozen=True)
class Code:
    """One kernel: its instructions, and which may come after which."""

    name: str
    instructions: Sequence[Instruction]

    @cached_property
    def successors(self) -> list[tuple[int, ...]]:
        place = {one.address: index for index, one in enumerate(self.instructions)}
        found = []
        for index, one in enumerate(self.instructions):
            after = [] if one.name in ("s_branch", "s_endpgm", "s_setpc_b64") else [index + 1]
            if one.target in place:
                after.append(place[one.target])
            found.append(tuple(i for i in dict.fromkeys(after) if i < len(self.instructions)))
        return found

    def without(self, index: int, *, counter: str = "") -> Code:
        """Return the code with one instruction, or one counter of a s_waitcnt, waiting for nothing."""
        one = self.instructions[index]
        left = {name: count for name, count in one.limits.items() if name != counter} if counter else {}
        operands = " ".join(f"{name}({count})" for name, count in left.items())
        # A jump keeps its address to go to; a s_waitcnt for nothing passes one wait state, as any
        # instruction does.
        now = Instruction(one.address, "s_waitcnt", operands)
        return Code(self.name, [*self.instructions[:index], now, *self.instructions[index + 1 :]])


def disassembled(code_object: Path) -> list[Code]:
    """Return the kernels of a code object; ToolError without llvm-objdump."""
    programs = (*(f"llvm-objdump-{number}" for number in range(29, 18, -1)), "llvm-objdump")
    objdump = next(filter(None, map(shutil.which, programs)), None)
    if objdump is None:
        raise ToolError("needs llvm-objdump, of Debian's llvm-19 or newer")
    text = subprocess.run([objdump, "-d", code_object], capture_output=True, text=True, check=True).stdout
    return parsed(text)


def parsed(text: str) -> list[Code]:
    """Return the kernels of what `llvm-objdump -d` printed."""
    return [
        Code(name, list(_instructions(int(start, 16), body))) for start, name, body in _FUNCTION.findall(text)
    ]


def _instructions(start: int, body: str) -> Iterator[Instruction]:
    for name, operands, address, offset in _LINE.findall(body):
        branches = name.startswith(("s_cbranch", "s_branch"))
        yield Instruction(
            int(address, 16), name, operands, start + int(offset or "0", 16) if branches else None
        )
