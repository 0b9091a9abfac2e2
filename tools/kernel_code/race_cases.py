"""Races of the scan's and the convolution's kernels: `python -m tools.kernel_code.race_cases FOLDER`.

It needs torch, and in PYTHONPATH `recipes/mamba-kernels/kernels/src` and `recipes/mamba-kernels/tools`; the
emulator must be built (`python -m twinrun_mamba.compile --archs cpu`). The library is made in FOLDER. Each
case runs clean in every order of wavefronts, then with one fault planted after the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import cases
import torch
from twinrun_mamba import drivers, targets

from tools.kernel_code.races import CLEAN, ORDERS, Outcome, Plant, Races, build, tried

# Every kind of kernel, of the scan in one part and in parts, with one tile of states and with more.
CASES: tuple[cases.Case, ...] = (
    cases.ScanCase(torch.float16, batch=1, length=70, states=16),
    cases.ScanCase(torch.bfloat16, batch=1, length=141, states=40, options=cases.SCAN_OPTIONS),
    cases.ScanCase(torch.float32, batch=1, length=160, channels=40, states=16, layout="token-major"),
    cases.ConvCase(torch.bfloat16, batch=1, length=131, layout="channel-first"),
    cases.ConvCase(torch.float16, batch=1, length=132, layout="token-major", options=cases.TRAINING_OPTIONS),
)
# Seconds of the processor after which a run is ended: a fault may leave a loop without its end.
LONGEST = 60


class _Instead(dict[Path, ctypes.CDLL]):
    """Gives one library, whichever is asked for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def setdefault(self, *_: Any) -> ctypes.CDLL:
        return self._library


@dataclass
class Found:
    """Alarms in clean kernels, races planted and found by kind, and other faults that are named."""

    alarms: int = 0
    planted: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    others: int = 0

    @property
    def matter(self) -> int:
        return self.planted.total()

    @property
    def found(self) -> int:
        return self.seen.total()


def _results(case: cases.Case, backend: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = case.inputs(generator)
    index = cases.packed(case, generator) if "seq_idx" in case.options else None
    return cases.results(case, inputs, backend, index, 1)


def _run(races: Races, case: cases.Case, backend: str, plant: Plant, order: int, *, places: Path) -> Outcome:
    """Run a case in a process of its own, which a fault may end."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reads)
            signal.setitimer(signal.ITIMER_PROF, LONGEST)
            races.begin(plant, order=order, report=writes)
            digest = hashlib.sha256()
            try:
                for tensor in _results(case, backend).values():
                    # Of a tensor's values, since a NaN has many forms.
                    digest.update(
                        tensor.float().nan_to_num().contiguous().view(torch.uint8).numpy().tobytes()
                    )
                result = digest.hexdigest()
            except RuntimeError:
                result = "refused by the emulator"
            places.write_text(
                "\n".join(f"{one.kind} {one.place}" for one in races.plants()), encoding="utf-8"
            )
            os.write(writes, f"result {result}\n".encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, encoding="utf-8") as answers:
        lines = answers.read().splitlines()
    _, status = os.waitpid(child, 0)
    race = next((line for line in lines if not line.startswith("result ")), "")
    result = next((line for line in lines if line.startswith("result ")), f"ended by {status}")
    return Outcome(result, race)


def trial(folder: Path, *, most: int, say: Callable[[str], None]) -> Found:
    """Plant `most` faults in each case, half of them in barriers, for both sizes of wavefronts."""
    races = Races(build(folder))
    # The children are forks: no thread but this one may hold a lock.
    torch.set_num_threads(1)
    for size in targets.WARP_SIZES:
        drivers.driver(str(size))._libraries = _Instead(races.library)  # type: ignore[attr-defined]
    # What a first call imports takes longer than a case, and need not be imported by every child.
    for case in (cases.ScanCase(torch.float32), cases.ConvCase(torch.float32)):
        _results(case, cases.EMULATED_BACKENDS[0])
    found, chance = Found(), random.Random(1)
    for case, backend in itertools.product(CASES, cases.EMULATED_BACKENDS):
        with tempfile.NamedTemporaryFile() as file:
            run = partial(_run, races, case, backend, places=Path(file.name))
            clean = [run(CLEAN, order) for order in ORDERS]
            lines = Path(file.name).read_text(encoding="utf-8").split("\n")
            wrong = [one.race or one.result for one in clean if one.race or one != clean[0]]
            found.alarms += bool(wrong)
            say(f"{case} {backend}: {wrong[0] if wrong else 'no race'}")
            plants = [Plant(*map(int, line.split())) for line in lines]
            by_kind = {kind: [one for one in plants if one.kind == kind] for kind in (1, 2, 3)}
            shares = {1: most // 4, 2: most // 4, 3: most - most // 4 * 2}
            for kind, some in by_kind.items():
                for plant in chance.sample(some, min(shares[kind], len(some))):
                    matters, race = tried(run, plant, clean[0].result)
                    found.planted[str(plant)] += matters
                    found.seen[str(plant)] += matters and bool(race)
                    found.others += not matters and bool(race)
                    if matters and not race:
                        say(f"{case} {backend}: {plant} at {plant.place} is a race that was not found")
    return found


def main(arguments: Sequence[str]) -> int:
    """Print alarms, and how many planted races are found."""
    found = trial(
        Path(arguments[0]), most=int(arguments[1]) if arguments[1:] else 16, say=partial(print, flush=True)
    )
    for kind, planted in sorted(found.planted.items()):
        print(f"{kind}: {found.seen[kind]} of {planted} that change a result found")
    print(
        f"{found.alarms} alarms; {found.found} of {found.matter} planted races found; "
        f"{found.others} faults that changed no result in these orders are named as well"
    )
    return bool(found.alarms or found.found < 0.95 * found.matter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
