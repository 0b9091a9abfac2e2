"""`invoke lock`: lock files resolved again and written together, or compared with the origins."""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote

from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.files import write_together
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.redaction import host_alone
from twinrun.images.apt_archive import open_archive
from twinrun.images.resolution import existing_lock, resolve_python, resolve_system
from twinrun.images.root_filesystem import make_root
from twinrun.manifests import locks
from twinrun.manifests.stack import (
    Stack,
    expected_stamps,
    first_line,
    framework_index,
    framework_pins,
    load_manifest,
    normalise,
)

# Values of `--only`: Python packages; system packages with the root file system made of some of them.
PARTS = ("python", "system")
_SYSTEM_LOCKS = ("apt.lock", "image.lock")

_LINK = re.compile(r"""href\s*=\s*["']([^"'#]*)(?:#sha256=([0-9a-f]{64}))?["']""", re.IGNORECASE)
Lock = TypeVar("Lock")


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
    upgrade: bool = False,
    only: Collection[str] = (),
    say: Callable[[str], object] = str,
) -> tuple[str, ...]:
    """Resolve the pins of stack `name`, write its lock files and return what changes.

    Args:
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
        texts |= _python_locks(folder, stack, upgrade=upgrade)
    if stack.base and "system" in parts:
        say(f"{name}: resolving the system packages of {stack.base.suite}")
        texts |= _system_locks(root, folder, stack, upgrade=upgrade)
    changed = [change for path, text in texts.items() for change in changes(path, text)]
    write_together(texts)
    return tuple(changed)


def _python_locks(folder: Path, stack: Stack, *, upgrade: bool = False) -> dict[Path, str]:
    files = [path for path in expected_stamps(folder, stack) if path.name not in _SYSTEM_LOCKS]
    return {lock: resolve_python(lock.with_suffix(".in"), stack, upgrade=upgrade) for lock in files}


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


def _system_locks(root: Path, folder: Path, stack: Stack, *, upgrade: bool) -> dict[Path, str]:
    """Return the texts of apt.lock and image.lock; they move where the manifest or the user asks for it."""
    assert stack.base is not None
    system, image = _existing(locks.load_apt_lock, folder), _existing(locks.load_image_lock, folder)
    stamps = {first_line(folder / name) for name in _SYSTEM_LOCKS if (folder / name).is_file()}
    if upgrade or not system or not image or stack.system_stamp() not in stamps:
        with open_archive(stack.base.suite, stack.architecture()) as archive:
            resolved, epoch = resolve_system(stack, archive), archive.release_date()
    else:
        resolved, epoch = system, image.epoch
    if not image or resolved != system or stack.image_stamp() not in stamps:
        image = locks.ImageLock(epoch=epoch, root=make_root(root, stack, resolved, epoch=epoch))
    return {
        folder / "apt.lock": locks.apt_lock_text(stack.system_stamp(), resolved),
        folder / "image.lock": locks.image_lock_text(stack.image_stamp(), image),
    }


def changes(lock: Path, new: str) -> list[str]:
    """Return the pins that change when the text `new` replaces `lock`, each with what it was and will be."""
    old = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    before, after = _entries(lock.name, old), _entries(lock.name, new)
    found = []
    for name in sorted({*before, *after}):
        (was, whole), (now, other) = (one.get(name, ("absent", "")) for one in (before, after))
        if whole != other:
            found.append(f"{lock.name}: {name}: {'other files' if was == now else f'{was} -> {now}'}")
    return found


def _entries(name: str, text: str) -> dict[str, tuple[str, str]]:
    """Return version and whole text of each pin; a broken lock has none, so that all count as changed."""
    pins: dict[str, tuple[str, str]] = {}
    with contextlib.suppress(InputError):
        if name == "apt.lock":
            system = locks.parse_apt_lock(text, place=name).all()
            return {one.name: (one.version, one.model_dump_json()) for one in system}
        for pin, hashes in locks.parse_python_lock(text, place=name).items():
            package, _, version = pin.partition(" ")[0].partition("==")
            known = normalise(package)
            said, whole = pins.get(known, ("", ""))
            pins[known] = f"{said} or {version}" if said else version, f"{whole}{sorted(hashes)}"
    return pins


class PinFinding(Frozen):
    """What was found of one pin."""

    state: Literal["stale", "gone", "out of reach"]
    what: str
    """Lock file, pin, and what is wrong with it."""

    def __str__(self) -> str:
        return f"{self.state}: {self.what}"


def check(
    root: Path,
    name: str,
    *,
    index: str | None = None,
    only: Collection[str] = (),
    say: Callable[[str], object] = str,
) -> tuple[PinFinding, ...]:
    """Say which pins of stack `name` an index does not have any more; nothing is written.

    An origin out of reach is a finding, so that the other pins are still checked.

    Args:
        index: in place of the framework's own package index.
        only: parts to check; all when empty.
        say: told what is asked, before each question that takes long.

    Raises:
        InputError: a broken stack.toml, or an unknown part.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts, found = selected_parts(only), []
    for path, expected in expected_stamps(folder, stack).items():
        if ("system" if path.name in _SYSTEM_LOCKS else "python") in parts:
            what = expected.removeprefix("# ").partition(" sha256")[0]
            wrong = "missing" if not path.is_file() else f"does not belong to {what}"
            if wrong == "missing" or first_line(path) != expected:
                found.append(PinFinding(state="stale", what=f"{path.name}: {wrong}"))
    if "python" in parts:
        say(f"{name}: asking the package index")
        found += _query("requirements.lock", partial(_python_findings, folder, stack))
        address = framework_index(stack, asked=index)
        for pinned in framework_pins(folder / "requirements.in") if address else ():
            say(f"{name}: asking the framework's own index")
            found += _query(pinned.name, partial(_framework_findings, pinned, str(address)))
    if "system" in parts and stack.base and (system := _existing(locks.load_apt_lock, folder)):
        say(f"{name}: asking the archive of {stack.base.suite} for {len(system.all())} system packages")
        found += _query("apt.lock", partial(_system_findings, stack, system))
    return tuple(found)


