"""AMD's code objects on tinygrad's emulator of AMD's instructions, which others wrote from AMD's manual.

TINYGRAD names a checkout of https://github.com/tinygrad/tinygrad at COMMIT: the emulator is in its tests, and
in no wheel. It compiles each instruction, by a program called `clang`, the first time that one is met.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases import TOLERANCE, distance
from twinrun_mamba import causal_conv1d_fn, launch, registry, selective_scan_fn
from twinrun_mamba.drivers import Driver, Launch
from twinrun_mamba.launch import Launcher

COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
CHECKOUT = os.environ.get("TINYGRAD", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHECKOUT, reason=f"TINYGRAD names no checkout of tinygrad at {COMMIT[:9]}"),
]
ARCHS = ("gfx90a", "gfx942")
# Bits of a kernel descriptor: what a wave finds in its first scalar registers, and how many each takes.
USER_SCALARS = (("private", 0, 4), ("dispatch", 1, 2), ("queue", 2, 2), ("kernarg", 3, 2), ("id", 4, 2))
WAVE = 64
LDS_SHIFT, LDS_BITS, LDS_BYTES = 15, 0x1FF, 512


@functools.cache
def emulator() -> Any:
    """Return the emulator, which reads what lanes exchange before any lane writes.

    It runs lane after lane, so where such an operand is the result's own register later lanes would read what
    earlier ones have written. These kernels leave the register of the copy alone.
    """
    tests = ModuleType("test")
    tests.__path__ = [str(Path(CHECKOUT, "test"))]
    sys.modules["test"] = tests
    sys.path.insert(0, CHECKOUT)
    found: Any = importlib.import_module("test.mockgpu.amd.emu")
    load, number = found._load_dpp16_src0, found.dtypes.int
    spare = found._c(255 * WAVE, number)

    def read_whole(context: Any, instruction: Any, lane: Any, otherwise: Any) -> Any:
        each, register = context.range(), context.inst_field(type(instruction).vsrc0)
        copy = context.accvgpr.index(spare + each).store(context.rvgpr_dyn(register, each)).end(each)
        copied = context.accvgpr.after(copy)
        view = SimpleNamespace(
            inst_field=context.inst_field,
            wave_size=context.wave_size,
            rvgpr_dyn=lambda _, lane: copied.index(spare + lane.cast(number)).load(),
        )
        return load(view, instruction, lane, otherwise)

    found._load_dpp16_src0 = read_whole
    return found


class Tinygrad(Driver):
    """Starts AMD's code objects on tinygrad's emulator."""

    def __init__(self) -> None:
        self._run: Any = emulator().run_asm

    def function(self, index: int, image: Path, name: str, shared_bytes: int) -> SimpleNamespace:
        """Load a code object; its kernel's descriptor says where the code starts and what a wave is given."""
        symbols = subprocess.run(["nm", image], capture_output=True, text=True, check=True).stdout
        descriptor = next(
            int(line.split()[0], 16) for line in symbols.splitlines() if line.endswith(f" {name}.kd")
        )
        data, memory = image.read_bytes(), mmap.mmap(-1, 1 << 22)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        for number in range(count):
            kind, _, offset, place, _, length = struct.unpack_from("<IIQQQQ", data, start + number * size)
            if kind == 1:
                memory[place : place + length] = data[offset : offset + length]
        shared, scratch = struct.unpack_from("<II", memory, descriptor)
        (entry,) = struct.unpack_from("<q", memory, descriptor + 16)
        _, _, rsrc2, properties = struct.unpack_from("<IIIH", memory, descriptor + 44)
        found = {"entry": base + descriptor + entry, "shared": shared, "scratch": scratch, "rsrc2": rsrc2}
        return SimpleNamespace(**found, properties=properties, memory=memory)

    def launch(self, index: int, launch: Launch) -> None:
        """Run a kernel to its end."""
        code: SimpleNamespace = launch.function
        params = ctypes.create_string_buffer(launch.params)
        scalars: list[int] = []
        for name, bit, count in USER_SCALARS:
            if code.properties >> bit & 1:
                # Of all that a wave may be given these kernels read their parameters alone.
                address = ctypes.addressof(params) if name == "kernarg" else 0
                scalars += [address & 0xFFFFFFFF, address >> 32, 0, 0][:count]
        lds = -(-(code.shared + launch.shared_bytes) // LDS_BYTES) << LDS_SHIFT
        rsrc2 = code.rsrc2 & ~(LDS_BITS << LDS_SHIFT) | lds
        grid = (launch.blocks, 1, 1, launch.threads, 1, 1)
        self._run(code.entry, 0, *grid, 0, rsrc2, code.scratch, "cdna", scalars)


@pytest.fixture(params=ARCHS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fresh: None) -> str:
    code = registry.code_objects(registry.folder())
    if request.param not in code:
        pytest.skip(f"no code for {request.param} is built")
    made = Launcher(code[request.param], Tinygrad(), 0)
    monkeypatch.setattr(launch, "_emulated", lambda *_: made)
    return "emulated-64"


# Forward alone: what sums over a warp has ds_swizzle_b32, which the emulator cannot read.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_amds_code_convolves_as_the_reference(dtype: torch.dtype, backend: str) -> None:
    given = torch.randn(1, 2, 40).to(dtype), torch.randn(2, 4), torch.randn(2)
    with torch.no_grad():
        found = causal_conv1d_fn(*given, activation="silu", backend=backend)
        x, weight, bias = (one.double() for one in given)
        expected = causal_conv1d_fn(x, weight, bias, activation="silu", backend="reference")
    assert distance(found, expected) < TOLERANCE[dtype]


def test_amds_code_scans_as_the_reference(backend: str, request: pytest.FixtureRequest) -> None:
    u, delta, z, B, C = (torch.randn(1, rows, 40) for rows in (2, 2, 2, 4, 4))
    given = u, delta, -torch.randn(2, 4).abs(), B, C, torch.randn(2), z
    # The emulator reads LDS where lanes that are switched off point, which ends gfx90a's backward pass.
    back = request.node.callspec.params["backend"] != "gfx90a"

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = u, delta, A, B, C, D, z = [x.to(dtype).requires_grad_(back) for x in given]
        out = selective_scan_fn(u, delta, A, B, C, D, z, delta_softplus=True, backend=backend)
        return [out.detach(), *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if back else ())]

    for found, expected in zip(run(backend, torch.float32), run("reference", torch.float64), strict=True):
        assert distance(found, expected) < TOLERANCE[torch.float32]
