"""Check of a stack's locks: pins that are stale, gone from their origin, or unverified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.images.apt_archive import open_archive
from twinrun.images.locking.changes import Change, changes
from twinrun.images.locking.refresh import existing_apt_lock, python_locks, selected_parts
from twinrun.images.locking.system import resolve_system
from twinrun.manifests.locks import AptLock, apt_lock_text
from twinrun.manifests.stack import Stack, expected_stamps, first_line, load_manifest, pins

State = Literal["stale", "gone", "unverified", "out of reach"]
# Lock file to its part; every other one has Python packages.
_PARTS = {"apt.lock": "system", "image.lock": "system"}


class Finding(Frozen):
    """Fault of one pin."""

    pin: str
    """Lock file and name."""
    state: State
    detail: str

    def __str__(self) -> str:
        return f"{self.state}: {self.pin}: {self.detail}"


def check(
    root: Path, name: str, *, index: str | None = None, only: Collection[str] = ()
) -> tuple[Finding, ...]:
    """Compare the pins of stack `name` with their origins; nothing is written.

    An origin out of reach is a finding, so that the other pins are still checked.

    Args:
        index: a further package index, as `resolve_python` takes it.
        only: parts to check; all when empty.

    Raises:
        InputError: a broken stack.toml, or an unknown part.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = selected_parts(only)
    system = existing_apt_lock(folder)
    found = [*_stamps(folder, stack, parts)]
    if "python" in parts:
        found += _query("requirements.lock", lambda: _python(folder, stack, index))
    if "system" in parts and stack.base and system:
        found += _query("apt.lock", lambda: _system(folder, stack, system))
    if "python" in parts:
        found += _unverified_packages(folder, stack)
    return tuple(found)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a pin must be resolved again, 3 if that could not be found out, else 0."""
    states = {finding.state for finding in findings}
    if states & {"stale", "gone"}:
        return 1
    return 3 if "out of reach" in states else 0


def _stamps(folder: Path, stack: Stack, parts: Collection[str]) -> Iterator[Finding]:
    for path, expected in expected_stamps(folder, stack).items():
        if _PARTS.get(path.name, "python") not in parts:
            continue
        if not path.is_file():
            yield Finding(pin=path.name, state="stale", detail="missing")
        elif first_line(path) != expected:
            what = expected.removeprefix("# ").partition(" sha256")[0]
            yield Finding(pin=path.name, state="stale", detail=f"does not belong to {what}")


def _query(pin: str, find: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return the findings of `find`: an InputError means gone, a MachineError out of reach."""
    try:
        return list(find())
    except InputError as error:
        return [Finding(pin=pin, state="gone", detail=f"{error.message}: {error.place or error.found}")]
    except MachineError as error:
        lines = str(error.found or error.place).split("\n    ")
        return [Finding(pin=pin, state="out of reach", detail=f"{error.message}: {' '.join(lines[:4])}")]


def _python(folder: Path, stack: Stack, index: str | None) -> Iterator[Finding]:
    """Versions change only when they must: the requirements changed, or the index has them no longer."""
    for path, text in python_locks(folder, stack, index=index).items():
        current = path.is_file() and first_line(path) == expected_stamps(folder, stack)[path]
        for change in changes(path, text):
            yield _moved(change, gone=current)


def _system(folder: Path, stack: Stack, lock: AptLock) -> Iterator[Finding]:
    assert stack.base is not None
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        available = {package.name for package in archive.available(lock.all())}
        text = apt_lock_text(stack.system_stamp(), resolve_system(stack, archive))
    for change in changes(folder / "apt.lock", text):
        yield _moved(change, gone=change.old != "absent" and change.name not in available)


def _moved(change: Change, *, gone: bool) -> Finding:
    pin = f"{change.lock}: {change.name}"
    return Finding(pin=pin, state="gone" if gone else "stale", detail=str(change))


def _unverified_packages(folder: Path, stack: Stack) -> Iterator[Finding]:
    lock = folder / "requirements.lock"
    locked = pins(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    for pin in stack.unverified:
        if pins(pin.requirement).items() - locked.items():
            yield Finding(pin=f"stack.toml: {pin.requirement}", state="unverified", detail=pin.source)
    for wheel in stack.alternative:
        yield Finding(pin=f"requirements.lock: {wheel.requirement}", state="unverified", detail=wheel.source)
