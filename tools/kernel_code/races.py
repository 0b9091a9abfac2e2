"""Build the emulator of the scan and convolution with happens-before: see races.cpp.

A library is loaded where the plain emulator would be, so that any case of the kernels' tests runs on it.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import torch
from twinrun_mamba import drivers, targets

CSRC = Path(__file__).resolve().parents[2] / "recipes" / "mamba-kernels" / "kernels" / "csrc"
# Wavefronts run in an order of a seed; lanes stay together, as the hardware keeps them.
CHANGES = {
    "constexpr size_t STACK_BYTES": "unsigned order = 0, launches = 0;\nconstexpr size_t STACK_BYTES",
    "const bool backward = (index + number) % 2;": """const int width = launch.warp;
    const int waves = (count + width - 1) / width;""",
    "const int next = backward ? count - 1 - i : i;": """
    const int at = (i / width + order / 2 * (number + 1)) % waves;
    const int next = (order % 2 ? waves - 1 - at : at) * width + i % width;
    if (next >= count) continue;""",
    "  last_error = refusal(launch);": "  ++launches;\n  last_error = refusal(launch);",
}


# Every kind of kernel, of the scan in one part and in parts, with one tile of states and with more.
CASES: tuple[cases.Case, ...] = (
    cases.ScanCase(torch.float16, length=70, states=16),
    cases.ScanCase(torch.bfloat16, length=141, states=40, options=cases.SCAN_OPTIONS),
    cases.ScanCase(torch.float32, length=160, channels=40, states=16, layout="token-major"),
    cases.ConvCase(torch.bfloat16, length=131, layout="channel-first"),
    cases.ConvCase(torch.float16, length=132, layout="token-major", options=cases.TRAINING_OPTIONS),
)


class Races:
    """The emulator's library, and what it found since `begin`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.races_message.restype = ctypes.c_char_p

    def begin(self, *, without: int = -1, order: int = 0) -> None:
        """Forget all accesses; leave out a barrier by its number from now on."""
        self.library.races_order(order)
        self.library.races_begin(without)

    @property
    def barriers(self) -> int:
        """Return how many barriers of the code were come to so far."""
        return int(self.library.races_sites())

    @property
    def found(self) -> str:
        """Return the first race, nothing where there is none."""
        return str(self.library.races_message().decode())


def build(objects: Path, *, sources: Path = CSRC) -> Path:
    """Make the emulator in `objects`, as the compiler of the kernels does; return its library.

    Raises CompileError without a C++ compiler, and where the emulator's source is not as it is changed here.
    """
    cxx = targets.cpu_compiler()
    if cxx is None:
        raise targets.CompileError("needs a C++17 compiler")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "csrc"
        shutil.copytree(sources, copy)
        # Included whole, with its barrier under another name.
        emulator = (copy / "emulator.cpp").read_text(encoding="utf-8")
        for before, now in CHANGES.items():
            if emulator.count(before) != 1:
                raise targets.CompileError(
                    f"emulator.cpp: {before!r} is there {emulator.count(before)} times"
                )
            emulator = emulator.replace(before, now)
        (copy / "plain_emulator.cpp").write_text(emulator, encoding="utf-8")
        races = Path(__file__).with_suffix(".cpp").read_text(encoding="utf-8")
        races = races.replace('"emulator.cpp"', '"plain_emulator.cpp"')
        (copy / "emulator.cpp").write_text(races, encoding="utf-8")
        made = [copy / "emulator.o"]
        cxx.run(*targets.CPU_FLAGS, "-DNDEBUG", copy / "emulator.cpp", "-c", "-o", made[0])
        for size in targets.WARP_SIZES:
            made.append(copy / f"warp{size}.o")
            flags = (*targets.CPU_FLAGS, "-fsanitize=thread", f"-DEMULATED_WARP_SIZE={size}")
            cxx.run(*flags, copy / "emulated_kernels.cpp", "-c", "-o", made[-1])
        library = objects / "races.so"
        cxx.run("-shared", *made, "-o", library, "-pthread", "-lstdc++")
    return library


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
