"""AMD's pseudocode of instructions runs our compiled kernels: the results are those of our lanes."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from twinrun_mamba import compile as compiler
from twinrun_mamba import units
from twinrun_mamba.targets import amd_compiler, cpu_compiler

pytest.importorskip("tinygrad", reason="needs the extra `opinion`: pip install -e .[opinion]")
from tools.kernel_code.wavefront import WITHOUT, CompiledKernel, understood

ARCHS = ("gfx90a", "gfx942")
THREADS = 128
CHECKS = Path(__file__).parents[2] / "recipes/mamba-kernels/tests/portable_checks.cpp"
EDGES = (
    0,
    1,
    3,
    1.5,
    1e-40,
    1e-45,
    150,
    126.5,
    127,
    127.9,
    88,
    np.inf,
    np.nan,
    3.4e38,
    1.2e-38,
    65504,
    65520,
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the objects of small kernels, each of which tries one function of the portability header."""
    from sources import copy_sources  # noqa: PLC0415

    if amd_compiler() is None or cpu_compiler() is None:
        pytest.skip("needs clang 19 with lld, or hipcc, and a C++17 compiler")
    folder = tmp_path_factory.mktemp("opinion")
    sources = copy_sources(folder, CHECKS.read_text(encoding="utf-8"))
    assert not compiler.build(
        ["cpu", *ARCHS], sources=sources, objects=folder / "objects", say=lambda _: None
    )
    return folder / "objects"


def inputs() -> Any:
    """Return edges of both signs, then any bits at all."""
    edges = np.array([*EDGES, *(-x for x in EDGES)], np.float32)
    random = np.random.default_rng(1).integers(0, 1 << 32, 4096 - len(edges), np.uint32).view(np.float32)
    return np.concatenate([edges, random])


HALVES: Any = np.arange(1 << 16, dtype=np.uint16)
RUNS = {
    # Kernel: input, outputs of 32 bits, blocks, bytes of LDS.
    "check_shuffle_xor": (inputs()[:THREADS], 64 * THREADS, 1, 0),
    "check_shuffle": (inputs()[:THREADS], THREADS, 1, 0),
    "check_shared": (inputs()[: 5 * THREADS], 5 * THREADS, 5, 4 * THREADS),
    "check_math": (inputs()[:THREADS], 3 * THREADS, 1, 0),
    "check_to_bf16": (inputs(), 4096, 4, 0),
    "check_to_fp16": (inputs(), 4096, 4, 0),
    "check_from_bf16": (HALVES, 1 << 17, 64, 0),
    "check_from_fp16": (HALVES, 1 << 17, 64, 0),
}


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", RUNS)
def test_small_kernels_give_the_bits_of_our_lanes(small: Path, name: str, arch: str) -> None:
    data, count, blocks, lds = RUNS[name]
    ours: Any = np.full(count, np.nan, np.float32)
    theirs: Any = ours.copy()
    entry = units.read(small / "cpu", name)
    kernel = getattr(ctypes.CDLL(str(small / "cpu" / entry["object"])), f"{name}_w64")
    kernel.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int, ctypes.c_size_t)
    params = [struct.pack("=qqq", out.ctypes.data, data.ctypes.data, len(data)) for out in (ours, theirs)]
    assert kernel(params[0], blocks, 0, lds) == 0
    entry = units.read(small / arch, name)
    CompiledKernel(small / arch / entry["object"], int(entry["threads"])).launch(
        params[1], blocks, lds, Counter()
    )
    if name == "check_math":
        # 2^x and 1/x to the bit. A GPU rounds each step of softplus's polynomial once, a CPU twice.
        np.testing.assert_array_equal(theirs.reshape(-1, 3)[:, :2], ours.reshape(-1, 3)[:, :2])
        np.testing.assert_allclose(theirs[2::3], ours[2::3], rtol=2**-22)
    elif "_to_" in name:
        kind = np.float16 if "fp16" in name else np.uint16
        # A NaN has many forms.
        bits = [np.nan_to_num(out.view(kind), nan=0.5, posinf=None, neginf=None) for out in (theirs, ours)]
        np.testing.assert_array_equal(*bits)
    else:
        np.testing.assert_array_equal(theirs, ours)


@pytest.mark.trials
@pytest.mark.parametrize("arch", ARCHS)
def test_the_scan_and_the_convolution_are_as_exact_as_in_our_lanes(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: the lock of a stack")
    import cases  # noqa: PLC0415
    from twinrun_mamba import drivers  # noqa: PLC0415
    from twinrun_mamba.launch import launcher  # noqa: PLC0415

    executed: Counter[str] = Counter()
    codes: dict[str, CompiledKernel] = {}

    def launch(driver: Any, index: int, start: Any) -> None:
        name = start.function
        if name not in codes:
            assert compiler.build_kernels(arch, name, objects=tmp_path, say=lambda _: None)
            entry = units.read(tmp_path / arch, name)
            codes[name] = CompiledKernel(tmp_path / arch / entry["object"], int(entry["threads"]))
        codes[name].launch(start.params, start.blocks, start.shared_bytes, executed)

    monkeypatch.setattr(drivers.Emulator, "function", lambda driver, index, image, name, shared: name)
    monkeypatch.setattr(drivers.Emulator, "launch", launch)
    launcher.cache_clear()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        scan = cases.ScanCase(dtype, batch=1, channels=2, length=20, states=8, options=cases.SCAN_OPTIONS)
        conv = cases.ConvCase(dtype, batch=1, channels=4, length=20, options=cases.CONV_OPTIONS)
        for case in (scan, conv):
            assert cases.worst(cases.errors(case, backend="emulated-64"), case) is None
    launcher.cache_clear()
    # Whether it ran or not, an instruction of these kernels has a second opinion, or is named.
    codes |= {path.name: CompiledKernel(path, 64) for path in (tmp_path / arch).glob("*.hsaco")}
    covered, without = map(set.union, *(understood(code.instructions()) for code in codes.values()))
    assert executed.keys() <= covered | without
    assert without <= set(WITHOUT)
    assert len(covered) >= 100
