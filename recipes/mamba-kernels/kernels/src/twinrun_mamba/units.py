"""Units of compilation, kept by what they are made from: a kernel for a GPU, all kernels for the emulator.

A folder of compiled code has a folder for each architecture. There `<kernel>.json` says how a kernel is
launched and which file beside it has its code; it is replaced once that file is whole, so whoever reads it
finds either the kernel of before or the new one. A file's name ends in the start of a hash over sources,
flags and compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of a checkout, else what a wheel carries: kernels that it lacks are compiled when they are first called.
_PACKAGE = Path(__file__).resolve().parent
SOURCES = next(
    (folder for folder in (_PACKAGE.parents[1] / "csrc", _PACKAGE / "csrc") if folder.is_dir()),
    _PACKAGE / "csrc",
)
# Lists every kernel; a unit is compiled from the file that defines its kernels.
LISTING = "kernels.cpp"
# What every unit is compiled from beside that file. The Python says how.
SHARED = ("unit.cpp", "emulated_kernels.cpp", "emulator.cpp")
MAKERS = ("resources.py", "targets.py")

_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_MARKER = re.compile(r'^#(?:line)? ?\d+ "([^"\n]*)"|LISTED_KERNEL (\w+)', re.MULTILINE)
_PASS = re.compile(r"(scan|conv)_(?:split_forward|split_backward|forward|backward|reduce|update)_?(\w*)")
# The longest first, so that none is alone at the end.
_LONG = ("scan_backward", "scan_forward", "conv_backward", "scan_split")


@dataclass(frozen=True)
class Unit:
    """Kernels that are compiled together, and the file of the sources that defines them."""

    kernels: tuple[str, ...]
    header: str

    @property
    def name(self) -> str:
        """Return the kernel's name, or that of the file for several."""
        return self.kernels[0] if len(self.kernels) == 1 else Path(self.header).stem

    @property
    def defines(self) -> tuple[str, ...]:
        """Return what unit.cpp is compiled with."""
        return f"-DUNIT={self.header}", *(f"-DSELECT_{kernel}=SELECTED" for kernel in self.kernels)


def digest(sources: Path, header: str, flags: Sequence[str]) -> str:
    """Return a hash of all that a header's code, and what is listed of it, is made from, but the compiler."""
    return hashlib.sha256("\0".join((_content(sources, (header, *SHARED)), *flags)).encode()).hexdigest()


def units_of(preprocessed: str) -> list[Unit]:
    """Return the units that the preprocessor found in `kernels.cpp`, the longest to compile first."""
    header, found = LISTING, []
    for file, kernel in _MARKER.findall(preprocessed):
        if kernel:
            found.append(Unit((kernel,), header))
        else:
            header = Path(file).name
    long = {prefix: place for place, prefix in enumerate(_LONG)}
    places = {
        unit: next((place for prefix, place in long.items() if unit.name.startswith(prefix)), len(long))
        for unit in found
    }
    return sorted(found, key=lambda unit: (places[unit], unit.name))


def called_together(kernel: str, among: Collection[str]) -> list[str]:
    """Return the kernels that a call and its backward pass start beside one, that one first."""
    match = _PASS.fullmatch(kernel)
    # A step of generation has no backward pass.
    if match is None or kernel.startswith("conv_update"):
        return [kernel]
    operation, kind = match.groups()
    kinds = {kind.rpartition("_")[2]: False, "": False, kind: True}
    others = []
    for other in sorted(set(among) - {kernel}):
        found = _PASS.fullmatch(other)
        if found is None or found[1] != operation or found[2] not in kinds:
            continue
        # What reduces is for a type, or for all of them.
        if kinds[found[2]] or other.startswith(f"{operation}_reduce"):
            others.append(other)
    return [kernel, *others]


def read(folder: Path, kernel: str) -> Any:
    """Return what is listed of a compiled kernel of an architecture's folder, None where there is none."""
    try:
        entry = json.loads((folder / f"{kernel}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return entry if (folder / entry["object"]).is_file() else None


def write(path: Path, content: object) -> None:
    """Write JSON as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold an architecture's folder: of several processes the first compiles and the others find its code."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        # On a file system without locks all compile, and each replaces whole files by the same ones.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _content(sources: Path, names: tuple[str, ...]) -> str:
    """Return a hash of files of the sources, of all that they include, and of the makers."""
    digest, waiting, seen = hashlib.sha256(), list(names), set()
    while waiting:
        name = waiting.pop(0)
        path = sources / name
        if name in seen or not path.is_file():
            continue
        seen.add(name)
        content = path.read_bytes()
        digest.update(name.encode() + b"\0" + content)
        waiting += _INCLUDE.findall(content.decode())
    for name in MAKERS:
        digest.update((_PACKAGE / name).read_bytes())
    return digest.hexdigest()
