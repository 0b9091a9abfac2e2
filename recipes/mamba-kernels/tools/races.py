"""Build the emulator of the scan and convolution with happens-before, and run calls on it: see races.cpp.

The library is loaded where the plain emulator would be, so that any case of the kernels' tests runs on it.
"""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun_mamba import targets
from twinrun_mamba.units import SOURCES

# Blocks, wavefronts and lanes run forward or backward by the last bit of an order; from the second order on,
# one wavefront runs only where no other can. What a stack held before is the same in any order.
CHANGES = {
    "constexpr size_t STACK_BYTES": """unsigned order = 0;
std::function<void()> at_launch;
constexpr size_t STACK_BYTES""",
    "#include <link.h>\n": "#include <link.h>\n\n#include <functional>\n",
    "    fiber.finished = false;\n": """    fiber.finished = false;
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
    "std::max(1u, std::thread::hardware_concurrency())": "1",
    "      block.run(i);\n": "      block.run(order % 2 ? launch.blocks - 1 - i : i);\n",
    "  last_error = refusal(launch);": "  if (at_launch) at_launch();\n  last_error = refusal(launch);",
}
# Both directions, and each of four wavefronts far behind the others.
ORDERS = range(6)


def races_of(library: ctypes.CDLL, call: Callable[[], object]) -> Iterator[str]:
    """Run a call in every order; yield a line for each kernel that races in one."""
    library.races_found.restype = ctypes.c_char_p
    for order in ORDERS:
        library.races_order(order)
        call()
        yield from library.races_found().decode().splitlines()


def build(objects: Path, *, sources: Path = SOURCES) -> ctypes.CDLL:
    """Make the emulator in `objects`, as the compiler of the kernels does; return its library.

    Raises CompileError without a C++ compiler, and where the emulator's source is not as it is changed here.
    """
    cxx = targets.cpu_compiler()
    if cxx is None:
        raise targets.CompileError("needs a C++17 compiler")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "csrc"
        shutil.copytree(sources, copy)
        emulator = (copy / "emulator.cpp").read_text(encoding="utf-8")
        for before, now in CHANGES.items():
            if (count := emulator.count(before)) != 1:
                raise targets.CompileError(f"emulator.cpp: {before!r} is there {count} times")
            emulator = emulator.replace(before, now)
        (copy / "emulator.cpp").write_text(emulator, encoding="utf-8")
        shutil.copy(Path(__file__).with_suffix(".cpp"), copy)
        made = [copy / "emulator.o"]
        cxx.run(*targets.CPU_FLAGS, "-DNDEBUG", copy / "races.cpp", "-c", "-o", made[0])
        for size in targets.WARP_SIZES:
            made.append(copy / f"warp{size}.o")
            flags = (*targets.CPU_FLAGS, "-fsanitize=thread", f"-DEMULATED_WARP_SIZE={size}")
            cxx.run(*flags, copy / "emulated_kernels.cpp", "-c", "-o", made[-1])
        objects.mkdir(parents=True, exist_ok=True)
        cxx.run("-shared", *made, "-o", objects / "races.so", "-pthread", "-lstdc++")
    return ctypes.CDLL(str(objects / "races.so"))
