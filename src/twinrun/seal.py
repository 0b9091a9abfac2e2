"""The last line of a lock: a short digest of every entry, so that a changed byte is noticed and named."""

from __future__ import annotations

import re

from twinrun.files import sha256_of_bytes

_SEAL = "# entries: "
# Continued lines are indented.
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)
# Enough to find what was changed by accident; against intent only the history of the file helps.
_DIGITS = 8


def sealed(text: str) -> str:
    """Return a lock with its seal; the first line is its stamp, which is held against other files."""
    return f"{text}{_SEAL}{' '.join(map(_digest, _entries(text)))}\n"


def broken_entry(text: str) -> str | None:
    """Return the first line of the entry that is not as it was locked, or None."""
    body, mark, seal = text.rpartition(_SEAL)
    if not mark:
        return "the last line, with the digests of all entries, is missing"
    entries, digests = _entries(body), seal.removesuffix("\n").split(" ")
    for entry, digest in zip(entries, digests, strict=False):
        if _digest(entry) != digest:
            return entry.partition("\n")[0].rstrip(" \\")
    return None if sealed(body) == text else "an entry is missing, or one too many"


def _entries(text: str) -> list[str]:
    return _ENTRY.split(text.partition("\n")[2])[1:]


def _digest(entry: str) -> str:
    return sha256_of_bytes(entry.encode("utf-8", "surrogateescape"))[:_DIGITS]
