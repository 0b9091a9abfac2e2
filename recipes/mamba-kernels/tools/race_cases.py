"""Races of the scan's and the convolution's kernels: `python race_cases.py FOLDER [MOST]`.

It needs torch, and in PYTHONPATH `recipes/mamba-kernels/kernels/src` and `recipes/mamba-kernels/tools`; the
emulator must be built (`python -m twinrun_mamba.compile --archs cpu`). The library is made in FOLDER. Each
launch runs clean in every order of wavefronts, then with MOST faults of each kind, one after the other.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cases
import torch
from races import KINDS, Found, Plant, Races, build
from twinrun_mamba import drivers, targets

# Every kind of kernel, of the scan in one part and in parts, with one tile of states and with more.
CASES: tuple[cases.Case, ...] = (
    cases.ScanCase(torch.float16, batch=1, length=70, states=16),
    cases.ScanCase(torch.bfloat16, batch=1, length=70, states=20, options=cases.SCAN_OPTIONS),
    cases.ScanCase(torch.float32, batch=1, length=70, channels=40, states=16, layout="token-major"),
    cases.ConvCase(torch.bfloat16, batch=1, length=131, layout="channel-first"),
    cases.ConvCase(torch.float32, batch=1, length=70, width=7, layout="channel-first"),
    cases.ConvCase(torch.float16, batch=1, length=20, layout="token-major", options=cases.TRAINING_OPTIONS),
    cases.ConvCase(
        torch.float16, batch=1, length=136, layout="channel-first", options=cases.TRAINING_OPTIONS
    ),
    cases.ConvCase(torch.bfloat16, batch=1, length=20, layout="token-major", options=cases.CONV_OPTIONS),
)


class _Instead(dict[Path, ctypes.CDLL]):
    """Gives one library, whichever is asked for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def setdefault(self, *_: Any) -> ctypes.CDLL:
        return self._library


def _results(case: cases.Case, backend: str) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = {name: cases.in_layout(one, name, case) for name, one in case.inputs(generator).items()}
    index = cases.packed(case, generator) if "seq_idx" in case.options else None
    cases.results(case, inputs, backend, index, 1)


def trial(folder: Path, *, most: int, say: Callable[[str], None]) -> Found:
    """Plant at most so many faults of each kind in each kernel, for both sizes of wavefronts."""
    races = Races(build(folder))
    # The children are forks: no thread but this one may hold a lock.
    torch.set_num_threads(1)
    for size in targets.WARP_SIZES:
        drivers.driver(str(size))._libraries = _Instead(races.library)  # type: ignore[attr-defined]
    found, done = Found(), set[tuple[str, int]]()

    def chosen(chance: random.Random, plants: tuple[Plant, ...]) -> Iterator[Plant]:
        for kind in range(1, len(KINDS)):
            some = [one for one in plants if one.kind == kind]
            yield from chance.sample(some, min(most, len(some)))

    def launched(kernel: str, warp: int) -> None:
        if (kernel, warp) in done:
            return
        done.add((kernel, warp))
        mine = Found()
        races.tried(mine, partial(chosen, random.Random(f"{kernel} {warp}")))
        found.add(mine)
        planted, seen = mine.planted.total(), mine.seen.total()
        say(f"{kernel}, {warp} lanes: {seen} of {planted} planted races found")
        for text in (*mine.alarms, *mine.missed):
            say(f"  {text}")

    for case, backend in itertools.product(CASES, cases.EMULATED_BACKENDS):
        with races.watching(launched):
            _results(case, backend)
    return found


def main(arguments: Sequence[str]) -> int:
    """Print alarms, and how many planted races are found."""
    folder, *most = arguments
    found = trial(Path(folder), most=int(most[0]) if most else 3, say=partial(print, flush=True))
    for kind, planted in sorted(found.planted.items()):
        print(f"{KINDS[kind]}: {found.seen[kind]} of {planted} that change a result found")
    print(
        f"{len(found.alarms)} alarms; {found.seen.total()} of {found.planted.total()} planted races found; "
        f"{found.others} faults are named as well that no two orders tell apart, or that leave lanes waiting"
    )
    return bool(found.alarms or found.seen.total() < 0.95 * found.planted.total())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
