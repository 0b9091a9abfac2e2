"""Which pins of a stack are stale, gone from where they came from, or were never verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from twinrun.apt import AptLock
from twinrun.archive import open_archive
from twinrun.errors import InputError, MachineError
from twinrun.image_lock import BasePin, ImageLock, SourcePin
from twinrun.lock import old_image, old_system, python_locks
from twinrun.locking.changes import changes
from twinrun.locking.effects import likely_effect
from twinrun.locking.image import resolve_base, resolve_source
from twinrun.locking.system import resolve_system
from twinrun.manifest import Frozen
from twinrun.registry import Registry
from twinrun.stack import GitSource, PackageSource, Stack, expected_stamps, first_line, load_manifest, pins

State = Literal["stale", "gone", "unverified", "out of reach"]


class Finding(Frozen):
    """What is wrong with one pin."""

    pin: str
    """File and name."""
    state: State
    detail: str

    def __str__(self) -> str:
        return f"{self.state}: {self.pin}: {self.detail}"


def check(root: Path, name: str, *, index: str | None = None) -> tuple[Finding, ...]:
    """Hold every pin of stack `name` against where it comes from; nothing is written.

    What is out of reach is a finding, so that the others are still told; raises InputError for the manifest.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    found = [*_stamps(folder, stack), *_python(folder, stack, index)]
    system, image = old_system(folder), old_image(folder)
    if stack.base and system:
        found += _asked("apt.lock", lambda: _system(stack, system))
    if stack.base and image:
        found += [*_base(stack, image.base), *_sources(stack, image)]
    return (*found, *_unverified(folder, stack, image))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 1 if a pin must be resolved again, 3 if that could not be found out, else 0."""
    states = {finding.state for finding in findings}
    if states & {"stale", "gone"}:
        return 1
    return 3 if "out of reach" in states else 0


def _stamps(folder: Path, stack: Stack) -> Iterator[Finding]:
    for path, expected in expected_stamps(folder, stack).items():
        if not path.is_file():
            yield Finding(pin=path.name, state="stale", detail="missing")
        elif first_line(path) != expected:
            what = expected.removeprefix("# ").partition(" sha256")[0]
            yield Finding(pin=path.name, state="stale", detail=f"does not belong to {what}")


def _asked(pin: str, ask: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `ask` finds; what does not exist is gone, and what does not answer is out of reach."""
    try:
        return ask()
    except InputError as error:
        return [Finding(pin=pin, state="gone", detail=f"{error.message}: {error.place or error.found}")]
    except MachineError as error:
        lines = str(error.found or error.place).split("\n    ")
        return [Finding(pin=pin, state="out of reach", detail=f"{error.message}: {' '.join(lines[:4])}")]


def _python(folder: Path, stack: Stack, index: str | None) -> list[Finding]:
    """Packages move only when they must: their requirements changed, or the index has them no longer."""

    def ask() -> list[Finding]:
        return [
            Finding(pin=f"{path.name}: {change.name}", state=state(path), detail=str(change))
            for path, text in python_locks(folder, stack, index=index).items()
            for change in changes(path, text)
        ]

    def state(path: Path) -> State:
        whole = path.is_file() and first_line(path) == expected_stamps(folder, stack)[path]
        return "gone" if whole else "stale"

    return _asked("requirements.lock", ask)


def _system(stack: Stack, old: AptLock) -> list[Finding]:
    assert stack.base is not None
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        offered, new = set(archive.offers(old.all())), resolve_system(stack, archive)
    now = {package.name: package.version for package in new.all()}
    return [
        Finding(
            pin=f"apt.lock: {package.name}",
            state="stale" if package in offered else "gone",
            detail=f"{package.version} -> {now.get(package.name, 'absent')} ({likely_effect(package.name)})",
        )
        for package in old.all()
        if package not in set(new.all())
    ]


def _base(stack: Stack, pin: BasePin) -> list[Finding]:
    """A base that is made here follows apt.lock; the tag of another may have moved."""
    assert stack.base is not None
    repository = stack.base.repository
    if repository is None:
        return []

    def ask() -> list[Finding]:
        now = resolve_base(stack, system=AptLock(), epoch=1).sha256
        if now == pin.sha256:
            return []
        there = pin.sha256 is not None and Registry(repository).has(pin.sha256)
        detail = f"{pin.name}: {str(pin.sha256)[:12]} -> {str(now)[:12]} ({likely_effect('base')})"
        return [Finding(pin="image.lock: base", state="stale" if there else "gone", detail=detail)]

    return _verified_only(pin, _asked("image.lock: base", ask))


def _sources(stack: Stack, image: ImageLock) -> list[Finding]:
    pinned = {pin.name: pin for pin in image.sources}
    return [
        finding
        for source in stack.sources
        if source.name in pinned
        for finding in _source(source, pinned[source.name])
    ]


def _source(source: GitSource | PackageSource, old: SourcePin) -> list[Finding]:
    pin = f"image.lock: {source.name}"

    def ask() -> list[Finding]:
        now = resolve_source(source)
        same = (now.commit, now.sha256) == (old.commit, old.sha256)
        return [] if same else [Finding(pin=pin, state="stale", detail=_moved(old, now))]

    return _verified_only(old, _asked(pin, ask))


def _moved(old: SourcePin, now: SourcePin) -> str:
    before, after = (str(pin.commit or pin.sha256)[:12] for pin in (old, now))
    return f"{before} -> {after} ({likely_effect(old.name)})"


def _verified_only(pin: BasePin | SourcePin, found: list[Finding]) -> list[Finding]:
    """An unverified pin is told as such; that its origin is out of reach is why."""
    return [finding for finding in found if pin.verified or finding.state != "out of reach"]


def _unverified(folder: Path, stack: Stack, image: ImageLock | None) -> Iterator[Finding]:
    lock = folder / "requirements.lock"
    locked = pins(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    for pin in stack.unverified:
        if pins(pin.requirement).items() - locked.items():
            yield Finding(pin=f"stack.toml: {pin.requirement}", state="unverified", detail=pin.source)
    for wheel in stack.alternative:
        yield Finding(pin=f"requirements.lock: {wheel.requirement}", state="unverified", detail=wheel.source)
    for origin in [*([image.base] if image else []), *(image.sources if image else [])]:
        if not origin.verified:
            yield Finding(pin=f"image.lock: {origin.name}", state="unverified", detail=origin.source)
