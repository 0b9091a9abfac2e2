"""`invoke lock`: lock files resolved again and written together, or compared with the origins."""

from __future__ import annotations

import contextlib
import fnmatch
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.files import write_together
from twinrun.foundation.manifest import Frozen
from twinrun.images.apt_archive import open_archive
from twinrun.images.framework_index import IndexAnswer, verify_index
from twinrun.images.resolution import resolve_python, resolve_system
from twinrun.images.root_filesystem import make_base
from twinrun.manifests import locks
from twinrun.manifests.stack import (
    Stack,
    expected_stamps,
    first_line,
    framework_index,
    load_manifest,
    normalise,
    pins,
)

# Values of `--only`: Python packages; system packages with the root file system made of some of them.
PARTS = ("python", "system")
# Name of a pin to its shortened text and its whole text.
_Entries = dict[str, tuple[str, str]]
# Patterns of packages to the likely effect of another version; the first match counts.
_EFFECTS = (
    ("base", "system libraries and toolkit below everything"),
    ("torch|torchvision|*triton*", "numerics and speed"),
    ("*nccl*|*rccl*|*mpi*|*ucx*|*shmem*", "collectives: speed, and order of summation"),
    ("*blas*|*dnn*|*solver*|*sparse*|*fft*|*rand*|*miopen*|*tensile*", "numerics and speed of libraries"),
    ("flash-att*", "attention: numerics and speed"),
    ("mosaicml", "training loop and sharding"),
    ("mosaicml-streaming", "order of the data"),
    ("tokenizers|transformers", "tokens"),
    ("numpy|scipy", "numerics on the host"),
    ("*nvcc*|*nvvm*|*nvrtc*|hipcc*|*clang*|*llvm*|gcc*|g++*|cpp*", "compiled kernels"),
    ("libc6*|libstdc++*|libgcc*", "system libraries below everything"),
    ("python3*|libpython3*", "interpreter"),
)
Lock = TypeVar("Lock")
PinState = Literal["stale", "gone", "unverified", "attested", "verified", "out of reach"]
# Lock file to its part; every other one has Python packages.
_PARTS = {"apt.lock": "system", "image.lock": "system"}


def stack_names(root: Path, name: str | None) -> list[str]:
    """Return the stacks to lock: the one asked for, or all; raises InputError."""
    known = sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))
    if name is not None:
        require_known(name, known, "unknown stack", place="--stack")
    return [name] if name else known


def refresh(
    root: Path,
    name: str,
    *,
    index: str | None = None,
    upgrade: bool = False,
    only: Collection[str] = (),
    say: Callable[[str], object] = str,
) -> tuple[Change, ...]:
    """Resolve the pins of stack `name`, write its lock files and return the changes.

    Args:
        index: a further package index, as `resolve_python` takes it.
        upgrade: allow another version of every package that the requirements do not pin.
        only: parts to resolve; all when empty.
        say: told what is asked, before each question that takes long.

    Raises:
        InputError: a stack, part or package does not exist.
        MachineError: an index or mirror is out of reach; the lock files stay.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = selected_parts(only)
    texts: dict[Path, str] = {}
    if "python" in parts:
        say(f"{name}: resolving the Python packages")
        texts |= python_locks(folder, stack, index=index, upgrade=upgrade)
    if stack.base and "system" in parts:
        say(f"{name}: resolving the system packages of {stack.base.suite}")
        texts |= _system_locks(folder, stack, upgrade=upgrade)
    changed = [change for path, text in texts.items() for change in changes(path, text)]
    write_together(texts)
    return tuple(changed)


def python_locks(
    folder: Path, stack: Stack, *, index: str | None = None, upgrade: bool = False
) -> dict[Path, str]:
    """Return the text of each lock file of Python packages; raises InputError, MachineError."""
    files = [path for path in expected_stamps(folder, stack) if path.with_suffix(".in").is_file()]
    address = framework_index(stack, asked=index)
    verified = _verified(folder / "requirements.lock", stack, address)
    return {
        lock: resolve_python(
            lock.with_suffix(".in"), stack, index=address, verified=verified, upgrade=upgrade
        )
        for lock in files
    }


def _verified(lock: Path, stack: Stack, index: str | None) -> frozenset[str]:
    """Return the attested pins of which the framework's index has every hash, else those that had been seen.

    Raises:
        InputError: the index has another hash than was attested, or no such file.
    """
    before = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    seen = locks.verified_pins(before)
    answers = _answers(stack, index)
    if wrong := next((one for one in answers if one.state in ("differs", "missing")), None):
        raise InputError(
            "the framework's index contradicts an attested hash",
            place=f"{stack.name}: {wrong.wheel.file}",
            found=wrong.found or "no such file",
            allowed=wrong.wheel.sha256,
            hint="correct the table [[attested]] of stack.toml; the old lock stays",
        )
    doubtful = {one.wheel.requirement() for one in answers if one.state != "verified"}
    return seen | {one.wheel.requirement() for one in answers} - doubtful


def _answers(stack: Stack, index: str | None) -> tuple[IndexAnswer, ...]:
    """Return what the framework's index says of the attested wheels; nothing where it is out of reach."""
    if not index:
        return ()
    try:
        return verify_index(stack.attested, index=index)
    except MachineError:
        return ()


