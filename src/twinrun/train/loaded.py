"""What a rank has loaded of its environment: modules and native libraries, each with its digest."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from twinrun.foundation.files import sha256_of_bytes
from twinrun.protocol.allocation import LoadedFiles

# Of a larger file, which takes seconds to read, size and both ends stand for the whole.
_LARGEST, _END = 16 << 20, 1 << 20
# An environment, and what it stands on; elsewhere lie caches of compiled code, and the sealed sources.
_ROOTS = tuple({os.path.realpath(one) for one in (sys.prefix, sys.base_prefix, "/usr", "/lib", "/opt")})


def loaded_files() -> LoadedFiles:
    """Return what this process has loaded until now."""
    began, files, written = psutil.Process().create_time(), dict[str, str](), tuple[str, ...]()
    for name in sorted(set(_loaded())):
        # One that is gone since was replaced, and its follower is another file.
        with contextlib.suppress(OSError):
            files[name] = _digest(Path(name))
            if Path(name).stat().st_mtime > began:
                written += (name,)
    return LoadedFiles(host=platform.node(), began=began, ended=time.time(), files=files, written=written)


def _loaded() -> Iterator[str]:
    modules = (getattr(one, "__file__", None) for one in [*sys.modules.values()])
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    libraries = (line.split(maxsplit=5)[-1] for line in mapped if " r-xp " in line)
    for name in (*filter(None, modules), *libraries):
        if (path := os.path.realpath(str(name))).startswith(tuple(f"{root}/" for root in _ROOTS)):
            yield path


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        if (size := os.fstat(stream.fileno()).st_size) <= _LARGEST:
            return sha256_of_bytes(stream.read())
        head = stream.read(_END)
        stream.seek(-_END, os.SEEK_END)
        return sha256_of_bytes(b"%d\n" % size + head + stream.read())
