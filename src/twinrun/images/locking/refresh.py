"""Refresh of a stack's locks: what must move is resolved again, and all lock files are written together."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.files import write_together
from twinrun.images.apt_archive import open_archive
from twinrun.images.building.base import make_base
from twinrun.images.locking.changes import Change, changes
from twinrun.images.locking.python import resolve_python
from twinrun.images.locking.system import resolve_system
from twinrun.manifests.locks import (
    AptLock,
    ImageLock,
    apt_lock_text,
    image_lock_text,
    load_apt_lock,
    load_image_lock,
)
from twinrun.manifests.stack import Stack, expected_stamps, first_line, load_manifest

# Values of `--only`: Python packages; system packages with the root file system made of some of them.
PARTS = ("python", "system")


def stack_names(root: Path, name: str | None) -> list[str]:
    """Return the stacks to lock: the one asked for, or all; raises InputError."""
    known = sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))
    if name is not None and name not in known:
        raise InputError(
            "unknown stack", place="--stack", found=name, allowed=known, hint=closest(name, known)
        )
    return [name] if name else known


def refresh(
    root: Path, name: str, *, index: str | None = None, upgrade: bool = False, only: Collection[str] = ()
) -> tuple[Change, ...]:
    """Resolve the pins of stack `name`, write its lock files and return the changes.

    Args:
        index: a further package index, as `resolve_python` takes it.
        upgrade: allow another version of every package that the requirements do not pin.
        only: parts to resolve; all when empty.

    Raises:
        InputError: a stack, part or package does not exist.
        MachineError: an index or mirror is out of reach; the lock files stay.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = selected_parts(only)
    texts: dict[Path, str] = {}
    if "python" in parts:
        texts |= python_locks(folder, stack, index=index, upgrade=upgrade)
    if stack.base and "system" in parts:
        texts |= _system_locks(folder, stack, upgrade=upgrade)
    changed = [change for path, text in texts.items() for change in changes(path, text)]
    write_together(texts)
    return tuple(changed)


def python_locks(
    folder: Path, stack: Stack, *, index: str | None = None, upgrade: bool = False
) -> dict[Path, str]:
    """Return the text of each lock file of Python packages; raises MachineError."""
    locks = [path for path in expected_stamps(folder, stack) if path.with_suffix(".in").is_file()]
    return {
        lock: resolve_python(lock.with_suffix(".in"), stack, index=index, upgrade=upgrade) for lock in locks
    }


def existing_apt_lock(folder: Path) -> AptLock | None:
    """Return apt.lock, or None when it is absent or broken."""
    with contextlib.suppress(InputError):
        return load_apt_lock(folder)
    return None


def existing_image_lock(folder: Path) -> ImageLock | None:
    """Return image.lock, or None when it is absent or broken."""
    with contextlib.suppress(InputError):
        return load_image_lock(folder)
    return None


def selected_parts(only: Collection[str]) -> frozenset[str]:
    """Return the parts that `--only` names, all when it is empty; raises InputError."""
    unknown = sorted(set(only) - set(PARTS))
    if unknown:
        raise InputError(
            "unknown part", place="--only", found=unknown[0], allowed=PARTS, hint=closest(unknown[0], PARTS)
        )
    return frozenset(only or PARTS)


def _system_locks(folder: Path, stack: Stack, *, upgrade: bool) -> dict[Path, str]:
    """Return the texts of apt.lock and image.lock; nothing moves while the mirror has what is locked."""
    assert stack.base is not None
    system, image = existing_apt_lock(folder), existing_image_lock(folder)
    with open_archive(stack.base.suite, stack.architecture()) as archive:
        asked = first_line(folder / "apt.lock") == stack.system_stamp() if system else False
        kept = asked and not upgrade and system and set(archive.available(system.all())) == set(system.all())
        resolved = system if kept and system else resolve_system(stack, archive)
        epoch = image.epoch if image and resolved == system else archive.release_date()
    current = image and resolved == system and first_line(folder / "image.lock") == stack.image_stamp()
    base = image.base if image and current else make_base(stack, resolved, epoch=epoch)
    return {
        folder / "apt.lock": apt_lock_text(stack.system_stamp(), resolved),
        folder / "image.lock": image_lock_text(stack.image_stamp(), ImageLock(epoch=epoch, base=base)),
    }
