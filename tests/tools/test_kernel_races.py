"""Happens-before in the emulator: planted races are found, in warps of 32 and of 64 lanes."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from sources import copy_sources

from tools.kernel_code import races

pytestmark = pytest.mark.nightly
CHECKS = Path(races.CSRC).parents[1] / "tests" / "portable_checks.cpp"
Run = Callable[[str, int], None]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> races.Races:
    folder = tmp_path_factory.mktemp("races")
    sources = copy_sources(folder, CHECKS.read_text(encoding="utf-8"))
    return races.Races(races.build(folder, sources=sources))


@pytest.fixture
def run(emulator: races.Races) -> Run:
    emulator.library.races_forget_sites()

    def started(name: str, warp: int) -> None:
        kernel = getattr(emulator.library, f"{name}_w{warp}")
        kernel.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
        data, out = array("f", range(512)), array("f", [0.0]) * 512
        params = struct.pack("=qqq", out.buffer_info()[0], data.buffer_info()[0], 0)
        assert kernel(params, 4, 128, 512) == 0

    return started


@pytest.mark.parametrize("warp", [32, 64])
def test_a_left_out_barrier_is_a_race(emulator: races.Races, run: Run, warp: int) -> None:
    emulator.begin()
    run("check_shared", warp)
    assert (emulator.found, emulator.barriers) == ("", 2)
    for site in range(2):
        emulator.begin(without=site, order=3)
        run("check_shared", warp)
        assert "of shared memory" in emulator.found
    emulator.begin()
    run("wrong_missing_barrier", warp)
    assert emulator.found.startswith("wrong_missing_barrier, block ")
