"""Whether the files of an environment are those that its wheels brought; nothing of it is run."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twinrun.foundation.cache import COMPLETE
from twinrun.foundation.files import canonical_json, parse_json, sha256_of_file, write_atomically

# State of all files when they were last found to be right.
_SEEN = "verified"
# Where packages put what runs; the rest is pages of manuals and the like.
_WALKED = ("lib/", "bin/")
# Endings of what Python executes, or takes its search path from.
_EXECUTED = (".py", ".so", ".pth", ".pyc", ".egg-link", "RECORD")
# Files that no wheel brings to an environment that was made before its seal held digests.
_UNSEALED = ("activate_this.py", "_virtualenv.py", "_virtualenv.pth", "RECORD")


def seal(environment: Path) -> dict[str, str]:
    """Mark an environment as whole, with digests of what no RECORD has: the RECORDs, and uv's own files.

    All files are held against their wheels here, for they are in memory when they have just been written:
    the first run would read gigabytes from the disk.

    Returns:
        What `changed_files` says, for a package cache may hold what no wheel brought.
    """
    hashed = _recorded(environment).keys()
    others = [name for name, _ in _files(environment) if name.endswith(_EXECUTED) and name not in hashed]
    digests = {name: sha256_of_file(environment / name) for name in others}
    write_atomically(environment / COMPLETE, canonical_json(digests))
    return changed_files(environment)


def changed_files(environment: Path, *, whole: bool = False) -> dict[str, str]:
    """Return what is wrong with each file that is not as its wheel's RECORD has it.

    Everything is hashed once, and again where names, sizes, times or inodes of the files are others.

    Args:
        whole: hash everything, whatever was seen before.
    """
    state, found = hashlib.sha256(), set()
    for name, status in sorted(_files(environment)):
        found.add(name)
        # The time at which an inode was changed cannot be set back, as that of its content can.
        key = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        state.update(f"{name}\0{key}\n".encode(errors="surrogateescape"))
    seen = environment / _SEEN
    if not whole and seen.is_file() and seen.read_text(encoding="utf-8") == state.hexdigest():
        return {}
    wrong = _wrong(environment, found)
    if wrong:
        seen.unlink(missing_ok=True)
    else:
        write_atomically(seen, state.hexdigest())
    return wrong


def _wrong(environment: Path, found: set[str]) -> dict[str, str]:
    sealed = parse_json((environment / COMPLETE).read_bytes() or b"{}")
    expected = _recorded(environment) | sealed
    added = {name for name in found - expected.keys() if name.endswith(_EXECUTED)}
    if not sealed:
        added = {name for name in added if not name.endswith(_UNSEALED)}
    there = sorted(expected.keys() & found)
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda name: sha256_of_file(environment / name), there)
        others = [name for name, digest in zip(there, digests, strict=True) if digest != expected[name]]
    wrong = dict.fromkeys(others, "not as it was installed")
    wrong |= dict.fromkeys(expected.keys() - found, "missing")
    wrong |= dict.fromkeys(added, "of no wheel")
    if not (environment / "bin" / "python").is_symlink():
        wrong["bin/python"] = "no link to an interpreter"
    return dict(sorted(wrong.items()))


def _packages(environment: Path) -> list[Path]:
    return sorted(environment.glob("lib/python*/site-packages"))


def _files(environment: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file that packages brought, by its path in the environment.

    Compiled Python is left out: ranks keep theirs in another folder, and read none of it here.
    """
    folders = [*map(str, _packages(environment)), str(environment / "bin")]
    start = len(str(environment)) + 1
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    yield entry.path[start:], entry.stat(follow_symlinks=False)
                elif entry.name != "__pycache__":
                    folders.append(entry.path)


def _recorded(environment: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that a RECORD has, by its path in the environment."""
    found = {}
    for packages in _packages(environment):
        for record in sorted(packages.glob("*.dist-info/RECORD")):
            with record.open(encoding="utf-8", newline="") as lines:
                rows = [row for row in csv.reader(lines) if len(row) == 3 and row[1].startswith("sha256=")]
            for name, digest, _ in rows:
                path = os.path.relpath(os.path.normpath(packages / name), environment)
                if path.startswith(_WALKED) and "__pycache__" not in path:
                    found[path] = _hexadecimal(digest.removeprefix("sha256="))
    return found


def _hexadecimal(digest: str) -> str:
    """Return a digest as this project writes it; a RECORD has it in base 64, its padding left out."""
    return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
