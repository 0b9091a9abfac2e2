"""Whether an environment is as it was installed, entry by entry; nothing of it is run.

Held are all files and links of the environment's folder, the interpreter that `bin/python` leads to, and
`pyvenv.cfg`. Not held are compiled Python in `__pycache__`, of which ranks keep and read their own in another
folder, and what lies outside: the interpreter's standard library and the libraries of the system.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from twinrun.foundation.cache import COMPLETE
from twinrun.foundation.files import canonical_json, parse_json, sha256_of_file, write_atomically

# State of all entries when they were last found to be right.
_SEEN = "verified"
_OWN = {COMPLETE, _SEEN}
_COMPILED = "__pycache__"
# Stands for the program that the link `bin/python` leads to, outside of the environment.
_INTERPRETER = "interpreter of bin/python"
# Path in the environment to what `lstat` says of the entry; of the interpreter, what `stat` says of it.
_Entries = dict[str, os.stat_result]


def seal(environment: Path) -> dict[str, str]:
    """Mark an environment as whole, with what each entry must be: as its RECORD says, else as it is now.

    All files are held against their wheels here, for they are in memory when they have just been written:
    the first run would read gigabytes from the disk.

    Returns:
        What `changed_files` says, for a package cache may hold what no wheel brought.
    """
    entries, recorded = _entries(environment), _recorded(environment)
    others = {name: one for name, one in entries.items() if name not in recorded}
    write_atomically(environment / COMPLETE, canonical_json(_contents(environment, others) | recorded))
    return changed_files(environment)


def changed_files(environment: Path, *, whole: bool = False) -> dict[str, str]:
    """Return what is wrong with each entry that is not as `seal` has it.

    Everything is read once, and again where names, sizes, times or inodes are others.

    Args:
        whole: read everything, whatever was seen before.
    """
    entries = _entries(environment)
    state = _state(entries)
    seen = environment / _SEEN
    if not whole and seen.is_file() and seen.read_text(encoding="utf-8") == state:
        return {}
    wrong = _wrong(environment, entries)
    if wrong:
        seen.unlink(missing_ok=True)
    else:
        write_atomically(seen, state)
    return wrong


def _state(entries: _Entries) -> str:
    state = hashlib.sha256()
    for name, status in sorted(entries.items()):
        # The time at which an inode was changed cannot be set back, as that of its content can.
        key = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        state.update(f"{name}\0{key}\n".encode(errors="surrogateescape"))
    return state.hexdigest()


def _wrong(environment: Path, entries: _Entries) -> dict[str, str]:
    expected = parse_json((environment / COMPLETE).read_bytes())
    found = _contents(environment, entries)
    wrong = {name: "not as it was installed" for name, one in found.items() if expected.get(name) != one}
    wrong |= dict.fromkeys(expected.keys() - found, "missing")
    wrong |= dict.fromkeys(found.keys() - expected, "added since the installation")
    return dict(sorted(wrong.items()))


def _contents(environment: Path, entries: _Entries) -> dict[str, str]:
    """Return the SHA-256 of each file, and of each link where it leads."""
    with ThreadPoolExecutor() as pool:
        contents = pool.map(lambda entry: _content(environment, *entry), entries.items())
        return dict(zip(entries, contents, strict=True))


def _content(environment: Path, name: str, status: os.stat_result) -> str:
    if name == _INTERPRETER:
        program = os.path.realpath(environment / "bin" / "python")
        return f"{program} {sha256_of_file(Path(program))}"
    if stat.S_ISLNK(status.st_mode):
        return f"link to {(environment / name).readlink()}"
    return sha256_of_file(environment / name) if stat.S_ISREG(status.st_mode) else "neither file nor link"


def _entries(environment: Path) -> _Entries:
    """Return every file and link of an environment, and the interpreter where `bin/python` leads to one."""
    found: _Entries = {}
    folders, start = [str(environment)], len(str(environment)) + 1
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    found[entry.path[start:]] = entry.stat(follow_symlinks=False)
                elif entry.name != _COMPILED:
                    folders.append(entry.path)
    program = environment / "bin" / "python"
    if program.is_file():
        found[_INTERPRETER] = program.stat()
    return {name: status for name, status in found.items() if name not in _OWN}


def _recorded(environment: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of the environment that a RECORD has."""
    found = {}
    for packages in sorted(environment.glob("lib/python*/site-packages")):
        for record in sorted(packages.glob("*.dist-info/RECORD")):
            with record.open(encoding="utf-8", newline="") as lines:
                rows = [row for row in csv.reader(lines) if len(row) == 3 and row[1].startswith("sha256=")]
            for name, digest, _ in rows:
                path = os.path.relpath(os.path.normpath(packages / name), environment)
                if not {_COMPILED, ".."} & set(path.split("/")):
                    found[path] = _hexadecimal(digest.removeprefix("sha256="))
    return found


def _hexadecimal(digest: str) -> str:
    """Return a digest as this project writes it; a RECORD has it in base 64, its padding left out."""
    return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()