def _existing(load: Callable[[Path], Lock], folder: Path) -> Lock | None:
    """Return a lock, or None when it is absent or broken."""
    with contextlib.suppress(InputError):
        return load(folder)
    return None


def selected_parts(only: Collection[str]) -> frozenset[str]:
    """Return the parts that `--only` names, all when it is empty; raises InputError."""
    for part in sorted(only):
        require_known(part, PARTS, "unknown part", place="--only")
    return frozenset(only or PARTS)


def _system_locks(folder: Path, stack: Stack, *, upgrade: bool) -> dict[Path, str]:
    """Return the texts of apt.lock and image.lock; nothing moves while the mirror has what is locked."""
    assert stack.base is not None
    system, image = _existing(locks.load_apt_lock, folder), _existing(locks.load_image_lock, folder)
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        asked = first_line(folder / "apt.lock") == stack.system_stamp() if system else False
        kept = asked and not upgrade and system and set(archive.available(system.all())) == set(system.all())
        resolved = system if kept and system else resolve_system(stack, archive)
        epoch = image.epoch if image and resolved == system else archive.release_date()
    current = image and resolved == system and first_line(folder / "image.lock") == stack.image_stamp()
    base = image.base if image and current else make_base(stack, resolved, epoch=epoch)
    return {
        folder / "apt.lock": locks.apt_lock_text(stack.system_stamp(), resolved),
        folder / "image.lock": locks.image_lock_text(
            stack.image_stamp(), locks.ImageLock(epoch=epoch, base=base)
        ),
    }


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
        return {"apt.lock": _system_entries, "image.lock": _image_entries}.get(name, _python_entries)(text)
    except (InputError, tomllib.TOMLDecodeError, KeyError):
        return {}


def _python_entries(text: str) -> _Entries:
    found: dict[str, list[tuple[str, frozenset[str]]]] = {}
    for pin, hashes in locks.parse_python_lock(text, place="requirements.lock").items():
        name, _, version = pin.partition(" ")[0].partition("==")
        found.setdefault(normalise(name), []).append((version, hashes))
    return {
        name: (" or ".join(version for version, _ in entries), str([sorted(hashes) for _, hashes in entries]))
        for name, entries in found.items()
    }


def _system_entries(text: str) -> _Entries:
    packages = locks.parse_apt_lock(text, place="apt.lock").all()
    return {package.name: (package.version, package.sha256) for package in packages}


def _image_entries(text: str) -> _Entries:
    digest = str(tomllib.loads(text)["base"])
    return {"base": (digest[:12], digest)}


def likely_effect(name: str) -> str:
    """Return the likely effect of another version of the package or source called `name`."""
    for patterns, effect in _EFFECTS:
        if any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns.split("|")):
            return effect
    return "none expected"


class PinFinding(Frozen):
    """What was found of one pin."""

    pin: str
    """Lock file and name."""
    state: PinState
    detail: str

    def __str__(self) -> str:
        return f"{self.state}: {self.pin}: {self.detail}"


