"""Locks: every pin of a stack resolved again, and all its files written together or none."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from twinrun.apt import AptLock, apt_lock_text, load_apt_lock
from twinrun.archive import open_archive
from twinrun.errors import InputError, closest
from twinrun.files import write_together
from twinrun.image_lock import ImageLock, image_lock_text, load_image_lock
from twinrun.locking.changes import Change, changes
from twinrun.locking.image import resolve_base, resolve_source
from twinrun.locking.python import resolve_python
from twinrun.locking.system import resolve_system
from twinrun.stack import Stack, expected_stamps, first_line, load_manifest

# What `--only` takes: Python packages, system packages, and the base with the sources.
PARTS = ("python", "system", "image")


def lock_names(root: Path, only: str | None) -> list[str]:
    """Return the stacks to lock: the one asked for, or all; raises InputError."""
    known = sorted(path.parent.name for path in (root / "images" / "stacks").glob("*/stack.toml"))
    if only is not None and only not in known:
        raise InputError(
            "unknown stack", place="--stack", found=only, allowed=known, hint=closest(only, known)
        )
    return [only] if only else known


def refresh(
    root: Path, name: str, *, index: str | None = None, upgrade: bool = False, only: Collection[str] = ()
) -> tuple[Change, ...]:
    """Resolve the pins of stack `name`, write its locks and return what changed.

    Args:
        index: a further package index, as `resolve_python` takes it.
        upgrade: let every Python package move that the requirements do not pin.
        only: parts to resolve; all when empty.

    Raises:
        InputError: something asked for does not exist.
        MachineError: an index, mirror, registry or repository is out of reach; every old lock stays.
    """
    stack, folder = load_manifest(root, name), root / "images" / "stacks" / name
    parts = _parts(only)
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
    """Return the text of each lock of Python packages; raises MachineError."""
    locks = [path for path in expected_stamps(folder, stack) if path.with_suffix(".in").is_file()]
    return {
        lock: resolve_python(lock.with_suffix(".in"), stack, index=index, upgrade=upgrade) for lock in locks
    }


def old_system(folder: Path) -> AptLock | None:
    """Return apt.lock as it stands, or None if there is none that can be read."""
    with contextlib.suppress(InputError):
        return load_apt_lock(folder)
    return None


def old_image(folder: Path) -> ImageLock | None:
    """Return image.lock as it stands, or None if there is none that can be read."""
    with contextlib.suppress(InputError):
        return load_image_lock(folder)
    return None


def _parts(only: Collection[str]) -> frozenset[str]:
    unknown = sorted(set(only) - set(PARTS))
    if unknown:
        raise InputError(
            "unknown part", place="--only", found=unknown[0], allowed=PARTS, hint=closest(unknown[0], PARTS)
        )
    return frozenset(only or PARTS)


def _image_locks(folder: Path, stack: Stack, parts: frozenset[str]) -> dict[Path, str]:
    """Return the texts of apt.lock and image.lock; other packages give the image another epoch."""
    assert stack.base is not None
    packages, image = old_system(folder), old_image(folder)
    if not parts >= {"system", "image"} and not (packages and image):
        raise InputError("there is no lock to keep the other parts of", place=str(folder), found="--only")
    if "system" in parts:
        with open_archive(stack.base.suite, stack.architecture()) as archive:
            system, date = resolve_system(stack, archive), archive.date()
        texts = {folder / "apt.lock": apt_lock_text(stack.system_stamp(), system)}
    else:
        assert packages is not None
        system, date, texts = packages, 0, {}
    epoch = image.epoch if image and system == packages else date
    text = _image_text(folder, stack, None if "image" in parts else image, system=system, epoch=epoch)
    return texts | {folder / "image.lock": text}


def _image_text(folder: Path, stack: Stack, kept: ImageLock | None, *, system: AptLock, epoch: int) -> str:
    """Return image.lock with the pins of `kept`; a base that is made here follows the packages."""
    assert stack.base is not None
    stamp = first_line(folder / "image.lock") if kept else stack.image_stamp()
    sources = kept.sources if kept else tuple(map(resolve_source, stack.sources))
    base = None if kept is None or (stack.base.kind == "debian" and epoch != kept.epoch) else kept.base
    base = base or resolve_base(stack, system=system, epoch=epoch)
    return image_lock_text(stamp, ImageLock(epoch=epoch, base=base, sources=sources))
