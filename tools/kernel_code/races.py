"""Build the emulator of the scan and convolution with happens-before: see races.cpp.

A library is loaded where the plain emulator would be, so that any case of the kernels' tests runs on it.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path

from twinrun_mamba import targets

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
