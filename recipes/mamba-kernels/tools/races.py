"""Build the emulator of the scan and convolution with happens-before: see races.cpp.

A library is loaded where the plain emulator would be, so that any case of the kernels' tests runs on it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from twinrun_mamba import targets

CSRC = Path(__file__).resolve().parents[1] / "kernels" / "csrc"
# Blocks, wavefronts and lanes run forward or backward by the last bit of an order; from the second order on,
# one wavefront runs only where no other can. What a stack held before is the same in any order.
CHANGES = {
    "constexpr size_t STACK_BYTES": """unsigned order = 0;
std::function<void(const Launch&)> at_launch;
std::function<void()> at_end;
std::function<void(const char*, const std::string&)> say = [](const char*, const std::string&) {};
constexpr size_t STACK_BYTES""",
    "// A synchronization point of": """// What a planted fault holds of a lane.
struct Held {
  bool late = false, touched = false, writes = false;
  size_t size = 0;
  char* at = nullptr;
  char before[16] = {};
};

// A synchronization point of""",
    "#include <link.h>\n": "#include <link.h>\n\n#include <functional>\n",
    "  bool finished = false;\n": "  bool finished = false;\n  Held held;\n",
    "    fiber.finished = false;\n": """    fiber.finished = false;
    fiber.held = {};
    memset(fiber.stack.get() + STACK_BYTES - 16384, POISON, 16384);
""",
    "  const bool backward = (index + number) % 2;\n": """  const int width = launch.warp;
  const int waves = (count + width - 1) / width;
  const int lags = order < 2 ? -1 : int(order - 2) % waves;
""",
    "  for (int i = 0; i < count && error.empty(); ++i) {\n": """
  for (int turn = 0; turn < 2 && !progress; ++turn)
  for (int i = 0; i < count && error.empty(); ++i) {
""",
    "    const int next = backward ? count - 1 - i : i;\n": """
    const int next = order % 2 ? count - 1 - i : i;
    if ((next / width == lags) != (turn == 1)) continue;
""",
    "  block.launch.body(block.launch.params);\n": """
  block.launch.body(block.launch.params);
  if (at_end) at_end();
""",
    "std::max(1u, std::thread::hardware_concurrency())": "1",
    "      block.run(i);\n": "      block.run(order % 2 ? launch.blocks - 1 - i : i);\n",
    "  last_error = refusal(launch);": "  if (at_launch) at_launch(launch);\n  last_error = refusal(launch);",
}
NONE, LEFT_OUT, SWAPPED_EARLY, OFF_BY_ONE = range(4)
KINDS = ("nothing", "a barrier left out", "buffers swapped early", "an index off by one")
# Both directions, and each of four wavefronts far behind the others.
ORDERS = range(6)
# Seconds of the processor after which a run is ended: a fault may leave a loop without its end.
LONGEST = 20


@dataclass(frozen=True)
class Plant:
    """A fault at a place of the code; none of kind 0."""

    kind: int = NONE
    place: int = 0

    def __str__(self) -> str:
        return KINDS[self.kind]


CLEAN = Plant()


@dataclass(frozen=True)
class Outcome:
    """The digest of what a run wrote, or how it ended; what is wrong; what can be planted in its code.

    A kernel that the emulator refuses, since some of its lanes wait at another barrier, has no result.
    """

    result: str | None
    race: str
    plants: tuple[Plant, ...]


@dataclass
class Found:
    """Alarms in clean kernels; races planted and found by kind, those missed; other faults named."""

    alarms: list[str] = field(default_factory=list)
    planted: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    others: int = 0

    def add(self, more: Found) -> None:
        """Count what was found of more launches too."""
        self.alarms += more.alarms
        self.planted += more.planted
        self.seen += more.seen
        self.missed += more.missed
        self.others += more.others


class Races:
    """The emulator's library; while `watching`, each launch of it is tried with planted faults first."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.races_run.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_uint, ctypes.c_int)
        self.library.races_run.restype = None

    @contextmanager
    def watching(self, called: Callable[[str, int], None]) -> Iterator[None]:
        """Call with a kernel's name and lanes of a wavefront before each launch."""
        raised: list[BaseException] = []

        def guarded(kernel: bytes, warp: int) -> None:
            try:
                called(kernel.decode(), warp)
            except BaseException as error:
                raised.append(error)

        held = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)(guarded)
        self.library.races_at_launch(held)
        yield
        self.library.races_at_launch(None)
        if raised:
            raise raised[0]

    def run(self, plant: Plant, order: int) -> Outcome:
        """Run the launch that is watched in a process of its own, which a fault may end."""
        reads, writes = os.pipe()
        child = os.fork()
        if not child:
            try:
                faulthandler.disable()
                signal.setitimer(signal.ITIMER_PROF, LONGEST)
                self.library.races_run(plant.kind, plant.place, order, writes)
            finally:
                os._exit(0)
        os.close(writes)
        with os.fdopen(reads, encoding="utf-8") as answers:
            lines = dict(line.rstrip("\n").split(" ", 1) for line in answers)
        _, status = os.waitpid(child, 0)
        plants = (Plant(*map(int, one.split(":"))) for one in lines.get("plants", "").split())
        refused = lines.get("refused", "")
        result = None if refused else lines.get("result", f"ended by {status}")
        return Outcome(result, lines.get("race", refused), tuple(plants))

    def tried(self, found: Found, chosen: Callable[[tuple[Plant, ...]], Iterable[Plant]]) -> None:
        """Run the launch that is watched clean in every order, then with each fault that is chosen."""
        clean = [self.run(CLEAN, order) for order in ORDERS]
        wrong = [one.race or str(one.result) for one in clean if one.race or one.result != clean[0].result]
        found.alarms += wrong[:1]
        for plant in chosen(clean[0].plants):
            matters, race = self._planted(plant, clean[0].result)
            found.planted[plant.kind] += matters
            found.seen[plant.kind] += matters and bool(race)
            found.others += not matters and bool(race)
            if matters and not race:
                found.missed.append(f"missed: {plant} at {plant.place}")

    def _planted(self, plant: Plant, clean: str | None) -> tuple[bool, str]:
        """Return whether a planted fault is a race, and the race that was found.

        That it is one is not asked of happens-before: one of some orders gives another result than the clean
        kernel. An index off by one gives another one in any order, so two of them must differ.
        """
        results = set[str | None]() if plant.kind == OFF_BY_ONE else {clean}
        race = ""
        for order in ORDERS:
            outcome = self.run(plant, order)
            results.add(outcome.result)
            race = race or outcome.race
            if len(results - {None}) > 1 and race:
                break
        return len(results - {None}) > 1, race


def build(objects: Path, *, sources: Path = CSRC) -> Path:
    """Make the emulator in `objects`, as the compiler of the kernels does; return its library.

    Raises CompileError without a C++ compiler, and where the emulator's source is not as it is changed here.
    """
    cxx = targets.cpu_compiler()
    if cxx is None:
        raise targets.CompileError("needs a C++17 compiler")
    objects.mkdir(parents=True, exist_ok=True)
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
