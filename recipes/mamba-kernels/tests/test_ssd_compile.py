"""SSD's kernels, compiled for GPUs without one: no spills, shared memory that there is, matrix instructions.

The compiler needs a Triton that is not the interpreter, so each architecture has a process of its own.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
KERNELS = Path(__file__).parents[1] / "kernels"
# Shared memory that one program may have.
SHARED_BYTES = {"gfx90a": 65536, "gfx942": 65536, "gfx950": 163840, "sm90": 232448}
# Kernels that have products of matrices, by the start of their names.
PRODUCTS = ("chunk_states", "chunk_products", "chunk_outputs", "value_", "product_", "projection_")
COUNTS = ("registers", "spills", "shared_bytes", "matrix_instructions")
# Where Triton finds no linker of its own it is told which one to use.
LINKER = next((path for name in ("ld.lld", "ld.lld-19") if (path := shutil.which(name))), None)


def budgets() -> dict[tuple[str, str], dict[str, int]]:
    with (KERNELS / "ssd_budgets.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["arch"], row["kernel"]): {name: int(row[name]) for name in COUNTS}
            for row in csv.DictReader(file)
        }


def has_products(kernel: str) -> bool:
    """Say whether a kernel should have matrix instructions; sm90 has them for the parts of fp32."""
    return kernel.startswith(PRODUCTS)


def compiled(arch: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": f"{KERNELS / 'src'}:{KERNELS.parents[2] / 'kernels/entry/src'}"}
    if LINKER:
        environment["TRITON_HIP_LLD_PATH"] = LINKER
    command = [sys.executable, "-m", "twinrun_mamba.ssd.targets", arch]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_sum_depends_on_the_order_of_programs() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (KERNELS / "src/twinrun_mamba/ssd").glob("*.py")]
    assert any("@triton.jit" in text for text in sources)
    assert not any("atomic" in text or "autotune" in text for text in sources)


@pytest.mark.nightly
@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_kernels_stay_within_their_budget(arch: str) -> None:
    if arch.startswith("gfx") and not LINKER and triton.__version__.startswith("3.3"):
        pytest.skip("Triton 3.3 has no linker for AMD GPUs")
    allowed, found = budgets(), compiled(arch)
    assert found
    if arch.startswith("gfx"):
        assert {(arch, one["kernel"]) for one in found} == {key for key in allowed if key[0] == arch}
    for one in found:
        name = f"{arch} {one['kernel']}"
        assert one["shared_bytes"] <= SHARED_BYTES[arch], name
        assert one["matrix_instructions"] > 0 or not has_products(one["kernel"]), name
        assert not one["spills"], name
        if arch.startswith("gfx") and triton.__version__.startswith("3.3"):
            assert one["registers"] <= allowed[arch, one["kernel"]]["registers"], name


def test_budgets_allow_no_spill_and_fit_the_devices() -> None:
    for (arch, name), one in budgets().items():
        assert one["spills"] == 0, f"{arch} {name}"
        assert one["shared_bytes"] <= SHARED_BYTES[arch], f"{arch} {name}"
        assert one["matrix_instructions"] > 0 or not has_products(name), f"{arch} {name}"
