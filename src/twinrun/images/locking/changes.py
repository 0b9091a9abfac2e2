"""Changes between a lock file and the text that replaces it."""

from __future__ import annotations

import tomllib
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.images.locking.effects import likely_effect
from twinrun.manifests.locks import parse_apt_lock, parse_python_lock
from twinrun.manifests.stack import normalise


class Change(Frozen):
    """One changed pin."""

    lock: str
    """File name."""
    name: str
    old: str
    """Version, digest or commit, shortened for reading; `absent` where there is none."""
    new: str

    def __str__(self) -> str:
        what = "other files" if self.old == self.new else f"{self.old} -> {self.new}"
        return f"{self.name}: {what} ({likely_effect(self.name)})"


# Name of a pin to its shortened text and its whole text.
_Entries = dict[str, tuple[str, str]]


def changes(lock: Path, new: str) -> tuple[Change, ...]:
    """Return the pins that change when the text `new` replaces `lock`."""
    old = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    before, after = _entries(lock.name, old), _entries(lock.name, new)
    absent = ("absent", "")
    return tuple(
        Change(lock=lock.name, name=name, old=before.get(name, absent)[0], new=after.get(name, absent)[0])
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    )


def _entries(name: str, text: str) -> _Entries:
    """Return the pins of a lock file; a broken one has none, so that all of the new one count as changed."""
    try:
        return {"apt.lock": _system, "image.lock": _image}.get(name, _python)(text)
    except (InputError, tomllib.TOMLDecodeError, KeyError):
        return {}


def _python(text: str) -> _Entries:
    found: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for pin, hashes in parse_python_lock(text, place="requirements.lock").items():
        name, _, version = pin.partition(" ")[0].partition("==")
        found.setdefault(normalise(name), []).append((version, hashes))
    return {
        name: (" or ".join(version for version, _ in entries), str([sorted(hashes) for _, hashes in entries]))
        for name, entries in found.items()
    }


def _system(text: str) -> _Entries:
    packages = parse_apt_lock(text, place="apt.lock").all()
    return {package.name: (package.version, package.sha256) for package in packages}


def _image(text: str) -> _Entries:
    digest = str(tomllib.loads(text)["base"])
    return {"base": (digest[:12], digest)}