def exit_code(findings: Iterable[PinFinding]) -> int:
    """Return 1 if an index lacks a pin or a lock is out of date, 3 if that could not be found out, else 0."""
    states = {finding.state for finding in findings}
    return 1 if states & {"stale", "gone"} else 3 if states else 0


def _query(lock: str, find: Callable[[], Iterator[PinFinding]]) -> list[PinFinding]:
    """Return the findings of `find`: an InputError means gone, a MachineError out of reach."""
    try:
        return list(find())
    except (InputError, MachineError) as error:
        said = " ".join(str(error.found or error.place).split("\n    ")[:4])
        state: Literal["gone", "out of reach"] = "gone" if isinstance(error, InputError) else "out of reach"
        return [PinFinding(state=state, what=f"{lock}: {error.message}: {said}")]


def _python_findings(folder: Path, stack: Stack) -> Iterator[PinFinding]:
    """Versions change only when they must: the requirements changed, or the index has them no longer."""
    for path, text in _python_locks(folder, stack).items():
        current = path.is_file() and first_line(path) == expected_stamps(folder, stack)[path]
        for change in changes(path, text):
            yield PinFinding(state="gone" if current else "stale", what=change)


def _framework_findings(pinned: Path, index: str) -> Iterator[PinFinding]:
    """Ask a package index, as PEP 503 describes it, for the files of each pin."""
    for pin, hashes in existing_lock(pinned).items():
        name, _, version = pin.partition("==")
        files = _files(index, normalise(name))
        # Of a file without a hash the index says that it is there, and a build says the rest.
        silent = sum(digest is None and version in file for file, digest in files.items())
        for digest in sorted(hashes - set(files.values()))[silent:]:
            what = f"{pinned.name}: {pin}: the index has no file of it with sha256 {digest}"
            yield PinFinding(state="gone", what=what)


def _files(index: str, package: str) -> dict[str, str | None]:
    """Return the files of a package by name, each with its SHA-256 where the index gives one."""
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/{package}/", timeout=20) as answer:  # noqa: S310
            page = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError, HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError) and error.code == HTTPStatus.NOT_FOUND:
            return {}
        found = str(error) if isinstance(error, OSError) else "no valid address"
        raise MachineError("the index is out of reach", place=host_alone(index), found=found) from None
    return {unquote(link.rpartition("/")[2]): digest or None for link, digest in _LINK.findall(page)}


def _system_findings(stack: Stack, lock: locks.AptLock) -> Iterator[PinFinding]:
    """Name the packages that the index has moved on from; a build goes on without the index."""
    assert stack.base is not None
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        gone = set(lock.all()) - archive.available(lock.all())
    moved_on = "the index has moved on; a build still has it from the pool or a snapshot"
    for package in sorted(gone, key=str):
        yield PinFinding(state="gone", what=f"apt.lock: {package}: {moved_on}")
