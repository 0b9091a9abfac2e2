"""Whether compiled AMD code waits for what it uses: `python -m tools.kernel_code.waits FILE.hsaco ...`.

The hardware of CDNA does not hold back an instruction whose operand is still being loaded: code says with
s_waitcnt how many accesses may be under way. Nor does it hold back one that uses a matrix instruction's
result too early: code passes wait states. This follows, over all ways through a kernel, each register's
access under way and how many came after it, and each matrix instruction's result and the wait states since.
At a barrier no access to LDS may be under way, since other wavefronts go on to use it.

Counters: CDNA ISA documents, chapter "Manually Inserted Wait States"; vmcnt counts in order, lgkmcnt in
order only while no scalar load is under way. Wait states: LLVM's GCNHazardRecognizer, functions
checkMAIHazards90A and checkMAIVALUHazards.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.kernel_code.isa import ACCUMULATION, SCALAR, Code, Instruction, disassembled

# An access is told from others by counter, kind and its register; nothing beyond 63 can be waited for.
LDS, SCALAR_LOAD, MEMORY = "lds", "scalar load", "memory"
MOST = 63
# Stands for an access without a result, which only a barrier asks for.
NO_REGISTER = -1
LONGEST = 20

Access = tuple[str, str, int]
Pending = Mapping[Access, int]
# Of a register: wait states since a matrix instruction began that writes it, its passes.
Matrix = Mapping[int, tuple[int, int]]
# Of a register: wait states since a vector instruction wrote it, while they matter.
Vector = Mapping[int, int]


@dataclass(frozen=True)
class Finding:
    """An instruction that does not wait enough, and for what."""

    address: int
    instruction: str
    reason: str

    def __str__(self) -> str:
        return f"{self.address:#x} {self.instruction}: {self.reason}"


@dataclass(frozen=True)
class State:
    """What is under way before an instruction."""

    pending: Pending
    matrix: Matrix
    vector: Vector

    def joined(self, other: State) -> State:
        """Return the worst of two ways: the access that is followed by fewer, the result that is younger."""
        pending = dict(self.pending)
        for access, age in other.pending.items():
            pending[access] = min(age, pending.get(access, MOST))
        matrix = dict(self.matrix)
        for register, young in other.matrix.items():
            matrix[register] = min(young, matrix[register], key=_left) if register in matrix else young
        vector = dict(self.vector)
        for register, age in other.vector.items():
            vector[register] = min(age, vector.get(register, age))
        return State(pending, matrix, vector)


def _left(of: tuple[int, int]) -> int:
    return of[0] - of[1]


def check(code: Code, arch: str) -> list[Finding]:
    """Return what does not wait enough, nothing for a kernel that is complete."""
    before: dict[int, State] = {0: State({}, {}, {})}
    # In code order, so that what comes before a place is known before it, but for loops.
    waiting = [0]
    while waiting:
        index = heapq.heappop(waiting)
        if waiting and waiting[0] == index:
            continue
        after = _after(code.instructions[index], before[index], arch)
        for following in code.successors[index]:
            known = before.get(following)
            joined = known.joined(after) if known else after
            if joined != known:
                before[following] = joined
                heapq.heappush(waiting, following)
    found = []
    for index, state in sorted(before.items()):
        one = code.instructions[index]
        found += [
            Finding(one.address, f"{one.name} {one.operands}".strip(), why)
            for why in _wrong(one, state, arch)
        ]
    return found


def _after(one: Instruction, state: State, arch: str) -> State:
    pending = _waited(one.limits, state.pending) if one.limits else state.pending
    if one.counters:
        pending = _begun(one, pending)
    states = one.states
    matrix = {
        register: (age + states, passes)
        for register, (age, passes) in state.matrix.items()
        if age + states < LONGEST and register not in one.written
    }
    vector = {register: age + states for register, age in state.vector.items() if age + states < 2}
    if one.is_matrix:
        matrix |= dict.fromkeys(one.written, (0, one.passes(arch)))
    elif one.is_vector:
        vector |= dict.fromkeys((register for register in one.written if register < SCALAR), 0)
    return State(pending, matrix, vector)


def _begun(one: Instruction, pending: Pending) -> Pending:
    kind = LDS if one.is_lds else SCALAR_LOAD if one.is_scalar_load else MEMORY
    raised = one.counters
    now = {access: min(age + (access[0] in raised), MOST) for access, age in pending.items()}
    for counter in raised:
        for register in one.written or {NO_REGISTER}:
            now[counter, kind, register] = 0
        if kind == LDS:
            now[counter, kind, NO_REGISTER] = 0
    return now


def _waited(limits: Mapping[str, int], pending: Pending) -> Pending:
    mixed = any(kind == SCALAR_LOAD for _, kind, _ in pending)

    def done(access: Access, age: int) -> bool:
        counter, _, _ = access
        if counter not in limits:
            return False
        # Scalar loads come back in any order, also among accesses to LDS.
        return limits[counter] == 0 if counter == "lgkmcnt" and mixed else age >= limits[counter]

    return {access: age for access, age in pending.items() if not done(access, age)}


def _wrong(one: Instruction, state: State, arch: str) -> Iterator[str]:
    used = one.read | one.written
    for counter, kind, register in state.pending:
        if one.name == "s_barrier" and kind == LDS and register == NO_REGISTER:
            yield f"an access to LDS is under way ({counter})"
        elif register in used and not (kind == MEMORY and _in_order(one, register)):
            yield f"{name_of(register)} is under way from {kind} ({counter})"
    if one.is_matrix:
        for place, registers in enumerate(one.sources):
            yield from _early(registers, state, arch, place)
        fresh = sorted(one.read & set(state.vector))
        if fresh:
            yield f"{name_of(fresh[0])} was written {state.vector[fresh[0]]} wait states ago, 2 are needed"
    elif one.is_vector or one.is_memory or one.is_lds:
        yield from _early(used, state, arch, None)


def _in_order(one: Instruction, register: int) -> bool:
    """Say whether an access only overwrites what an earlier access to memory brings: they end in order."""
    return one.is_memory and register in one.written and register not in one.read


def _early(registers: frozenset[int], state: State, arch: str, place: int | None) -> Iterator[str]:
    for register in sorted(registers & set(state.matrix)):
        age, passes = state.matrix[register]
        needed = _needed(passes, arch, added=place == 2, whole=_same(state, registers))
        if age < needed:
            yield f"{name_of(register)} is a matrix result of {age} wait states ago, {needed} are needed"
            return


def _same(state: State, registers: frozenset[int]) -> bool:
    """Say whether all registers of an operand are of one matrix instruction, which then hands them on."""
    return len({state.matrix.get(register) for register in registers}) == 1


def _needed(passes: int, arch: str, *, added: bool, whole: bool) -> int:
    if added and whole:
        return 2 if passes == 2 and arch != "gfx90a" else 0
    if added:
        return passes + 1 if arch != "gfx90a" else {2: 2}.get(passes, passes)
    return passes + 3


def name_of(register: int) -> str:
    """Return a register as assembly has it."""
    for start, letter in ((SCALAR, "s"), (ACCUMULATION, "a"), (0, "v")):
        if register >= start:
            return f"{letter}{register - start}"
    return "nothing"


def arch_of(path: Path) -> str:
    """Return the architecture that a code object's folder or file is named after, else gfx90a."""
    return next((part for part in (*path.parts, path.name) if part.startswith("gfx")), "gfx90a")[:6]


def main(paths: Sequence[str]) -> int:
    """Print a line for each kernel: complete, or each instruction that does not wait enough."""
    status = 0
    for path in map(Path, paths):
        arch = arch_of(path)
        for code in disassembled(path):
            found = check(code, arch)
            status |= bool(found)
            print(
                f"{arch} {code.name}: {'complete' if not found else ''}",
                *found[:20],
                sep="\n  " if found else "",
            )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
