"""Compile the kernels into code objects: `python -m twinrun_mamba.compile --archs sm_90 gfx90a cpu`.

One source, three compilers: nvcc makes cubins and PTX, clang (19 or newer, with its lld) or hipcc makes AMD
code objects without ROCm, any C++17 compiler makes the emulator. No GPU is needed. Each kernel of a GPU is a
unit of its own, the emulator's are one; units are compiled side by side. What the same compiler has made
before, with the same flags from the same source, is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from twinrun_mamba import units
from twinrun_mamba.targets import ARCHS, TARGETS, BuildTarget, CompileError, Compiler
from twinrun_mamba.units import LISTING, SOURCES, Unit

OBJECTS = Path(__file__).resolve().parent / "objects"
INDEX = "kernels.json"
VARIABLE = "TWINRUN_KERNEL_ARCHS"


@dataclass(frozen=True)
class Job:
    """A unit to compile for an architecture."""

    target: BuildTarget
    compiler: Compiler
    sources: Path
    unit: Unit

    @cached_property
    def source(self) -> str:
        """Return the hash of sources and flags."""
        return units.digest(self.sources, self.unit.header, (self.target.arch, *self.target.flags))

    @cached_property
    def key(self) -> str:
        """Return the hash of sources, flags and compiler."""
        return hashlib.sha256(f"{self.source}\0{self.compiler.version}".encode()).hexdigest()

    def is_done(self, folder: Path) -> bool:
        """Say whether an architecture's folder has the code already."""
        entries = [units.read(folder, kernel) for kernel in self.unit.kernels]
        return all(entry is not None and entry["key"] == self.key for entry in entries)

    def run(self, folder: Path, scratch: Path) -> str:
        """Compile the unit into an architecture's folder; return how long that took, and what did not fit."""
        started = time.monotonic()
        own = scratch / self.unit.name
        own.mkdir()
        made = own / f"{self.unit.name}-{self.key[:12]}{self.target.suffix}"
        found = self.target.build(self.compiler, self.target.flags, self.sources, self.unit, made)
        for kernel, usage in found.items():
            if usage.registers_needed not in (0, usage.registers):
                needed = f"needs {usage.registers_needed}, as its LaunchSizes say"
                raise CompileError(f"{kernel} is compiled with {usage.registers} registers, {needed}")
        made.replace(folder / made.name)
        about = {"object": made.name, "header": self.unit.header, "key": self.key, "source": self.source}
        for kernel, usage in found.items():
            units.write(folder / f"{kernel}.json", {**about, **usage.as_dict()})
        shutil.rmtree(own)
        spilled = {
            kernel: usage.spills for kernel, usage in found.items() if usage.spills and self.target.fits
        }
        lines = [
            f"{kernel} spills {spills} bytes a lane, with {self.compiler.release}"
            for kernel, spills in spilled.items()
        ]
        return ", ".join([f"{self.unit.name} in {time.monotonic() - started:.1f} s", *lines])


