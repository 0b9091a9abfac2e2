"""Remove each wait of compiled AMD code in turn: `python -m tools.kernel_code.removals FILE.hsaco ...`.

Which removals matter is not asked of the checker. Walks along random branches keep the accesses under way
in a queue, which empties as late as the counters allow; the walks through the whole kernel leave off at
each wait, and are taken up there without it. Where one of them uses a register that is still being written,
or comes to a barrier with an access to LDS under way, that wait is needed. A wait whose removal no walk
notices was put there for what is ordered anyway.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.kernel_code import waits
from tools.kernel_code.isa import Code, Instruction, disassembled

WALKS, STEPS, TAKEN_UP, AHEAD = 24, 6000, 6, 500


@dataclass
class Walk:
    """A wavefront on its way: accesses under way by counter in order, and matrix results with their end."""

    arch: str
    queues: dict[str, list[tuple[str, frozenset[int]]]] = field(
        default_factory=lambda: {"vmcnt": [], "lgkmcnt": []}
    )
    # Of a register: the state after which it may be read, the one after which a sum may go on, the
    # instruction.
    results: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    vectors: dict[int, int] = field(default_factory=dict)
    clock: int = 0

    def copy(self) -> Walk:
        queues = {name: list(queue) for name, queue in self.queues.items()}
        return Walk(self.arch, queues, dict(self.results), dict(self.vectors), self.clock)

    def fails(self, one: Instruction) -> bool:
        """Say whether an instruction comes too early."""
        if one.name == "s_barrier":
            return any(kind == "ds" for kind, _ in self.queues["lgkmcnt"])
        used = one.read | one.written
        for queue in self.queues.values():
            for kind, registers in queue:
                common = registers & used
                if common and not (kind == "memory" and one.is_memory and not common & one.read):
                    return True
        return self._early(one, used)

    def _early(self, one: Instruction, used: frozenset[int]) -> bool:
        if not (one.is_matrix or one.is_vector or one.is_memory or one.is_lds):
            return False
        if one.is_matrix and any(self.clock - self.vectors.get(register, -9) <= 2 for register in one.read):
            return True
        sums = one.sources[2] if one.is_matrix else frozenset()
        whole = len({self.results.get(register, (0, 0, 0))[2] for register in sums}) == 1
        for register in (one.read if one.is_matrix else used) & self.results.keys():
            read, added, _ = self.results[register]
            is_sum = register in sums and register not in one.sources[0] | one.sources[1]
            if self.clock < (0 if is_sum and whole else added if is_sum else read):
                return True
        return False

    def step(self, one: Instruction) -> None:
        for counter, limit in one.limits.items():
            queue = self.queues.get(counter, [])
            any_order = any(kind == "s" for kind, _ in queue)
            if not any_order:
                del queue[: max(0, len(queue) - limit)]
            elif limit == 0:
                queue.clear()
        kind = "ds" if one.is_lds else "s" if one.is_scalar_load else "memory"
        for counter in one.counters:
            self.queues[counter].append((kind, one.written))
        if not one.counters and not one.is_matrix:
            for register in one.written & self.results.keys():
                del self.results[register]
        if one.is_matrix:
            passes = one.passes(self.arch)
            end = self.clock + 1 + passes + 3
            added = self.clock + 1 + passes + (self.arch != "gfx90a")
            self.results |= dict.fromkeys(one.written, (end, added, self.clock))
        elif one.is_vector:
            self.vectors |= dict.fromkeys(one.written, self.clock)
        self.clock += one.states


def needed(code: Code, arch: str, chance: random.Random) -> dict[tuple[int, str], bool]:
    """Return of each wait, by place and counter, whether a walk without it fails."""
    stops: dict[int, list[Walk]] = {}
    for _ in range(WALKS):
        walk, index = Walk(arch), 0
        for _ in range(STEPS):
            one = code.instructions[index]
            if one.name in ("s_waitcnt", "s_nop") and len(stops.setdefault(index, [])) < TAKEN_UP:
                stops[index].append(walk.copy())
            walk.step(one)
            if not code.successors[index]:
                break
            index = chance.choice(code.successors[index])
    return {
        (index, counter): any(
            _fails(code, index, counter, walk.copy(), chance) for walk in found for _ in range(4)
        )
        for index, found in stops.items()
        for counter in code.instructions[index].limits or {"": 0}
    }


def _fails(code: Code, index: int, counter: str, walk: Walk, chance: random.Random) -> bool:
    removed = code.without(index, counter=counter).instructions[index]
    for number in range(AHEAD):
        one = code.instructions[index] if number else removed
        if walk.fails(one):
            return True
        walk.step(one)
        if not code.successors[index]:
            return False
        index = chance.choice(code.successors[index])
    return False


def tried(code: Code, arch: str, *, most: int, seed: int) -> Iterator[tuple[int, str, bool, bool]]:
    """Yield of some waits place and counter, whether it is needed and whether it is found missing."""
    chance = random.Random(seed)
    all_waits = sorted(needed(code, arch, chance).items())
    for (index, counter), matters in chance.sample(all_waits, min(most, len(all_waits))):
        found = bool(waits.check(code.without(index, counter=counter), arch))
        yield index, counter, matters, found


def main(arguments: Sequence[str]) -> int:
    """Print how many removals matter, how many of these are found, and how many others are called wrong."""
    most, *paths = arguments
    matter = found = called = free = 0
    for path in map(Path, paths):
        arch = waits.arch_of(path)
        for code in disassembled(path):
            for index, counter, matters, seen in tried(
                code, arch, most=int(most), seed=len(code.instructions)
            ):
                matter, found = matter + matters, found + (matters and seen)
                free, called = free + (not matters), called + (seen and not matters)
                if matters and not seen:
                    one = code.instructions[index]
                    print(f"missed: {arch} {code.name} {one.address:#x} {one.name} {one.operands} {counter}")
    print(f"{found} of {matter} that matter found; {called} of {free} that no walk noticed are named as well")
    return found < 0.95 * matter


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
