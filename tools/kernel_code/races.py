"""Build the emulator of the scan and convolution with happens-before: see races.cpp.

A library is loaded where the plain emulator would be, so that any case of the kernels' tests runs on it.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinrun_mamba import targets

CSRC = Path(__file__).resolve().parents[2] / "recipes" / "mamba-kernels" / "kernels" / "csrc"
# Wavefronts run in an order of a seed, from the fourth on one of them only where no other can; lanes stay
# together, as the hardware keeps them.
CHANGES = {
    "constexpr size_t STACK_BYTES": "unsigned order = 0, launches = 0;\nconstexpr size_t STACK_BYTES",
    "// A synchronization point of": """// What a planted fault holds of a lane.
struct Held {
  bool late = false, touched = false, writes = false;
  size_t size = 0;
  char* at = nullptr;
  char before[16] = {};
};

// A synchronization point of""",
    "  bool finished = false;\n": "  bool finished = false;\n  Held held;\n",
    "    fiber.finished = false;\n": "    fiber.finished = false;\n    fiber.held = {};\n",
    "  const bool backward = (index + number) % 2;\n": """  const int width = launch.warp;
  const int waves = (count + width - 1) / width;
  const int lags = order < 4 ? -1 : int(order / 4 - 1) % waves;
""",
    "  for (int i = 0; i < count && error.empty(); ++i) {\n": """
  for (int turn = 0; turn < 2 && !progress; ++turn)
  for (int i = 0; i < waves * width && error.empty(); ++i) {
""",
    "    const int next = backward ? count - 1 - i : i;\n": """
    const int at = (i / width + order / 2 % 2 * (number + 1)) % waves;
    const int wave = order % 2 ? waves - 1 - at : at;
    const int next = wave * width + i % width;
    if (next >= count || (wave == lags) != (turn == 1)) continue;
""",
    "  last_error = refusal(launch);": "  ++launches;\n  last_error = refusal(launch);",
}
NONE, LEFT_OUT, SWAPPED_EARLY, OFF_BY_ONE = range(4)
# Both directions of wavefronts, and then each of the first two far behind.
ORDERS = (0, 1, 4, 8)


@dataclass(frozen=True, order=True)
class Plant:
    """A fault at a place of the code; none of kind 0."""

    kind: int = NONE
    place: int = 0

    def __str__(self) -> str:
        words = ("nothing", "a barrier left out", "buffers swapped early", "an index off by one")
        return words[self.kind]


CLEAN = Plant()


class Races:
    """The emulator's library, and what it found since `begin`."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.races_begin.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_uint, ctypes.c_int)
        for name in ("races_message", "races_places", "emulator_message"):
            getattr(self.library, name).restype = ctypes.c_char_p

    def begin(self, plant: Plant = CLEAN, *, order: int = 0, report: int = -1) -> None:
        """Forget all accesses and plant a fault; the first race is written to the file `report` as well."""
        self.library.races_begin(plant.kind, plant.place, order, report)

    def plants(self) -> list[Plant]:
        """Return every fault that can be planted where the code was since the last call."""
        barriers, accesses = (line.split() for line in self.library.races_places().decode().splitlines())
        kinds = ((LEFT_OUT, barriers), (SWAPPED_EARLY, barriers), (OFF_BY_ONE, accesses))
        return [Plant(kind, int(place)) for kind, places in kinds for place in places]

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


@dataclass(frozen=True)
class Outcome:
    """What a run gave, whatever tells two results apart, and the first race; nothing where there is none."""

    result: str
    race: str


def tried(run: Callable[[Plant, int], Outcome], plant: Plant, clean: str) -> tuple[bool, str]:
    """Return whether a planted fault is a race, and the race that was found.

    That it is one is not asked of happens-before: wavefronts in one of some orders give another result than
    the clean kernel. An index off by one gives another one in any order, so two of them must differ.
    """
    results, race = set() if plant.kind == OFF_BY_ONE else {clean}, ""
    for order in ORDERS:
        outcome = run(plant, order)
        results.add(outcome.result)
        race = race or outcome.race
        if len(results) > 1 and race:
            break
    return len(results) > 1, race