def build(
    archs: Sequence[str],
    *,
    sources: Path = SOURCES,
    objects: Path = OBJECTS,
    jobs: int | None = None,
    first_use: bool = False,
    say: Callable[[str], None] = print,
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
    wanted: dict[str, list[Job]] = {}
    for arch, compiler in compilers.items():
        if compiler is not None:
            target = TARGETS[arch]
            found = target.units(compiler, sources)
            wanted[arch] = [Job(target, compiler, sources, unit) for unit in found]
    refused = [] if first_use else _run(wanted, objects, jobs, say)
    with units.locked(objects):
        index = objects / INDEX
        before = read_index(objects)["archs"] if index.is_file() else {}
        built = {arch: entry for arch, entry in before.items() if arch not in missing}
        if not refused:
            built |= {arch: _listed(TARGETS[arch], found) for arch, found in wanted.items()}
        units.write(
            index, {"archs": {arch: built[arch] for arch in TARGETS if arch in built}, "missing": missing}
        )
    if refused:
        raise CompileError("\n".join(refused))
    return missing


def build_kernels(arch: str, kernel: str, *, objects: Path, say: Callable[[str], None]) -> bool:
    """Compile a kernel and those called with it; say whether there is such a kernel, and a compiler."""
    target = TARGETS[arch]
    compiler = target.compiler()
    if compiler is None or not (SOURCES / LISTING).is_file():
        return False
    found = {name: unit for unit in target.units(compiler, SOURCES) for name in unit.kernels}
    if kernel not in found:
        return False
    together = dict.fromkeys(found[name] for name in units.called_together(kernel, found))
    wanted = [Job(target, compiler, SOURCES, unit) for unit in together]
    refused = _run({arch: wanted}, objects, None, say)
    if refused:
        raise CompileError("\n".join(refused))
    return True


def _run(
    wanted: Mapping[str, Sequence[Job]], objects: Path, jobs: int | None, say: Callable[[str], None]
) -> list[str]:
    """Compile what is not there yet, side by side; return what compilers refused."""
    refused = []
    with contextlib.ExitStack() as held:
        for arch in sorted(wanted):
            held.enter_context(units.locked(objects / arch))
        waiting = []
        for arch, found in wanted.items():
            todo = [job for job in found if not job.is_done(objects / arch)]
            waiting += todo
            if not todo:
                say(f"{arch}: {_count(found)} up to date")
            else:
                say(f"{arch}: {todo[0].compiler.path} makes {_kernels(todo)} of {_count(found)}")
        scratch = Path(held.enter_context(tempfile.TemporaryDirectory(dir=objects)))
        pool = ThreadPoolExecutor(jobs or os.cpu_count())
        held.callback(pool.shutdown, cancel_futures=True)
        running = {}
        for job in waiting:
            own = scratch / job.target.arch
            own.mkdir(exist_ok=True)
            running[pool.submit(job.run, objects / job.target.arch, own)] = job
        for done, future in enumerate(as_completed(running), 1):
            job = running[future]
            try:
                outcome = future.result()
            except CompileError as error:
                refused.append(str(error))
            else:
                say(f"{job.target.arch}: {outcome} ({done} of {len(running)})")
    return refused


def _kernels(found: Sequence[Job]) -> int:
    return sum(len(job.unit.kernels) for job in found)


def _count(found: Sequence[Job]) -> str:
    kernels = _kernels(found)
    return f"{kernels} kernel{'s' if kernels > 1 else ''}"


def _listed(target: BuildTarget, found: Sequence[Job]) -> dict[str, object]:
    kernels = sorted(kernel for job in found for kernel in job.unit.kernels)
    return {**target.entry, "compiler": found[0].compiler.release, "kernels": kernels}


def read_index(objects: Path) -> Any:
    """Return the content of kernels.json."""
    return json.loads((objects / INDEX).read_text(encoding="utf-8"))


def read_kernels(objects: Path, arch: str) -> dict[str, Any]:
    """Return what is listed of each compiled kernel of an architecture."""
    names = read_index(objects)["archs"][arch]["kernels"]
    found = {name: units.read(objects / arch, name) for name in names}
    return {name: entry for name, entry in found.items() if entry is not None}


def prune(objects: Path, archs: Sequence[str]) -> None:
    """Drop the code of other architectures, and what no kernel of these has any more."""
    content = read_index(objects)
    content["archs"] = {arch: entry for arch, entry in content["archs"].items() if arch in archs}
    for folder in (path for path in objects.iterdir() if path.is_dir()):
        if folder.name not in content["archs"]:
            shutil.rmtree(folder)
            continue
        kernels = read_kernels(objects, folder.name)
        kept = {entry["object"] for entry in kernels.values()} | {f"{name}.json" for name in kernels}
        for path in folder.iterdir():
            if path.name not in kept:
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
    parser.add_argument(
        "--archs", nargs="+", metavar="ARCH", help=f"of {', '.join(ARCHS)}; default: {VARIABLE}, else all"
    )
    parser.add_argument("--sources", type=Path, default=SOURCES, help="folder of kernels.cpp")
    parser.add_argument(
        "--output", type=Path, default=OBJECTS, help="folder for code objects and kernels.json"
    )
    parser.add_argument("--jobs", type=int, help="kernels compiled at once; default: as many as processors")
    parser.add_argument(
        "--first-use", action="store_true", help="compile nothing yet: each kernel when it is first called"
    )
    options = parser.parse_args(arguments)
    named, needed = (options.archs, True) if options.archs else chosen(os.environ.get(VARIABLE), ARCHS)
    try:
        if not (options.sources / LISTING).is_file():
            raise CompileError(
                f"{options.sources}: no kernels.cpp; hint: --sources, the folder csrc of a checkout"
            )
        missing = build(
            named,
            sources=options.sources,
            objects=options.output,
            jobs=options.jobs,
            first_use=options.first_use,
        )
    except CompileError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(
            f"{options.output}: stopped; what is whole stays; hint: run the same command again\n"
        )
        return 130
    for arch, reason in missing.items():
        sys.stderr.write(f"{arch}: {reason}\n")
    return 2 if missing and needed else 0


if __name__ == "__main__":
    sys.exit(main())
