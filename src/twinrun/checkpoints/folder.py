"""Checkpoints in a folder: fresh folder, fsync, rename, then the pointer; one writer at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from twinrun.checkpoints.store import (
    LATEST,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_STATE_BYTES,
    QUARANTINE,
    STEP,
    WRITER,
    DamagedError,
    Latest,
    demand_readable,
    fenced_off,
    latest_of,
    newest_token,
    step_of,
)
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.files import (
    kind_of,
    open_regular,
    parse_json,
    read_regular,
    sha256_of_bytes,
    write_atomically,
)
from twinrun.foundation.locks import locked


class FolderStore:
    """Checkpoints of one run in a folder of a local or shared file system, or of a mounted bucket.

    A checkpoint is there when `commit` has returned, or not at all. Every method raises MachineError where
    the file system refuses.
    """

    def __init__(self, root: Path) -> None:
        self.place = str(root)
        self._root = root
        self._needed = 0

    def claim(self, run: str) -> int:
        """Make `run` the writer of this place and return its fencing token; remove what dead writers left."""
        with self._refusals(), self._locked():
            token = newest_token(self._state(WRITER), self._state(LATEST)) + 1
            write_atomically(self._root / WRITER, json.dumps({"token": token, "run": run}) + "\n")
            for left in self._root.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)
        return token

    def begin(self, step: int, token: int, *, needed: int) -> None:
        """Prepare a save of `needed` bytes; refuse where they do not fit. Raises RunError when fenced off."""
        self._needed = needed
        # Earlier than where it must be: a save may take minutes.
        self._refuse_fenced(token)
        with self._refusals(token=token):
            free = shutil.disk_usage(self._root).free
            if free < needed:
                raise _full(self._root, needed=needed, free=free)
            self._draft(step, token).mkdir(exist_ok=True)

    @contextlib.contextmanager
    def create(self, step: int, token: int, name: str) -> Iterator[IO[bytes]]:
        """Write one file of a save, durable at the end of the block."""
        path = self._draft(step, token) / name
        with self._refusals(path, token=token), path.open("xb", buffering=0) as raw:
            stream = _Whole(raw)
            yield stream  # type: ignore[misc]
            os.fsync(raw.fileno())

    def commit(self, step: int, token: int, manifest: bytes) -> None:
        """Publish a save whose files are durable, and make it the latest; raises RunError when fenced off."""
        demand_readable(len(manifest), place=self.file(step, MANIFEST), what="the index of this checkpoint")
        draft, final = self._draft(step, token), self._folder(step)
        with self._refusals(draft, token=token):
            with (draft / MANIFEST).open("xb") as stream:
                stream.write(manifest)
                stream.flush()
                os.fsync(stream.fileno())
            _sync_folder(draft)
            with self._locked():
                self._refuse_fenced(token)
                if os.path.lexists(final):
                    raise RunError("this checkpoint is there already", place=str(final), found=final.name)
                draft.rename(final)
                _sync_folder(self._root)
                content: dict[str, object] = {"step": step, "checkpoint": final.name, "token": token}
                content["sha256"] = sha256_of_bytes(manifest)
                write_atomically(self._root / LATEST, json.dumps(content) + "\n")
                _sync_folder(self._root)

    def attach(self, step: int, name: str, text: str) -> None:
        """Put a small file beside those of a published checkpoint, whole or not at all."""
        # Elsewhere first: a checkpoint with half a file too many is damaged.
        draft = self._root / f".{STEP.format(step)}.{name}"
        write_atomically(draft, text)
        with self._refusals(draft):
            draft.replace(self._step_folder(step) / name)

    def abandon(self, step: int, token: int) -> None:
        """Remove what a failed save wrote."""
        shutil.rmtree(self._draft(step, token), ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps of all that is published, oldest first."""
        return sorted(step for name in self._names() if (step := step_of(name)) is not None)

    def strays(self) -> list[str]:
        """Return what is called like a checkpoint, and has not the name of one; no run takes it."""
        return sorted(name for name in self._names() if step_of(name) is None)

    def latest(self) -> Latest | None:
        """Return what was published last, whether it is still there or not."""
        return latest_of(self._state(LATEST))

    def manifest(self, step: int) -> bytes:
        """Return the content of the manifest of `step`; raises DamagedError where there is none."""
        with self._reading(path := self._step_folder(step) / MANIFEST):
            return read_regular(path, limit=MAX_MANIFEST_BYTES)

    def contents(self, step: int) -> dict[str, int]:
        """Return the files beside the manifest with their sizes; raises DamagedError where one is no file."""
        found, folder = {}, self._step_folder(step)
        with self._reading(folder):
            statuses = {path: path.lstat() for path in folder.iterdir()}
        for path, status in statuses.items():
            if kind := kind_of(status.st_mode):
                raise DamagedError("no regular file", place=str(path), found=kind, allowed="a file")
            found[path.name] = status.st_size
        found.pop(MANIFEST, None)
        return found

    @contextlib.contextmanager
    def open(self, step: int, name: str) -> Iterator[_File]:
        """Read a file of `step`; raises DamagedError where there is none."""
        path = self._step_folder(step) / name
        with self._reading(path):
            stream = open_regular(path)
        with stream:
            yield _File(stream, place=str(path))

    def file(self, step: int, name: str) -> str:
        """Return what a message calls a file of `step`."""
        return str(self._folder(step) / name)

    def quarantine(self, step: int) -> str:
        """Put a bad checkpoint aside, where no run takes it, and return where."""
        target = self._root / QUARANTINE / self._folder(step).name
        number = 1
        with self._refusals(), self._locked():
            while target.exists():
                number += 1
                target = target.with_name(f"{self._folder(step).name}.{number}")
            target.parent.mkdir(exist_ok=True)
            self._folder(step).rename(target)
        return str(target)

    def remove(self, step: int) -> None:
        """Remove a checkpoint."""
        # Renamed first: a checkpoint that is half removed would look like a damaged one.
        doomed = self._root / f".{self._folder(step).name}.removed"
        with self._refusals(doomed):
            self._folder(step).rename(doomed)
            shutil.rmtree(doomed)

    def _names(self) -> list[str]:
        """Return what is called like a checkpoint, whatever it is."""
        with self._refusals():
            return [path.name for path in self._root.glob("step-*")] if self._root.is_dir() else []

    def _folder(self, step: int) -> Path:
        return self._root / STEP.format(step)

    def _step_folder(self, step: int) -> Path:
        """Return the folder of a step to read from; raises DamagedError where it is something else."""
        path = self._folder(step)
        with self._reading(path):
            mode = path.lstat().st_mode
        if not stat.S_ISDIR(mode):
            found = kind_of(mode) or "a file"
            raise DamagedError("no folder of a checkpoint", place=str(path), found=found, allowed="a folder")
        return path

    def _draft(self, step: int, token: int) -> Path:
        return self._root / f".{STEP.format(step)}.{token}.partial"

    def _refuse_fenced(self, token: int) -> None:
        if (writer := self._state(WRITER)).get("token") != token:
            raise fenced_off(self.place, writer, ours=token)

    def _state(self, name: str) -> dict[str, Any]:
        """Return a small file of ours; empty where it is not there, or not whole."""
        try:
            found = parse_json(read_regular(self._root / name, limit=MAX_STATE_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        self._root.mkdir(parents=True, exist_ok=True)
        return locked(self._root / ".lock", seconds=60)

    @contextlib.contextmanager
    def _refusals(self, path: Path | None = None, *, token: int | None = None) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Who takes a place over removes what others were writing.
            if token is not None:
                self._refuse_fenced(token)
            raise _refused(error, path or self._root, needed=self._needed) from None

    @contextlib.contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise DamagedError("missing", place=str(path), found="no file", allowed="the file") from None
        except OSError as error:
            raise DamagedError("cannot be read", place=str(path), found=error.strerror) from None


class _Whole:
    """Writes everything it is given; an unbuffered file may take a part."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[self._raw.write(left) :]


class _File:
    def __init__(self, stream: IO[bytes], *, place: str) -> None:
        self._descriptor, self._place = stream.fileno(), place
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, room: memoryview, begin: int) -> int:
        done = 0
        while done < len(room):
            try:
                got = os.preadv(self._descriptor, [room[done:]], begin + done)
            except OSError as error:
                found = f"{error.strerror} at byte {begin + done}"
                raise DamagedError("cannot be read", place=self._place, found=found) from None
            if not got:
                break
            done += got
        return done


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(error: OSError, path: Path, *, needed: int) -> MachineError:
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
        return _full(path, needed=needed, free=free, reason=error.strerror or str(error))
    return MachineError(f"cannot write: {error.strerror}", place=str(path))


def _full(path: Path, *, needed: int, free: int, reason: str = "No space left on device") -> MachineError:
    wanted = f"{needed} bytes are needed, " if needed else ""
    return MachineError(
        f"cannot write: {reason}",
        place=str(path),
        found=f"{wanted}{free} bytes are free",
        hint="free some space, or choose a folder that this user can write to; older checkpoints are kept",
    )
