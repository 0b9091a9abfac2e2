"""Units of compilation: a kernel for a GPU, all kernels for the emulator, named by a digest of their sources.

A folder of compiled code has a folder for each architecture. There `<unit>-<digest>.json` says which file
beside it has the code, which compiler made it and what its kernels need; it is written last, so whoever finds
it has all of it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinrun_mamba.targets import TARGETS, CompileError, Compiler

# Of a checkout, else what a wheel carries.
_PACKAGE = Path(__file__).resolve().parent
SOURCES = next(
    (folder for folder in (_PACKAGE.parents[1] / "csrc", _PACKAGE / "csrc") if folder.is_dir()),
    _PACKAGE / "csrc",
)
# Lists every kernel; a kernel is defined in the header that begins its name.
LISTING = "kernels.cpp"
# What every unit is compiled from beside that. The Python says how.
_SHARED = ("unit.cpp", "emulated_kernels.cpp", "emulator.cpp")
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_PASS = re.compile(r"(scan|conv)_(?:split_forward|split_backward|forward|backward)(_\w+)")


@dataclass(frozen=True)
class Unit:
    """What is compiled together for an architecture."""

    arch: str
    name: str
    header: str
    digest: str

    @classmethod
    def of(cls, arch: str, kernel: str, sources: Path) -> Unit:
        """Return the unit that has a kernel."""
        whole = arch == "cpu"
        header = LISTING if whole else f"{kernel.partition('_')[0]}_kernels.h"
        flags = (arch, *TARGETS[arch].flags)
        return cls(arch, "kernels" if whole else kernel, header, digest(sources, header, flags))

    @property
    def defines(self) -> tuple[str, ...]:
        """Return what unit.cpp is compiled with."""
        return f"-DUNIT={self.header}", f"-DSELECT_{self.name}=SELECTED"

    @property
    def stem(self) -> str:
        """Return the name of its files."""
        return f"{self.name}-{self.digest[:12]}"

    def read(self, objects: Path) -> Any:
        """Return what is known of it in a folder of compiled code, None where it is not there."""
        try:
            return json.loads((objects / self.arch / f"{self.stem}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None


def digest(sources: Path, header: str, flags: Collection[str]) -> str:
    """Return a hash of all that a header's code is made from, but the compiler."""
    found, waiting, seen = hashlib.sha256("\0".join(flags).encode()), [header, *_SHARED], set()
    while waiting:
        name = waiting.pop(0)
        path = sources / name
        if name not in seen and path.is_file():
            content = path.read_bytes()
            found.update(name.encode() + b"\0" + content)
            waiting += _INCLUDE.findall(content.decode())
        seen.add(name)
    found.update((_PACKAGE / "targets.py").read_bytes())
    return found.hexdigest()


def kernels_of(arch: str, compiler: Compiler, sources: Path) -> list[str]:
    """Return the kernels that the preprocessor finds in the listing, the longest to compile first."""
    target = TARGETS[arch]
    text = compiler.run(*target.common, *target.flags, "-E", "-DLIST_KERNELS", sources / LISTING)
    found = re.findall(r"LISTED_KERNEL (\w+)", text)
    if not found:
        raise CompileError(f"{sources / LISTING}: defines no kernel")
    return sorted(found, key=lambda name: ("backward" not in name, name))


def called_together(kernel: str, among: Collection[str]) -> list[str]:
    """Return the kernels that a call and its backward pass start beside one, that one first."""
    match = _PASS.fullmatch(kernel)
    if match is None:
        return [kernel]
    operation, kind = match.groups()
    sums = {f"{operation}_reduce", f"{operation}_reduce_{kind.rpartition('_')[2]}"}
    others = [
        one for one in sorted(among) if (found := _PASS.fullmatch(one)) and found.groups() == match.groups()
    ]
    return list(dict.fromkeys([kernel, *others, *sorted(sums & set(among))]))


def write(path: Path, content: object) -> None:
    """Write JSON as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder: of several processes the first compiles and the others find its code."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        # On a file system without locks all compile, and each replaces whole files by the same ones.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