def check(
    root: Path,
    name: str,
    *,
    index: str | None = None,
    only: Collection[str] = (),
    say: Callable[[str], object] = str,
) -> tuple[PinFinding, ...]:
    """Compare the pins of stack `name` with their origins; nothing is written.

    An origin out of reach is a finding, so that the other pins are still checked.

    Args:
        index: a further package index, as `resolve_python` takes it.
        only: parts to check; all when empty.
        say: told what is asked, before each question that takes long.

    Raises:
        InputError: a broken stack.toml, or an unknown part.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = selected_parts(only)
    system = _existing(locks.load_apt_lock, folder)
    found = [*_stamps(folder, stack, parts)]
    if "python" in parts:
        say(f"{name}: asking the package index")
        found += _query("requirements.lock", lambda: _python_findings(folder, stack, index))
    if "system" in parts and stack.base and system:
        say(f"{name}: asking the archive of {stack.base.suite} for {len(system.all())} system packages")
        found += _query("apt.lock", lambda: _system_findings(folder, stack, system))
    if "python" in parts:
        if stack.attested:
            say(f"{name}: asking the framework's index for {len(stack.attested)} attested wheels")
        found += _unverified_packages(folder, stack)
        found += _attested_packages(stack, index)
    return tuple(found)


def exit_code(findings: Iterable[PinFinding]) -> int:
    """Return 1 if a pin must be resolved again, 3 if that could not be found out, else 0."""
    states = {finding.state for finding in findings}
    if states & {"stale", "gone"}:
        return 1
    return 3 if "out of reach" in states else 0


def _stamps(folder: Path, stack: Stack, parts: Collection[str]) -> Iterator[PinFinding]:
    for path, expected in expected_stamps(folder, stack).items():
        if _PARTS.get(path.name, "python") not in parts:
            continue
        if not path.is_file():
            yield PinFinding(pin=path.name, state="stale", detail="missing")
        elif first_line(path) != expected:
            what = expected.removeprefix("# ").partition(" sha256")[0]
            yield PinFinding(pin=path.name, state="stale", detail=f"does not belong to {what}")


def _query(pin: str, find: Callable[[], Iterator[PinFinding]]) -> list[PinFinding]:
    """Return the findings of `find`: an InputError means gone, a MachineError out of reach."""
    try:
        return list(find())
    except InputError as error:
        return [PinFinding(pin=pin, state="gone", detail=f"{error.message}: {error.place or error.found}")]
    except MachineError as error:
        lines = str(error.found or error.place).split("\n    ")
        return [PinFinding(pin=pin, state="out of reach", detail=f"{error.message}: {' '.join(lines[:4])}")]


def _python_findings(folder: Path, stack: Stack, index: str | None) -> Iterator[PinFinding]:
    """Versions change only when they must: the requirements changed, or the index has them no longer."""
    for path, text in python_locks(folder, stack, index=index).items():
        current = path.is_file() and first_line(path) == expected_stamps(folder, stack)[path]
        for change in changes(path, text):
            yield _moved(change, gone=current)


def _system_findings(folder: Path, stack: Stack, lock: locks.AptLock) -> Iterator[PinFinding]:
    assert stack.base is not None
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        available = {package.name for package in archive.available(lock.all())}
        text = locks.apt_lock_text(stack.system_stamp(), resolve_system(stack, archive))
    for change in changes(folder / "apt.lock", text):
        yield _moved(change, gone=change.old != "absent" and change.name not in available)


def _moved(change: Change, *, gone: bool) -> PinFinding:
    pin = f"{change.lock}: {change.name}"
    return PinFinding(pin=pin, state="gone" if gone else "stale", detail=str(change))


def _unverified_packages(folder: Path, stack: Stack) -> Iterator[PinFinding]:
    lock = folder / "requirements.lock"
    locked = pins(lock.read_text(encoding="utf-8")) if lock.is_file() else {}
    for pin in stack.unverified:
        if pins(pin.requirement).items() - locked.items():
            yield PinFinding(pin=f"stack.toml: {pin.requirement}", state="unverified", detail=pin.source)
    for wheel in stack.alternative:
        yield PinFinding(
            pin=f"requirements.lock: {wheel.requirement}", state="unverified", detail=wheel.source
        )


def _attested_packages(stack: Stack, index: str | None) -> Iterator[PinFinding]:
    """Yield each attested wheel as verified, as gone, or as attested where its index says nothing."""
    answers = {one.wheel.file: one for one in _answers(stack, framework_index(stack, asked=index))}
    for wheel in stack.attested:
        pin, answer = f"stack.toml: {wheel.file}", answers.get(wheel.file)
        if answer and answer.state in ("differs", "missing"):
            detail = f"the index has {answer.found or 'no such file'}, attested is {wheel.sha256}"
            yield PinFinding(pin=pin, state="gone", detail=detail)
        elif answer and answer.state == "verified":
            yield PinFinding(pin=pin, state="verified", detail="the framework's index has this hash")
        else:
            why = "the index gives no hash of it" if answer else "the framework's index is out of reach"
            where = ", ".join(one.repository for one in wheel.found)
            yield PinFinding(pin=pin, state="attested", detail=f"{why}; found in lock files of {where}")
