"""Kernels of eight bits a value without a GPU: in Triton's interpreter, and compiled for both vendors."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs the packages of a stack for GPUs")

import scaling_kernels
import triton
from compression import BLOCK
from triton.backends.compiler import GPUTarget

from tests.ranks import environment

TARGETS = [GPUTarget("hip", "gfx90a", 64), GPUTarget("hip", "gfx942", 64)]
TARGETS += [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)]


def test_kernels_compute_what_the_processor_does() -> None:
    # An environment chooses the interpreter when Triton is imported.
    variables = environment() | {"TRITON_INTERPRET": "1"}
    variables["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    command = [sys.executable, str(Path(__file__).with_name("scaling_kernels_here.py"))]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.needs("ld.lld-19")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.backend}-{target.arch}")
def test_kernels_compile(target: GPUTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Triton looks for the linker in ROCm, which this machine need not have.
    monkeypatch.setenv("TRITON_HIP_LLD_PATH", str(shutil.which("ld.lld-19")))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for digit, value, summed in itertools.product(("*i8", "*u8"), ("*fp32", "*bf16"), (False, True)):
        kinds = {"digits": digit, "plus_digits": digit, "values": value, "target": value, "count": "i32"}
        kinds |= dict.fromkeys(("scales", "plus_scales", "lost"), "*fp32")
        kinds |= dict.fromkeys(("most", "least"), "fp32")
        constants = {"PLUS": summed, "LOST": summed, "ROWS": scaling_kernels.ROWS, "BLOCK": BLOCK}
        for kernel in (scaling_kernels._encode, scaling_kernels._decode):
            names = kernel.arg_names
            signature = {name: kinds.get(name, "constexpr") for name in names}
            values = {name: constants[name] for name in names if name in constants}
            compiled = triton.compile(triton.compiler.ASTSource(kernel, signature, values), target=target)
            assert compiled.asm["hsaco" if target.backend == "hip" else "ptx"]
