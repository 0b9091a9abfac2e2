"""The portability header on the CPU that emulates warps of 32 and of 64 lanes, and in AMD and NVIDIA code."""

from __future__ import annotations

import ctypes
import math
import random
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import pytest
from sources import copy_sources
from twinrun_mamba import compile as compiler
from twinrun_mamba import targets

SOURCE = Path(__file__).with_name("portable_checks.cpp").read_text(encoding="utf-8")
THREADS = 128
NAN = float("nan")


class Emulator:
    """Kernels of one width of warp."""

    def __init__(self, objects: Path, warp_size: int) -> None:
        (library,) = (objects / "cpu").glob("*.so")
        self.library, self.warp_size = ctypes.CDLL(str(library)), warp_size
        self.library.emulator_message.restype = ctypes.c_char_p

    def run(
        self, name: str, data: array[Any], outputs: int, *, blocks: int = 1, shared: int = 0, count: int = 0
    ) -> array[float]:
        """Return what a kernel wrote; AssertionError with the emulator's words when it found it wrong."""
        out = array("f", [NAN]) * outputs
        params = struct.pack("=qqq", out.buffer_info()[0], data.buffer_info()[0], count)
        status = self.start(name, params, blocks, THREADS, shared)
        assert status == 0, self.library.emulator_message().decode()
        return out

    def start(self, name: str, params: bytes, blocks: int, threads: int, shared: int) -> int:
        """Return the kernel's status."""
        kernel = getattr(self.library, f"{name}_w{self.warp_size}")
        kernel.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
        return int(kernel(params, blocks, threads, shared))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("portable")
    missing = compiler.build(["cpu"], sources=copy_sources(folder, SOURCE), objects=folder / "objects")
    assert not missing
    return folder / "objects"


@pytest.fixture(params=[32, 64])
def emulator(library: Path, request: pytest.FixtureRequest) -> Emulator:
    return Emulator(library, request.param)


def test_softplus_has_all_digits_of_small_values(emulator: Emulator) -> None:
    data = array("f", [*(i / 2 for i in range(-60, 60)), -80.0, 500.0])
    found = emulator.run("check_math", data, len(data), count=len(data))
    for x, y in zip(data, found, strict=True):
        # The exponent is rounded to single precision, which counts where it is large.
        rounding = abs(x) * 2**-23
        assert y == pytest.approx(max(x, 0) + math.log1p(math.exp(-abs(x))), rel=1e-6 + rounding, abs=0)
    ends = array("f", [math.inf, -math.inf])
    assert emulator.run("check_math", ends, 2, count=2).tolist() == [math.inf, 0.0]


def rounded_bf16(x: float) -> int:
    (bits,) = struct.unpack("=I", struct.pack("=f", x))
    return int((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def rounded_fp16(x: float) -> int:
    try:
        return int(struct.unpack("=H", struct.pack("=e", x))[0])
    except OverflowError:
        return 0x7C00 if x > 0 else 0xFC00


# How numbers are rounded, infinity, and how many binary digits there are.
CONVERSIONS = {"bf16": (rounded_bf16, 0x7F80, 8), "fp16": (rounded_fp16, 0x7C00, 11)}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_rounding_is_to_nearest_even(emulator: Emulator, kind: str) -> None:
    rounded, infinity, digits = CONVERSIONS[kind]
    numbers = [*_hard_numbers(digits), *_random_floats(4000)]
    numbers += [0.0] * (-len(numbers) % 8)
    data, count = array("f", numbers), len(numbers)
    blocks = -(-count // (8 * THREADS))
    out = emulator.run(f"check_to_{kind}", data, count, blocks=blocks, count=count)
    bits = array("H", out.tobytes())
    for number, eight, one in zip(data, bits[:count], bits[count:], strict=True):
        assert eight == one
        assert eight & 0x7FFF > infinity if math.isnan(number) else eight == rounded(number), number


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_every_number_of_16_bits_widens_exactly(emulator: Emulator, kind: str) -> None:
    count = 1 << 16
    data = array("H", range(count))
    out = emulator.run(f"check_from_{kind}", data, 2 * count, blocks=count // (8 * THREADS), count=count)
    for bits, eight, one in zip(data, out[:count], out[count:], strict=True):
        code = struct.pack("=H", bits) if kind == "fp16" else struct.pack("=HH", 0, bits)
        (expected,) = struct.unpack("=e" if kind == "fp16" else "=f", code)
        assert [eight, one] == [expected] * 2 or all(map(math.isnan, (eight, one, expected)))


def _hard_numbers(digits: int) -> list[float]:
    halves = [math.ldexp(1 + (2 * k + 1) / 2**digits, e) for k in range(8) for e in (-30, -14, -1, 0, 15)]
    edges = [65504.0, 65519.996, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14 - 2.0**-26, 3.3e38]
    positive = [*halves, *edges, 0.0, math.inf]
    return [*positive, *(-x for x in positive), NAN]


def _random_floats(count: int) -> list[float]:
    bits = (random.getrandbits(32) for _ in range(count))
    return [struct.unpack("=f", struct.pack("=I", b))[0] for b in bits]


WRONG = {
    "wrong_return": r"divergence: thread \d+ waits at shuffle_xor\(4\) while thread 5 has finished",
    "wrong_half_barrier": r"divergence: thread \d+ waits at barrier while thread \d+ has finished",
    "wrong_branches": r"divergence: thread \d+ is at shuffle_xor\(\d\) while others are at shuffle_xor\(\d\)",
    "wrong_too_much_shared": r"writes past its 256 bytes of dynamic shared memory",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_refused(emulator: Emulator, name: str) -> None:
    out = array("f", [0.0]) * THREADS
    params = struct.pack("=qqq", out.buffer_info()[0], 0, 64)
    assert emulator.start(name, params, 1, THREADS, 256) == 1
    message = emulator.library.emulator_message().decode()
    assert re.fullmatch(rf"{name}, block 0: {WRONG[name]}", message), message


@pytest.mark.parametrize(("name", "how_many"), [("wrong_unwritten", all), ("wrong_missing_barrier", any)])
def test_what_was_not_written_yet_is_nan(emulator: Emulator, name: str, how_many: Any) -> None:
    out = emulator.run(name, array("f"), 4 * THREADS, blocks=4, shared=4 * THREADS)
    assert how_many(map(math.isnan, out))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_amd_code_permutes_lanes_for_free_where_it_can(arch: str, tmp_path: Path) -> None:
    amd = targets.amd_compiler()
    if amd is None:
        pytest.skip("needs clang 19 with lld, or hipcc")
    source, out = copy_sources(tmp_path, SOURCE) / "kernels.cpp", tmp_path / "out"
    amd.run(*targets.AMD_FLAGS, f"--offload-arch={arch}", "-S", source, "-o", out)
    assembly = out.read_text(encoding="utf-8", errors="replace")
    body = assembly.partition("check_shuffle_xor:")[2].partition(".Lfunc_end")[0]
    for mode in ("quad_perm:[1,0,3,2]", "quad_perm:[3,2,1,0]", "row_half_mirror", "row_mirror", "row_ror:8"):
        assert mode in body, mode
    assert body.count("ds_swizzle_b32") == len(set(range(1, 32)) - {1, 2, 3, 7, 8, 15})
    assert body.count("ds_bpermute_b32") == 32
    assert not re.search(r"\b(global|flat|ds)_atomic|\b(flat|scratch)_(load|store)_", assembly)
