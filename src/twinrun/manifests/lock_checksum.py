"""Checksums of a lock file: its last line has one for every entry, so that a changed entry is found."""

from __future__ import annotations

import re

from twinrun.foundation.files import sha256_of_bytes

_PREFIX = "# entries: "
# Continued lines are indented.
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)
# Enough to find an accidental change; only the file's history shows an intended one.
_DIGITS = 8


def with_checksums(text: str) -> str:
    """Return a lock file with its checksums; its first line, the stamp, has none."""
    return f"{text}{_PREFIX}{' '.join(map(_checksum, _entries(text)))}\n"


def first_changed_entry(text: str) -> str | None:
    """Return the first line of the first entry that does not match its checksum, or None."""
    body, prefix, line = text.rpartition(_PREFIX)
    if not prefix:
        return "the last line, with the digests of all entries, is missing"
    entries, checksums = _entries(body), line.removesuffix("\n").split(" ")
    for entry, checksum in zip(entries, checksums, strict=False):
        if _checksum(entry) != checksum:
            return entry.partition("\n")[0].rstrip(" \\")
    return None if with_checksums(body) == text else "an entry is missing, or one too many"


def _entries(text: str) -> list[str]:
    return _ENTRY.split(text.partition("\n")[2])[1:]


def _checksum(entry: str) -> str:
    return sha256_of_bytes(entry.encode("utf-8", "surrogateescape"))[:_DIGITS]
