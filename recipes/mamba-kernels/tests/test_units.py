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
from twinrun_mamba.targets import TARGETS

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(KERNELS / "src")}


@pytest.fixture
def own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile quickly, in place of the package's."""
    folder = copy_sources(tmp_path, SMALL)
    monkeypatch.setattr(units, "SOURCES", folder)
    return folder


@pytest.mark.parametrize(("arch", "files"), [("cpu", "kernels-*.so"), ("gfx90a", "small_plain-*.hsaco")])
def test_a_kernel_is_compiled_when_it_is_first_called(
    own_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, files: str
) -> None:
    """On a GPU alone; the emulator's are one unit, since a unit each takes four times as long."""
    from twinrun_mamba.registry import ArchitectureError, CodeObject

    if TARGETS[arch].compiler() is None:
        pytest.skip(f"needs {TARGETS[arch].needs}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    objects = tmp_path / "objects"
    assert compiler.build([arch], sources=own_sources, objects=objects, first_use=True) == {}
    assert compiler.read_index(objects)["archs"][arch]["kernels"] == ["small_many_kernel", "small_plain"]
    assert not (objects / arch).exists()
    found = CodeObject(arch, objects).kernel("small_plain")
    assert (found.threads, found.shared_bytes(0)) == (64, 0)
    assert [path.name for path in (objects / arch).glob("*[!n]")] == [found.path.name]
    assert found.path in (objects / arch).glob(files)
    with pytest.raises(ArchitectureError, match="small_other"):
        CodeObject(arch, objects).kernel("small_other")


def test_processes_that_call_at_once_compile_once(tmp_path: Path) -> None:
    sources = copy_sources(tmp_path, SMALL)
    script = (
        "import sys; from pathlib import Path; from twinrun_mamba import compile, units\n"
        "sources, objects = map(Path, sys.argv[1:])\n"
        "unit = units.Unit.of('cpu', 'small_plain', sources)\n"
        "compile.make([unit], sources=sources, objects=objects, say=print)"
    )
    arguments = [sys.executable, "-c", script, str(sources), str(tmp_path / "objects")]
    started = [
        subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0]
    assert sorted(len(lines) for lines in printed) == [1, 1, 1, 2]
    assert sum("up to date" in lines[0] for lines in printed) == 3
