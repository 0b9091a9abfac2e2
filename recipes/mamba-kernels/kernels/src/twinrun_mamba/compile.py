"""Compile the kernels into code objects: `python -m twinrun_mamba.compile --archs sm_90 gfx90a cpu`.

One source, three compilers: nvcc makes cubins and PTX, clang (19 or newer, with its lld) or hipcc makes AMD
code objects without ROCm, any C++17 compiler makes the emulator. No GPU is needed. Units are compiled side by
side. What the same compiler has made before, with the same flags from the same source, is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from twinrun_mamba import units
from twinrun_mamba.targets import ARCHS, TARGETS, CompileError, Compiler
from twinrun_mamba.units import LISTING, SOURCES, Unit

OBJECTS = Path(__file__).resolve().parent / "objects"
INDEX = "kernels.json"
VARIABLE = "TWINRUN_KERNEL_ARCHS"
Say = Callable[[str], None]


def build(
    archs: Sequence[str],
    *,
    sources: Path = SOURCES,
    objects: Path = OBJECTS,
    jobs: int | None = None,
    first_use: bool = False,
    say: Say = print,
) -> dict[str, str]:
    """Make the code of some architectures and kernels.json; return why others could not be made.

    With `first_use` a kernel is left to its first call. Raises CompileError when an architecture is not known
    or a compiler refuses the source; what was there before for that architecture stays.
    """
    unknown = sorted(set(archs) - set(TARGETS))
    if unknown:
        raise CompileError(
            f"architectures: {', '.join(unknown)}; allowed: {', '.join(TARGETS)}; "
            "hint: ptx serves NVIDIA's newer GPUs, whose driver compiles it"
        )
    objects.mkdir(parents=True, exist_ok=True)
    compilers = {arch: TARGETS[arch].compiler() for arch in archs}
    missing = {arch: f"needs {TARGETS[arch].needs}, found none" for arch in archs if compilers[arch] is None}
    listed = {arch: units.kernels_of(arch, one, sources) for arch, one in compilers.items() if one}
    if not first_use:
        wanted = [Unit.of(arch, kernel, sources) for arch, names in listed.items() for kernel in names]
        make(wanted, sources=sources, objects=objects, jobs=jobs, say=say)
    with units.locked(objects):
        before = read_index(objects)["archs"] if (objects / INDEX).is_file() else {}
        built = {arch: entry for arch, entry in before.items() if arch not in missing}
        built |= {arch: {"kernels": sorted(names)} for arch, names in listed.items()}
        units.write(
            objects / INDEX,
            {"archs": {arch: built[arch] for arch in TARGETS if arch in built}, "missing": missing},
        )
    return missing


def make(
    wanted: Sequence[Unit], *, sources: Path = SOURCES, objects: Path, jobs: int | None = None, say: Say
) -> None:
    """Compile what is not there yet, side by side; raises CompileError with all that compilers refused."""
    wanted, refused = list(dict.fromkeys(wanted)), []
    found = {arch: TARGETS[arch].compiler() for arch in {unit.arch for unit in wanted}}
    compilers = {arch: compiler for arch, compiler in found.items() if compiler}
    with units.locked(objects), tempfile.TemporaryDirectory(dir=objects) as scratch:
        todo = [unit for unit in wanted if not _is_made(unit, objects, compilers[unit.arch])]
        for arch, compiler in sorted(compilers.items()):
            new, all_of_it = (sum(unit.arch == arch for unit in some) for some in (todo, wanted))
            done = f"{compiler.path} makes {new} of {all_of_it}" if new else f"{all_of_it} up to date"
            say(f"{arch}: {done}")
        pool = ThreadPoolExecutor(jobs or os.cpu_count())
        running = {
            pool.submit(_compile, unit, compilers[unit.arch], sources, objects, Path(scratch)): unit
            for unit in todo
        }
        try:
            for number, future in enumerate(as_completed(running), 1):
                try:
                    say(f"{running[future].arch}: {future.result()} ({number} of {len(todo)})")
                except CompileError as error:
                    refused.append(str(error))
        finally:
            pool.shutdown(cancel_futures=True)
    if refused:
        raise CompileError("\n".join(refused))


def _is_made(unit: Unit, objects: Path, compiler: Compiler) -> bool:
    entry = unit.read(objects)
    return entry is not None and entry["compiler"] == compiler.version


def _compile(unit: Unit, compiler: Compiler, sources: Path, objects: Path, scratch: Path) -> str:
    """Compile a unit; return how long that took, and what did not fit."""
    started, target = time.monotonic(), TARGETS[unit.arch]
    own, folder = scratch / unit.arch / unit.name, objects / unit.arch
    own.mkdir(parents=True)
    folder.mkdir(exist_ok=True)
    made = own / f"{unit.stem}{target.suffix}"
    found = target.build(compiler, target.flags, unit.defines, sources, made)
    said = [f"{unit.name} in {time.monotonic() - started:.1f} s"]
    for kernel, usage in found.items():
        if usage["registers_needed"] not in (0, usage["registers"]):
            needed = f"needs {usage['registers_needed']}, as its LaunchSizes say"
            raise CompileError(f"{kernel} is compiled with {usage['registers']} registers, {needed}")
        if usage["spills"]:
            said.append(f"{kernel} spills {usage['spills']} bytes a lane, with {compiler.release}")
    made.replace(folder / made.name)
    entry = {"object": made.name, "compiler": compiler.version, "kernels": found}
    units.write(folder / f"{unit.stem}.json", entry)
    return ", ".join(said)


def read_index(objects: Path) -> Any:
    """Return the content of kernels.json."""
    return json.loads((objects / INDEX).read_text(encoding="utf-8"))


def prune(objects: Path, archs: Sequence[str], sources: Path = SOURCES) -> None:
    """Drop the code of other architectures, and what no kernel of these has any more."""
    content = read_index(objects)
    content["archs"] = {arch: entry for arch, entry in content["archs"].items() if arch in archs}
    for folder in (path for path in objects.iterdir() if path.is_dir()):
        if folder.name not in content["archs"]:
            shutil.rmtree(folder)
            continue
        names = content["archs"][folder.name]["kernels"]
        kept = {Unit.of(folder.name, name, sources).stem for name in names}
        for path in folder.iterdir():
            if path.stem not in kept:
                path.unlink()
    (objects / ".lock").unlink(missing_ok=True)
    units.write(objects / INDEX, content)


def chosen(value: str | None, default: Sequence[str]) -> tuple[list[str], bool]:
    """Return the architectures that TWINRUN_KERNEL_ARCHS names, and whether it names any, all needed then."""
    named = [name for name in re.split(r"[,;\s]+", value or "") if name]
    return (named, True) if named else (list(default), False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the command line or TWINRUN_KERNEL_ARCHS names, else everything."""
    parser = argparse.ArgumentParser(prog="python -m twinrun_mamba.compile", description=__doc__)
    archs = f"of {', '.join(ARCHS)}; default: {VARIABLE}, else all"
    parser.add_argument("--archs", nargs="+", metavar="ARCH", help=archs)
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder of kernels.cpp")
    parser.add_argument("--output", type=Path, default=OBJECTS, help="folder for code and kernels.json")
    parser.add_argument("--jobs", type=int, help="kernels compiled at once; default: as many as processors")
    parser.add_argument(
        "--first-use", action="store_true", help="compile nothing yet: each kernel when it is first called"
    )
    given = parser.parse_args(arguments)
    named, needed = (given.archs, True) if given.archs else chosen(os.environ.get(VARIABLE), ARCHS)
    try:
        if not (given.sources / LISTING).is_file():
            raise CompileError(
                f"{given.sources}: no kernels.cpp; hint: --sources, the folder csrc of a checkout"
            )
        options = {"sources": given.sources, "objects": given.output, "jobs": given.jobs}
        missing = build(named, first_use=given.first_use, **options)
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"{given.output}: stopped; what is whole stays; hint: run the same command again\n")
        return 130
    for arch, reason in missing.items():
        sys.stderr.write(f"{arch}: {reason}\n")
    return 2 if missing and needed else 0


if __name__ == "__main__":
    sys.exit(main())
