"""Happens-before in the emulator: planted races are found, in warps of 32 and of 64 lanes."""

from __future__ import annotations

import ctypes
import importlib
import struct
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import races
from races import Found
from sources import copy_sources

CHECKS = Path(__file__).with_name("portable_checks.cpp")
# A buffer in two halves, as kernels have that load ahead, and one that every block writes.
MORE_CHECKS = """
KERNEL(check_buffered, THREADS, 1, Check) {
  SHARED float tile[2][THREADS + 4];
  const int lane = thread_index();
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    tile[i % 2][lane] = p.in[i * THREADS + lane];
    barrier();
    sum += tile[i % 2][THREADS - 1 - lane];
  }
  p.out[block_index() * THREADS + lane] = sum;
}
KERNEL(wrong_blocks, THREADS, 1, Check) { p.out[thread_index()] = float(block_index()); }
KERNEL(wrong_lanes, THREADS, 1, Check) {
  SHARED float tile[THREADS];
  tile[thread_index()] = 1.0f;
  p.out[block_index() * THREADS + thread_index()] = tile[thread_index() ^ 1];
}
"""


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> races.Races:
    folder = tmp_path_factory.mktemp("races")
    sources = copy_sources(folder, CHECKS.read_text(encoding="utf-8") + MORE_CHECKS)
    return races.Races(races.build(folder, sources=sources))


def launch(emulator: races.Races, name: str, warp: int, called: Callable[[str, int], None]) -> None:
    kernel = getattr(emulator.library, f"{name}_w{warp}")
    kernel.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
    data, out = array("f", range(512)), array("f", [0.0]) * 512
    with emulator.watching(called):
        assert kernel(struct.pack("=qqq", out.buffer_info()[0], data.buffer_info()[0], 0), 4, 128, 512) == 0


@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize(("name", "least"), [("check_shared", 5), ("check_buffered", 3)])
def test_every_planted_race_is_found(emulator: races.Races, name: str, least: int, warp: int) -> None:
    found = Found()
    launch(emulator, name, warp, lambda *_: emulator.tried(found, lambda plants: plants))
    assert found.alarms == []
    assert found.missed == []
    assert set(found.planted) == {races.LEFT_OUT, races.SWAPPED_EARLY, races.OFF_BY_ONE}
    assert found.planted.total() >= least


@pytest.mark.parametrize(
    ("name", "memory"),
    [("wrong_missing_barrier", "shared"), ("wrong_lanes", "shared"), ("wrong_blocks", "global")],
)
def test_a_race_of_the_code_is_named(emulator: races.Races, name: str, memory: str) -> None:
    found = Found()
    launch(emulator, name, 64, lambda *_: emulator.tried(found, lambda _: []))
    (alarm,) = found.alarms
    assert alarm.startswith(f"{name}, block ")
    assert alarm.endswith(f" in {memory} memory")


@pytest.mark.nightly
def test_planted_races_of_our_kernels_are_found(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the packages of a stack")
    race_cases = importlib.import_module("race_cases")
    found = race_cases.trial(tmp_path, most=3, say=print)
    assert found.alarms == []
    assert found.planted.total() >= 100
    assert found.seen.total() >= 0.95 * found.planted.total()
