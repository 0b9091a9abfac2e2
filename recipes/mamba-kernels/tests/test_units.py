"""Which kernels are compiled when one is called, and that several processes compile it once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sources import KERNELS, SMALL, copy_sources
from twinrun_mamba import compile as compiler
from twinrun_mamba import units
from twinrun_mamba.targets import TARGETS, cpu_compiler

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(KERNELS / "src")}


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile quickly, in place of the package's."""
    folder = copy_sources(tmp_path, SMALL)
    for module in (compiler, units):
        monkeypatch.setattr(module, "SOURCES", folder)
    return folder


@pytest.mark.parametrize(
    ("arch", "compiled"), [("cpu", ["small_many_kernel", "small_plain"]), ("gfx90a", ["small_plain"])]
)
def test_a_kernel_is_compiled_when_it_is_first_called(
    own_sources: Path, tmp_path: Path, arch: str, compiled: list[str]
) -> None:
    """On a GPU alone; the emulator's are one unit, since a unit each takes four times as long."""
    if TARGETS[arch].compiler() is None:
        pytest.skip(f"needs {TARGETS[arch].needs}")
    objects, said = tmp_path / "objects", list[str]()
    missing = compiler.build([arch], sources=own_sources, objects=objects, first_use=True)
    assert missing == {}
    assert compiler.read_index(objects)["archs"][arch]["kernels"] == ["small_many_kernel", "small_plain"]
    assert compiler.read_kernels(objects, arch) == {}
    assert compiler.build_kernels(arch, "small_plain", objects=objects, say=said.append)
    assert list(compiler.read_kernels(objects, arch)) == compiled
    assert not compiler.build_kernels(arch, "unknown", objects=objects, say=said.append)
    assert f"makes {len(compiled)} of {len(compiled)} kernel" in said[0]


def test_processes_that_call_at_once_compile_once(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path, SMALL)
    objects = tmp_path / "objects"
    script = (
        "import sys; from pathlib import Path; from twinrun_mamba import compile, units\n"
        "compile.SOURCES = units.SOURCES = Path(sys.argv[1])\n"
        "compile.build_kernels('cpu', 'small_plain', objects=Path(sys.argv[2]), say=print)"
    )
    arguments = [sys.executable, "-c", script, str(sources), str(objects)]
    objects.mkdir()
    started = [
        subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0]
    assert sorted(len(lines) for lines in printed) == [1, 1, 1, 2]
    assert sum("up to date" in lines[0] for lines in printed) == 3


def test_what_is_called_together_is_compiled_together() -> None:
    cxx = cpu_compiler()
    assert cxx
    (whole,) = TARGETS["cpu"].units(cxx, KERNELS / "csrc")
    names = whole.kernels
    assert len(names) == 124
    assert units.called_together("scan_forward_packed_bf16", names) == [
        "scan_forward_packed_bf16",
        "scan_backward_packed_bf16",
        "scan_reduce_bf16",
        "scan_split_backward_packed_bf16",
        "scan_split_forward_packed_bf16",
    ]
    assert units.called_together("scan_forward_bf16", names) == [
        "scan_forward_bf16",
        "scan_backward_bf16",
        "scan_reduce_bf16",
        "scan_split_backward_bf16",
        "scan_split_forward_bf16",
    ]
    assert units.called_together("conv_forward_aligned_fp16", names) == [
        "conv_forward_aligned_fp16",
        "conv_backward_aligned_fp16",
        "conv_reduce",
    ]
    assert units.called_together("conv_update_fp32", names) == ["conv_update_fp32"]
