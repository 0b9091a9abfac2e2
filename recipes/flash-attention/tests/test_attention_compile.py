"""Every row for AMD GPUs, compiled without one: no spills, and what budgets.toml allows.

The compiler needs a Triton that is not the interpreter, so each architecture has a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import triton

KERNELS = Path(__file__).parents[1] / "kernels"
BUDGETS = tomllib.loads((KERNELS / "budgets.toml").read_text(encoding="utf-8"))
# The least shared memory of a compute unit that a program must fit in.
SHARED_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840}
PROGRAM = """
import json, sys
from dataclasses import asdict
from twinrun_attention import targets
arch = sys.argv[1]
print(json.dumps([
    (row.kernel, size, asdict(targets.amd_resources(row, head_size=size, arch=arch, **options)))
    for row, size in targets.every_row(arch)
    if size in map(int, sys.argv[2].split(","))
    for options in ({}, targets.EVERYTHING) if row.kernel != "decode" or not options
]))
"""
# Where Triton finds no linker of its own it is told which one to use.
LINKER = next((path for name in ("ld.lld", "ld.lld-19") if (path := shutil.which(name))), None)


def compiled(arch: str, sizes: str) -> list[tuple[str, int, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{KERNELS / 'src'}:{KERNELS.parents[2] / 'kernels/entry/src'}"}
    if LINKER:
        environment["TRITON_HIP_LLD_PATH"] = LINKER
    command = [sys.executable, "-c", PROGRAM, arch, sizes]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[tuple[str, int, dict[str, int]]] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(
    not LINKER and triton.__version__.startswith("3.3"), reason="Triton 3.3 has no linker for AMD GPUs"
)
@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        # Of the published GPU the smaller published head size; every night all.
        ("gfx90a", "64"),
        pytest.param("gfx90a", "128", marks=pytest.mark.nightly),
        pytest.param("gfx942", "128", marks=pytest.mark.nightly),
        pytest.param("gfx950", "128", marks=pytest.mark.nightly),
        pytest.param("gfx90a", "32,256", marks=pytest.mark.nightly),
        pytest.param("gfx942", "32,64,256", marks=pytest.mark.nightly),
        pytest.param("gfx950", "32,64,256", marks=pytest.mark.nightly),
    ],
)
def test_rows_fit_the_device(arch: str, sizes: str) -> None:
    found = compiled(arch, sizes)
    assert len(found) == 7 * len(sizes.split(","))
    for kernel, size, one in found:
        assert one["spills"] == 0, f"{arch} {kernel} d={size}"
        assert one["shared_bytes"] <= SHARED_BYTES[arch], f"{arch} {kernel} d={size}"
        assert one["matrix_instructions"] > 0
    for kernel, size, one in found[::2] if triton.__version__.startswith("3.6") else ():
        budget = BUDGETS[arch][kernel][f"d{size}"]
        assert one["waves"] >= budget["waves"], f"{arch} {kernel} d={size}"


def test_budgets_have_every_row() -> None:
    for arch, shared_bytes in SHARED_BYTES.items():
        for kernel in ("forward", "backward_keys", "backward_queries", "decode"):
            sizes = BUDGETS[arch][kernel]
            assert list(sizes) == ["d32", "d64", "d128", "d256"]
            assert all(one["spills"] == 0 and one["shared_bytes"] <= shared_bytes for one in sizes.values())
