"""Compiling kernels into code objects, at once or when one is called, and packing them into a wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sources import KERNELS, SMALL, copy_sources, write_kernels
from twinrun_mamba import compile as compiler
from twinrun_mamba import units
from twinrun_mamba.targets import ARCHS, TARGETS, CompileError, usage_of_nvidia
from twinrun_mamba.units import Unit

COMPILE = (sys.executable, "-m", "twinrun_mamba.compile")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(KERNELS / "src")}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return copy_sources(tmp_path, SMALL)


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """A folder without programs, as PATH."""
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def built(folder: Path, archs: list[str], objects: Path) -> list[str]:
    said: list[str] = []
    assert compiler.build(archs, sources=folder, objects=objects, say=said.append) == {}
    return said


@pytest.fixture(scope="module")
def made_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What SMALL compiles to for the processor, made once; it is up to date in any folder."""
    folder = tmp_path_factory.mktemp("before")
    said = built(copy_sources(folder, SMALL), ["cpu"], folder / "objects")
    assert said[0].endswith("makes 1 of 1")
    assert [line.split(" in ")[0] for line in said[1:]] == ["cpu: kernels"]
    return folder / "objects"


def kernels_in(objects: Path, arch: str, sources: Path) -> dict[str, dict[str, Any]]:
    """Return what is known of each compiled kernel, by name."""
    index = compiler.read_index(objects)["archs"][arch]["kernels"]
    entries = {name: Unit.of(arch, name, sources).read(objects) for name in index}
    return {name: entry | entry["kernels"][name] for name, entry in entries.items() if entry}


def available(arch: str) -> None:
    if TARGETS[arch].compiler() is None:
        pytest.skip(f"needs {TARGETS[arch].needs}")


@pytest.mark.parametrize("arch", ARCHS)
def test_an_architecture_lists_its_kernels(small: Path, made_before: Path, tmp_path: Path, arch: str) -> None:
    available(arch)
    objects = made_before if arch == "cpu" else tmp_path / "objects"
    built(small, [arch], objects)
    assert compiler.read_index(objects)["archs"][arch]["kernels"] == ["small_many_kernel", "small_plain"]
    compiler.prune(objects, [arch], small)
    kernels = kernels_in(objects, arch, small)
    assert all((objects / arch / kernel["object"]).stat().st_size > 0 for kernel in kernels.values())
    kept = {f"{arch}/{one['object']}" for one in kernels.values()}
    kept |= {str(Path(name).with_suffix(".json")) for name in kept}
    found = [path for path in objects.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(objects)) for path in found) == sorted(["kernels.json", *kept])
    plain, many = kernels["small_plain"], kernels["small_many_kernel"]
    assert plain["threads"] == 64
    assert not any(plain[key] for key in ("shared_base", "shared_per_state_tile", "spills"))
    assert (many["threads"], many["shared_base"]) == (128, 16)
    assert many["shared_per_state_tile"] == (1024 if arch.startswith("gfx") else 2048)
    if arch not in ("ptx", "cpu"):
        assert plain["shared_static"] == 1024
        assert 1 <= plain["registers"] <= 32


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch.startswith("gfx")])
def test_an_amd_code_object_is_the_same_in_every_folder(small: Path, tmp_path: Path, arch: str) -> None:
    available(arch)
    for name in ("one", "another"):
        built(small, [arch], tmp_path / name)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "another") != {}


def files_of(objects: Path) -> dict[str, bytes]:
    """Return what is compiled in a folder, by name."""
    return {path.name: path.read_bytes() for path in objects.rglob("*.*") if path.suffix in {".so", ".hsaco"}}


def test_what_is_up_to_date_is_kept(small: Path, made_before: Path, tmp_path: Path) -> None:
    objects = shutil.copytree(made_before, tmp_path / "objects")
    before = files_of(objects)
    assert built(small, ["cpu"], objects) == ["cpu: 1 up to date"]
    assert files_of(objects) == before
    # A header that no kernel includes changes nothing, another one is another digest.
    (small / "scan_common.h").write_text("#error\n", encoding="utf-8")
    assert built(small, ["cpu"], objects) == ["cpu: 1 up to date"]
    with (small / "numeric_types.h").open("a", encoding="utf-8") as header:
        header.write("// Another source.\n")
    assert built(small, ["cpu"], objects)[0].endswith("makes 1 of 1")
    assert len(files_of(objects)) == 2


