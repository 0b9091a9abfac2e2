"""Refresh of a stack's locks: pins resolved again, and all lock files written together or none."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.files import write_together
from twinrun.images.apt_archive import open_archive
from twinrun.images.locking.changes import Change, changes
from twinrun.images.locking.image import resolve_base, resolve_source
from twinrun.images.locking.python import resolve_python
from twinrun.images.locking.system import resolve_system
from twinrun.manifests.apt_lock import AptLock, apt_lock_text, load_apt_lock
from twinrun.manifests.image_lock import ImageLock, image_lock_text, load_image_lock
from twinrun.manifests.stack import Stack, expected_stamps, first_line, load_manifest

# Values of `--only`: Python packages, system packages, and the base image with the sources.
PARTS = ("python", "system", "image")


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
        upgrade: allow another version of every Python package that the requirements do not pin.
        only: parts to resolve; all when empty.

    Raises:
        InputError: a stack, part, package, tag or branch does not exist.
        MachineError: an index, mirror, registry or repository is out of reach; the lock files stay.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = selected_parts(only)
    texts: dict[Path, str] = {}
    if "python" in parts:
        texts |= python_locks(folder, stack, index=index, upgrade=upgrade)
    if stack.base and parts & {"system", "image"}:
        texts |= _image_locks(folder, stack, parts)
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


def _image_locks(folder: Path, stack: Stack, parts: frozenset[str]) -> dict[Path, str]:
    """Return the texts of apt.lock and image.lock; changed packages change the epoch."""
    assert stack.base is not None
    existing, image = existing_apt_lock(folder), existing_image_lock(folder)
    if not parts >= {"system", "image"} and not (existing and image):
        raise InputError("there is no lock to keep the other parts of", place=str(folder), found="--only")
    if "system" in parts:
        with open_archive(stack.base.suite, stack.architecture()) as archive:
            system, date = resolve_system(stack, archive), archive.release_date()
        texts = {folder / "apt.lock": apt_lock_text(stack.system_stamp(), system)}
    else:
        assert existing is not None
        system, date, texts = existing, 0, {}
    epoch = image.epoch if image and system == existing else date
    text = _image_lock_text(folder, stack, None if "image" in parts else image, system=system, epoch=epoch)
    return texts | {folder / "image.lock": text}


def _image_lock_text(
    folder: Path, stack: Stack, kept: ImageLock | None, *, system: AptLock, epoch: int
) -> str:
    """Return the text of image.lock with the pins of `kept`; a base of kind debian follows apt.lock."""
    assert stack.base is not None
    stamp = first_line(folder / "image.lock") if kept else stack.image_stamp()
    sources = kept.sources if kept else tuple(map(resolve_source, stack.sources))
    base = None if kept is None or (stack.base.kind == "debian" and epoch != kept.epoch) else kept.base
    base = base or resolve_base(stack, system=system, epoch=epoch)
    return image_lock_text(stamp, ImageLock(epoch=epoch, base=base, sources=sources))
