"""Races of the scan's and the convolution's kernels: `python -m tools.kernel_code.race_cases FOLDER`.

It needs torch, and in PYTHONPATH `recipes/mamba-kernels/kernels/src` and `recipes/mamba-kernels/tools`; the
emulator must be built (`python -m twinrun_mamba.compile --archs cpu`). The library is made in FOLDER, in
minutes.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import torch
from twinrun_mamba import drivers, targets

from tools.kernel_code.races import Races, build

# Every kind of kernel, of the scan in one part and in parts, with one tile of states and with more.
CASES: tuple[cases.Case, ...] = (
    cases.ScanCase(torch.float16, length=70, states=16),
    cases.ScanCase(torch.bfloat16, length=141, states=40, options=cases.SCAN_OPTIONS),
    cases.ScanCase(torch.float32, length=160, channels=40, states=16, layout="token-major"),
    cases.ConvCase(torch.bfloat16, length=131, layout="channel-first"),
    cases.ConvCase(torch.float16, length=132, layout="token-major", options=cases.TRAINING_OPTIONS),
)


class _Instead(dict[Path, ctypes.CDLL]):
    """Gives one library, whichever is asked for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def setdefault(self, *_: Any) -> ctypes.CDLL:
        return self._library


def use(races: Races) -> None:
    """Run the emulated backends of this process on a library with happens-before; needs torch."""
    for size in targets.WARP_SIZES:
        drivers.driver(str(size))._libraries = _Instead(races.library)  # type: ignore[attr-defined]


def removed(races: Races, case: cases.Case, backend: str, *, orders: int) -> Iterator[tuple[int, bool, str]]:
    """Yield of each barrier that a case comes to whether leaving it out changes a result, and the race found.

    A result changes where wavefronts in one of some orders give other bits than all barriers do.
    """

    def run(*, without: int = -1, order: int = 0) -> dict[str, torch.Tensor]:
        races.begin(without=without, order=order)
        generator = torch.Generator().manual_seed(1)
        inputs = case.inputs(generator)
        index = cases.packed(case, generator) if "seq_idx" in case.options else None
        return cases.results(case, inputs, backend, index, 1)

    races.library.races_forget_sites()
    clean = run()
    yield -1, False, races.found
    for site in range(races.barriers):
        changed, found = False, ""
        for order in range(orders):
            now = run(without=site, order=order)
            found = found or races.found
            changed |= any(
                not torch.equal(now[name].nan_to_num(), clean[name].nan_to_num()) for name in clean
            )
        yield site, changed, found


def main(arguments: Sequence[str]) -> int:
    """Print races of the cases of both sizes of wavefronts, and how many left out barriers are found."""
    races = Races(build(Path(arguments[0])))
    use(races)
    alarms = matter = found = others = free = 0
    for case, backend in itertools.product(CASES, cases.EMULATED_BACKENDS):
        for site, changed, race in removed(races, case, backend, orders=6):
            if site < 0:
                alarms += bool(race)
                print(f"{case} {backend}: {race or 'no race'}", flush=True)
                continue
            matter, found = matter + changed, found + (changed and bool(race))
            free, others = free + (not changed), others + (not changed and bool(race))
            if changed and not race:
                print(f"{case} {backend}: barrier {site} is needed, and its race was not found")
    print(
        f"{alarms} alarms; {found} of {matter} left out barriers that change a result found; "
        f"{others} of {free} others"
    )
    return bool(alarms or found < 0.95 * matter)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