def test_a_source_that_cannot_be_changes_nothing(small: Path, made_before: Path, tmp_path: Path) -> None:
    objects = shutil.copytree(made_before, tmp_path / "objects")
    before = files_of(objects)
    write_kernels(small, SMALL.replace("1.0f;", "no number;"))
    with pytest.raises(CompileError, match=r"exit status 1\n(.|\n)*error"):
        compiler.build(["cpu"], sources=small, objects=objects)
    assert files_of(objects) == before
    (small / "kernels.cpp").write_text('#include "portable.h"\n', encoding="utf-8")
    with pytest.raises(CompileError, match=r"kernels\.cpp: defines no kernel"):
        compiler.build(["cpu"], sources=small, objects=objects)
    # Registers that are handed on must be there.
    (small / "kernels.cpp").write_text(SMALL.replace("{128, 0, 16", "{128, 80, 16"), encoding="utf-8")
    words = "small_many_kernel is compiled with 0 registers, needs 80, as its LaunchSizes say"
    with pytest.raises(CompileError, match=words):
        compiler.build(["cpu"], sources=small, objects=tmp_path / "others")


def test_missing_compilers_are_named(
    small: Path, tmp_path: Path, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("CXX", "NVCC", "TWINRUN_AMD_COMPILER", "TWINRUN_KERNEL_ARCHS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", empty)
    missing = compiler.build(list(ARCHS), sources=small, objects=tmp_path / "objects")
    assert missing == {
        **dict.fromkeys(("sm_80", "sm_90", "ptx"), "needs nvcc, found none"),
        **dict.fromkeys(("gfx90a", "gfx942"), "needs clang 19 with lld, or hipcc, found none"),
        "gfx950": "needs clang 22 with lld, or hipcc 7, found none",
        "cpu": "needs a C++17 compiler, found none",
    }
    index = json.loads((tmp_path / "objects" / "kernels.json").read_text())
    assert index == {"archs": {}, "missing": missing}


def command(
    *arguments: str | Path, start: tuple[str, ...] = COMPILE, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {**ENVIRONMENT, **environment}
    return subprocess.run([*start, *arguments], env=env, capture_output=True, text=True, check=False)


def test_command_makes_what_it_is_told_without_torch(small: Path, tmp_path: Path) -> None:
    """A torch that cannot be imported stands for a machine without it."""
    torch = tmp_path / "path" / "torch.py"
    torch.parent.mkdir()
    torch.write_text("raise ImportError('torch was imported')\n", encoding="utf-8")
    path = os.pathsep.join([str(torch.parent), str(KERNELS / "src")])
    asked = ("--archs", "cpu", "--sources", small, "--output", tmp_path / "objects")
    done = command(*asked, PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(kernels_in(tmp_path / "objects", "cpu", small)) == ["small_many_kernel", "small_plain"]
    python = (sys.executable, "-c")
    done = command("from twinrun_mamba import selective_scan_fn", start=python, PYTHONPATH=path)
    assert "torch was imported" in done.stderr


def test_command_refuses_in_one_line(small: Path, tmp_path: Path, empty: str) -> None:
    done = command("--archs", "sm_1", "--output", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "architectures: sm_1; allowed: sm_80, sm_90, ptx, gfx90a, gfx942, gfx950, cpu; hint" in done.stderr
    done = command("--sources", tmp_path)
    assert done.returncode == 2
    assert "no kernels.cpp; hint: --sources" in done.stderr
    # What was asked for, and cannot be made.
    asked = ("--sources", small, "--output", tmp_path / "objects")
    assert command(*asked, PATH=empty, TWINRUN_KERNEL_ARCHS="").returncode == 0
    done = command(*asked, PATH=empty, TWINRUN_KERNEL_ARCHS="gfx90a")
    assert (done.returncode, done.stderr) == (2, "gfx90a: needs clang 19 with lld, or hipcc, found none\n")


def test_amd_metadata_is_what_llvm_reads(small: Path, tmp_path: Path) -> None:
    available("gfx90a")
    readelf = shutil.which("llvm-readelf-19")
    if readelf is None:
        pytest.skip("needs llvm-readelf, of Debian's llvm-19")
    built(small, ["gfx90a"], tmp_path / "objects")
    for name, kernel in kernels_in(tmp_path / "objects", "gfx90a", small).items():
        code_object = tmp_path / "objects" / "gfx90a" / kernel["object"]
        notes = command("--notes", code_object, start=(readelf,)).stdout
        assert f".name:           {name}\n" in notes
        assert f".vgpr_count:     {kernel['registers']}\n" in notes
        assert f".group_segment_fixed_size: {kernel['shared_static']}\n" in notes
        assert f".max_flat_workgroup_size: {kernel['threads']}\n" in notes


def test_spills_are_read_from_the_assembler() -> None:
    ptx = (
        ".global .align 4 .b8 one_launch[12] = {96, 0, 0, 0, 16, 1};\n"
        ".visible .entry one(\n.param .align 8 .b8 one_param_0[8]\n)\n.maxntid 128, 1, 1\n"
    )
    log = """ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
    160 bytes stack frame, 448 bytes spill stores, 432 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers, 160 bytes cumulative stack size, 80 bytes smem
"""
    usage = usage_of_nvidia(ptx, log)["one"]
    assert [*usage.values()] == [128, 96, 880, 80, 96, 272, 0]


# Registers of a lane, by the start of a kernel's name: what the compilers of before needed, rounded up.
CEILINGS = {"conv_forward": 256, "conv_backward": 416, "conv_": 64, "scan_reduce": 128, "scan_": 320}
# Bytes a lane, into accumulators and not into memory, with clang 22.
# The general kernels of tokens on NVIDIA, which no training calls, spill more than any.
NVIDIA_SPILLS = 1836
KNOWN_SPILLS = {f"scan_backward_multi_tile_token_major_packed_{kind}": 16 for kind in ("fp16", "fp32")}


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx90a", "gfx942", "gfx950"])
def test_every_kernel_compiles_without_spills_and_within_its_registers(arch: str, tmp_path: Path) -> None:
    available(arch)
    assert compiler.build([arch], objects=tmp_path, say=lambda _: None) == {}
    found = kernels_in(tmp_path, arch, KERNELS / "csrc")
    assert len(found) == 118
    for name, usage in found.items():
        amd = arch.startswith("gfx")
        assert usage["spills"] <= (KNOWN_SPILLS.get(name, 0) if amd else NVIDIA_SPILLS), name
        ceiling = next(most for start, most in CEILINGS.items() if name.startswith(start))
        assert usage["registers"] <= (ceiling if amd else min(ceiling, 255)), name


def wheel(folder: Path, out: Path, **environment: str) -> tuple[str, zipfile.ZipFile]:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    env = {**os.environ, **environment}
    done = subprocess.run(build, cwd=folder, env=env, capture_output=True, text=True, check=True)
    (path,) = out.glob("*.whl")
    return done.stdout + done.stderr, zipfile.ZipFile(path)


@pytest.fixture
def package(small: Path, tmp_path: Path) -> Path:
    """The package with sources that compile quickly."""
    folder = tmp_path / "package"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("objects", "build", "csrc", "__pycache__"))
    shutil.copytree(small, folder / "csrc")
    return folder


def test_wheel_without_any_compiler_says_so_loudly(package: Path, tmp_path: Path, empty: str) -> None:
    printed, made = wheel(package, tmp_path / "dist", PATH=empty, TWINRUN_KERNEL_ARCHS="")
    assert "NO KERNEL WAS COMPILED" in printed
    assert "no kernels for gfx90a: needs clang 19 with lld, or hipcc, found none" in printed
    names = [name for name in made.namelist() if "/objects/" in name]
    assert names == ["twinrun_mamba/objects/kernels.json"]
    assert (made.filename or "").endswith("-py3-none-any.whl")
    # An architecture that is asked for must be made.
    with pytest.raises(subprocess.CalledProcessError) as failed:
        wheel(package, tmp_path / "other", PATH=empty, TWINRUN_KERNEL_ARCHS="sm_90")
    assert "TWINRUN_KERNEL_ARCHS asks for sm_90" in failed.value.stderr + failed.value.stdout


def test_wheel_carries_the_emulator_when_told(package: Path, tmp_path: Path) -> None:
    _, made = wheel(package, tmp_path / "dist", TWINRUN_KERNEL_ARCHS="cpu")
    names = [name for name in made.namelist() if "/objects/" in name]
    assert "twinrun_mamba/csrc/unit.cpp" in made.namelist()
    # kernels.json, the library of all kernels, and what it has.
    assert len(names) == 3
    index = json.loads(made.read("twinrun_mamba/objects/kernels.json"))
    assert list(index["archs"]) == ["cpu"]
    assert "py3-none-linux_" in (made.filename or "")


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("build") is None, reason="needs the package build")
def test_one_command_builds_what_a_fresh_environment_installs(package: Path, tmp_path: Path) -> None:
    """For both vendors, through the source distribution, as a user would."""
    made, fresh = tmp_path / "dist", tmp_path / "fresh"
    wanted = [arch for arch in ("sm_90", "gfx90a", "cpu") if TARGETS[arch].compiler()]
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(package)]
    subprocess.run(build, env={**os.environ, "TWINRUN_KERNEL_ARCHS": " ".join(wanted)}, check=True)
    (path,) = made.glob("*.whl")
    assert len(list(made.glob("*.tar.gz"))) == 1
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    python = fresh / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", path], check=True)
    code = (
        "import twinrun_mamba.compile as made\n"
        "from twinrun_mamba.units import SOURCES, Unit\n"
        "index = made.read_index(made.OBJECTS)['archs']\n"
        "for arch in index:\n"
        "    assert all(Unit.of(arch, one, SOURCES).read(made.OBJECTS) for one in index[arch]['kernels'])\n"
        "print(*index)"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(wanted)


@pytest.mark.parametrize(("arch", "files"), [("cpu", "kernels-*.so"), ("gfx90a", "small_plain-*.hsaco")])
def test_a_kernel_is_compiled_when_it_is_first_called(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str, files: str
) -> None:
    """On a GPU alone; the emulator's are one unit, since a unit each takes four times as long."""
    from twinrun_mamba.registry import ArchitectureError, CodeObject

    available(arch)
    monkeypatch.setattr(units, "SOURCES", small)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    objects = tmp_path / "objects"
    assert compiler.build([arch], sources=small, objects=objects, first_use=True) == {}
    assert compiler.read_index(objects)["archs"][arch]["kernels"] == ["small_many_kernel", "small_plain"]
    assert not (objects / arch).exists()
    found = CodeObject(arch, objects).kernel("small_plain")
    assert (found.threads, found.shared_bytes(0)) == (64, 0)
    assert [path.name for path in (objects / arch).glob("*[!n]")] == [found.path.name]
    assert found.path in (objects / arch).glob(files)
    with pytest.raises(ArchitectureError, match="small_other"):
        CodeObject(arch, objects).kernel("small_other")


def test_processes_that_call_at_once_compile_once(small: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from twinrun_mamba import compile, units\n"
        "sources, objects = map(Path, sys.argv[1:])\n"
        "unit = units.Unit.of('cpu', 'small_plain', sources)\n"
        "compile.make([unit], sources=sources, objects=objects, say=print)"
    )
    arguments = [sys.executable, "-c", script, str(small), str(tmp_path / "objects")]
    started = [
        subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    printed = [process.communicate(timeout=120)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0]
    assert sorted(len(lines) for lines in printed) == [1, 1, 1, 2]
    assert sum("up to date" in lines[0] for lines in printed) == 3
