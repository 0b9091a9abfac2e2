"""Happens-before in the emulator: races are named, clean kernels are not, in warps of 32 and of 64 lanes."""

from __future__ import annotations

import ctypes
import itertools
import struct
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import races
from sources import copy_sources

CHECKS = Path(__file__).with_name("portable_checks.cpp")
# A buffer in two halves, as kernels have that load ahead, right and with faults; one that all blocks write.
MORE_CHECKS = """
template <bool EARLY, bool LATE>
DEVICE void buffered(const Check& p) {
  SHARED float tile[2][THREADS + 4];
  const int lane = thread_index();
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    tile[EARLY ? 0 : i % 2][lane] = p.in[i * THREADS + lane];
    if (!LATE || i != 1) barrier();
    sum += tile[EARLY ? 0 : i % 2][THREADS - 1 - lane];
  }
  p.out[block_index() * THREADS + lane] = sum;
}
KERNEL(check_buffered, THREADS, 1, Check) { buffered<false, false>(p); }
KERNEL(wrong_swapped, THREADS, 1, Check) { buffered<true, false>(p); }
KERNEL(wrong_left_out, THREADS, 1, Check) { buffered<false, true>(p); }
KERNEL(wrong_blocks, THREADS, 1, Check) { p.out[thread_index()] = float(block_index()); }
KERNEL(wrong_lanes, THREADS, 1, Check) {
  SHARED float tile[THREADS];
  tile[thread_index()] = 1.0f;
  p.out[block_index() * THREADS + thread_index()] = tile[thread_index() ^ 1];
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("races")
    sources = copy_sources(folder, CHECKS.read_text(encoding="utf-8") + MORE_CHECKS)
    return races.build(folder, sources=sources)


def launched(library: ctypes.CDLL, name: str, warp: int) -> set[str]:
    kernel = getattr(library, f"{name}_w{warp}")
    kernel.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
    data, out = array("f", range(512)), array("f", [0.0]) * 512
    params = struct.pack("=qqq", out.buffer_info()[0], data.buffer_info()[0], 0)
    return set(races.races_of(library, lambda: kernel(params, 4, 128, 512)))


# The memory in which each kernel races.
RACES = dict.fromkeys(("check_shared", "check_buffered"), "") | {"wrong_blocks": "global"}
RACES |= dict.fromkeys(("wrong_missing_barrier", "wrong_lanes", "wrong_swapped", "wrong_left_out"), "shared")


@pytest.mark.parametrize("warp", [32, 64])
@pytest.mark.parametrize(("name", "memory"), RACES.items())
def test_a_race_of_the_code_is_named(library: ctypes.CDLL, name: str, memory: str, warp: int) -> None:
    found = launched(library, name, warp)
    assert bool(found) == bool(memory)
    for line in found:
        assert line.startswith(f"{name}, block ")
        assert line.endswith(f" in {memory} memory")


@pytest.mark.nightly
def test_our_kernels_have_no_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of kernel, of the scan in one part and in parts, with one tile of states and with more."""
    torch = pytest.importorskip("torch", reason="needs the packages of a stack")
    import cases
    from twinrun_mamba import drivers

    half, full = torch.float16, torch.float32
    chosen: tuple[cases.Case, ...] = (
        cases.ScanCase(half, batch=1, length=70, states=16),
        cases.ScanCase(torch.bfloat16, batch=1, length=70, states=20, options=cases.SCAN_OPTIONS),
        cases.ScanCase(full, batch=1, length=70, channels=40, states=16, layout="token-major"),
        cases.ConvCase(torch.bfloat16, batch=1, length=131),
        cases.ConvCase(full, batch=1, length=70, width=7),
        cases.ConvCase(half, batch=1, length=20, layout="token-major", options=cases.TRAINING_OPTIONS),
        cases.ConvCase(half, batch=1, length=136, options=cases.TRAINING_OPTIONS),
        cases.ConvCase(torch.bfloat16, batch=1, length=20, layout="token-major", options=cases.CONV_OPTIONS),
    )
    library = races.build(tmp_path)
    for size in (32, 64):
        monkeypatch.setattr(cast("Any", drivers.driver(str(size))), "_libraries", _Always(library))
    for case, backend in itertools.product(chosen, cases.EMULATED_BACKENDS):
        generator = torch.Generator().manual_seed(1)
        inputs = {name: cases.in_layout(one, name, case) for name, one in case.inputs(generator).items()}
        index = cases.packed(case, generator) if "seq_idx" in case.options else None
        call: Callable[[], object] = partial(cases.results, case, inputs, backend, index, 1)
        assert set(races.races_of(library, call)) == set(), (case, backend)


class _Always(dict[Path, ctypes.CDLL]):
    """Gives one library, whichever is asked for."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library

    def setdefault(self, *_: Any) -> ctypes.CDLL:
        return self._library
