"""requirements.lock and build.lock: every Python package with its marker and the checksums of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable

from twinrun.foundation.errors import InputError
from twinrun.manifests.lock_checksum import with_checksums

# Name, version and marker to the SHA-256 of each file, in the order of the lock.
PythonLock = dict[str, frozenset[str]]
_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_LOCKED = re.compile(
    r"(?P<pin>[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!-]+(?: ; [^\\\n]+?)?)"
    r"(?P<hashes>(?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})*)\s*"
)
_HASH = re.compile(r"[0-9a-f]{64}")


def parse_python_lock(text: str, *, place: str) -> PythonLock:
    """Read the text of a lock of Python packages; raises InputError for an entry that is none."""
    found: PythonLock = {}
    text = _COMMENT.sub("", text)
    for part in filter(str.strip, _ENTRY.split(text)):
        entry = _LOCKED.fullmatch(part)
        if entry is None:
            line = text[: text.index(part)].count("\n") + 1
            raise InputError(
                "not a locked package",
                place=f"{place}:{line}",
                found=part.strip().partition("\n")[0][:120],
                hint="run `invoke lock` for this stack",
            )
        found[entry["pin"]] = frozenset(_HASH.findall(entry["hashes"]))
    return found


def python_lock_text(stamp: str, lock: PythonLock) -> str:
    """Return the text of a lock of Python packages."""
    return with_checksums("\n".join([stamp, *(_entry(pin, hashes) for pin, hashes in lock.items()), ""]))


def _entry(pin: str, hashes: Iterable[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])
