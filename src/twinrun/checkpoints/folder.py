"""Checkpoints in a folder: fresh folder, fsync, rename, then the pointer; one writer at a time.

What the file system answers has three outcomes. It works; or what was read is not what was written, which is
damage; or the file system cannot do it now, which is tried again and then ends the run, and moves nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from twinrun.foundation.cache import locked
from twinrun.foundation.errors import MachineError, RunError, RunInterruptedError, TwinrunError, require_equal
from twinrun.foundation.files import IrregularFileError, kind_of, open_regular, parse_json, sha256_of_bytes

# The folder of a step.
STEP = "step-{:08d}"
MANIFEST = "manifest.json"
LATEST = "latest.json"
# Beside a manifest: the signature of who vouches for it.
SIGNATURE = f"{MANIFEST}.sig"
WRITER, QUARANTINE = "writer.json", "quarantine"
# Neither an index nor the description of a part is larger, written or read: 200,000 ranks, or tensors of one.
MAX_MANIFEST_BYTES = 64 << 20
# `latest.json` and `writer.json` have one line.
MAX_STATE_BYTES = 1 << 16
# What stands in the way of a file is no file.
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO)
# What file servers say while they are away, and disks while somebody makes room.
_PASSING = {errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ENOSPC, errno.EDQUOT}
_PASSING |= {errno.ETIMEDOUT, errno.EREMOTEIO, errno.ECONNRESET, errno.ENOTCONN, errno.EHOSTDOWN}
# Seconds between tries: half a minute in all, less than what ends a rank without progress.
WAITS = (0.1, 0.5, 2.0, 10.0, 20.0)
Found = TypeVar("Found")


def patiently(action: Callable[[], Found]) -> Found:
    """Return what `action` returns, tried again where the file system may come back; raises its OSError."""
    for seconds in WAITS:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(seconds)
    return action()


class DamagedError(RunError):
    """A checkpoint, or a part of it, is not what was written; names the file and both contents."""


demand_written = functools.partial(require_equal, error=DamagedError)
"""Raises DamagedError where what is found is not what was written."""


def demand_size(found: int, written: int, place: str) -> None:
    """Raise DamagedError for a file of another size than was written."""
    demand_written(f"{found} bytes", f"{written} bytes", "another size", place=place)


class UnreachableError(RunInterruptedError):
    """The file system did not read or write, also when it was asked again; nothing was moved or removed."""


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Append `data`."""


class Latest(NamedTuple):
    """What a place says was published last."""

    step: int
    sha256: str | None
    """Digest of its manifest; None where the place does not say."""


def demand_readable(size: int, *, place: str, what: str) -> None:
    """Refuse to write a description of `size` bytes that no run could read again; raises RunError."""
    if size > MAX_MANIFEST_BYTES:
        message = f"{what} would be too large to be read again; nothing was written"
        found, allowed = f"{size} bytes", f"at most {MAX_MANIFEST_BYTES} bytes"
        hint = "save fewer tensors a rank, or on fewer ranks"
        raise RunError(message, place=place, found=found, allowed=allowed, hint=hint)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint called `name`; None for a name that no checkpoint has."""
    match = re.fullmatch(r"step-([0-9]{8,})", name)
    return int(match[1]) if match and STEP.format(int(match[1])) == name else None


class FolderStore:
    """Checkpoints of one run in a folder of a local or shared file system, or of a mounted bucket.

    A checkpoint is there when `commit` has returned, or not at all. Every method raises UnreachableError
    where the file system does not answer, and MachineError where it refuses this user.
    """

    def __init__(self, root: Path) -> None:
        self.place = str(root)
        self._root = root
        self._needed = 0

    def claim(self, run: str) -> int:
        """Make `run` the writer of this place and return its fencing token; remove what dead writers left."""

        def claimed() -> int:
            self._root.mkdir(parents=True, exist_ok=True)
            with locked(self._root / ".lock", seconds=60):
                known = (self._state(name).get("token") for name in (WRITER, LATEST))
                # Either file may be damaged.
                token = max([0, *(one for one in known if isinstance(one, int))]) + 1
                self._put(self._root / WRITER, json.dumps({"token": token, "run": run}) + "\n")
            for left in self._root.glob(".step-*"):
                shutil.rmtree(left, ignore_errors=True)
            return token

        return self._try(claimed, self._root)

    def begin(self, step: int, token: int, *, needed: int) -> None:
        """Prepare a save of `needed` bytes; refuse where they do not fit. Raises RunError when fenced off."""
        self._needed = needed
        # Earlier than where it must be: a save may take minutes.
        self._refuse_fenced(token)
        free = self._try(lambda: shutil.disk_usage(self._root).free, self._root, token=token)
        if free < needed:
            raise self._refused(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._root)
        self._try(lambda: self._draft(step, token).mkdir(exist_ok=True), self._root, token=token)

    @contextlib.contextmanager
    def create(self, step: int, token: int, name: str) -> Iterator[Sink]:
        """Write one file of a save, durable at the end of the block."""
        path = self._draft(step, token) / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        opened = functools.partial(os.open, path, flags, 0o644)
        with contextlib.closing(_Whole(self._try(opened, path, token=token))) as sink:
            try:
                yield sink
                # Once: a kernel whose flush has failed forgets what it could not write.
                os.fsync(sink.descriptor)
            except OSError as error:
                self._refuse_fenced(token)
                raise self._refused(error, path) from None

    def commit(self, step: int, token: int, manifest: bytes) -> None:
        """Publish a save whose files are durable, and make it the latest; raises RunError when fenced off."""
        demand_readable(len(manifest), place=self.file(step, MANIFEST), what="the index of this checkpoint")
        draft, final = self._draft(step, token), self._folder(step)
        with self.create(step, token, MANIFEST) as sink:
            sink.write(manifest)

        def published() -> None:
            _sync_folder(draft if os.path.lexists(draft) else final)
            with locked(self._root / ".lock", seconds=60):
                self._refuse_fenced(token)
                # When it is tried again, the first try may have renamed it.
                if not os.path.lexists(final):
                    draft.rename(final)
                elif os.path.lexists(draft):
                    raise RunError("this checkpoint is there already", place=str(final), found=final.name)
                _sync_folder(self._root)
                content: dict[str, object] = {"step": step, "checkpoint": final.name, "token": token}
                content["sha256"] = sha256_of_bytes(manifest)
                self._put(self._root / LATEST, json.dumps(content) + "\n")
                _sync_folder(self._root)

        self._try(published, draft, token=token)

    def attach(self, step: int, name: str, text: str) -> None:
        """Put a small file beside those of a published checkpoint, whole or not at all."""
        target = self._step_folder(step) / name
        self._try(lambda: self._put(target, text), target)

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
        """Return what was published last, whether it is still there or not; None where nothing says it."""
        state = self._state(LATEST)
        step, digest = state.get("step"), state.get("sha256")
        known = digest if isinstance(digest, str) else None
        return Latest(step, known) if isinstance(step, int) else None

    def manifest(self, step: int) -> bytes:
        """Return the content of the manifest of `step`; raises DamagedError where there is none."""
        with self.open(step, MANIFEST) as source:
            return source.whole(MAX_MANIFEST_BYTES)

    def contents(self, step: int) -> dict[str, int]:
        """Return the files beside the manifest with their sizes; raises DamagedError where one is no file."""
        folder, sizes = self._step_folder(step), {}
        found = _read(lambda: {path: path.lstat() for path in folder.iterdir()}, folder, self._refused)
        for path, status in found.items():
            if kind := kind_of(status.st_mode):
                raise _no_file(path, kind)
            sizes[path.name] = status.st_size
        sizes.pop(MANIFEST, None)
        return sizes

    @contextlib.contextmanager
    def open(self, step: int, name: str) -> Iterator[ReadableFile]:
        """Read a file of `step`; raises DamagedError where there is none."""
        path = self._step_folder(step) / name
        with contextlib.closing(ReadableFile(path, self._refused)) as source:
            yield source

    def file(self, step: int, name: str) -> str:
        """Return what a message calls a file of `step`."""
        return str(self._folder(step) / name)

    def quarantine(self, step: int) -> str:
        """Put a bad checkpoint aside, where no run takes it, and return where."""
        place, name = self._root / QUARANTINE, self._folder(step).name

        def moved() -> str:
            with locked(self._root / ".lock", seconds=60):
                place.mkdir(exist_ok=True)
                names = (f"{name}.{number}" if number > 1 else name for number in range(1, 1 << 20))
                target = next(place / one for one in names if not os.path.lexists(place / one))
                self._folder(step).rename(target)
            return str(target)

        return self._try(moved, place)

    def remove(self, step: int) -> None:
        """Remove a checkpoint."""
        # Renamed first: a checkpoint that is half removed would look like a damaged one.
        doomed = self._root / f".{self._folder(step).name}.removed"

        def removed() -> None:
            if os.path.lexists(self._folder(step)):
                self._folder(step).rename(doomed)
            shutil.rmtree(doomed)

        self._try(removed, doomed)

    def _names(self) -> list[str]:
        """Return what is called like a checkpoint, whatever it is."""

        def listed() -> list[str]:
            try:
                return [path.name for path in self._root.iterdir() if path.name.startswith("step-")]
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._try(listed, self._root)

    def _folder(self, step: int) -> Path:
        return self._root / STEP.format(step)

    def _step_folder(self, step: int) -> Path:
        """Return the folder of a step to read from; raises DamagedError where it is something else."""
        path = self._folder(step)
        mode = _read(lambda: os.lstat(path).st_mode, path, self._refused)
        if not stat.S_ISDIR(mode):
            found = kind_of(mode) or "a file"
            raise DamagedError("no folder of a checkpoint", place=str(path), found=found, allowed="a folder")
        return path

    def _draft(self, step: int, token: int) -> Path:
        return self._root / f".{STEP.format(step)}.{token}.partial"

    def _refuse_fenced(self, token: int) -> None:
        """Raise RunError where this run is no longer the writer of the place."""
        writer = self._state(WRITER)
        if "token" not in writer:
            message = "this place was emptied, or is gone, since this run began; nothing was written"
            found, hint = "no writer", "bring it back; the same command with --resume goes on"
        elif writer["token"] != token:
            message = "another run writes its checkpoints here; nothing was overwritten"
            found = f"writer {writer['token']} ({writer.get('run', 'unknown')})"
            hint = "give each run a place of its own"
        else:
            return
        allowed = f"this run, writer {token}"
        raise RunError(message, place=self.place, found=found, allowed=allowed, hint=hint)

    def _state(self, name: str) -> Mapping[str, Any]:
        """Return a small file of ours; empty where it is not there, or not whole."""
        try:
            with contextlib.closing(ReadableFile(self._root / name, self._refused)) as source:
                found = parse_json(source.whole(MAX_STATE_BYTES))
        except (DamagedError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _put(self, target: Path, text: str) -> None:
        """Write a small file, whole or not at all; elsewhere first, for a checkpoint has no file too many."""
        draft = self._root / f".{target.parent.name}.{target.name}"
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(target)

    def _try(self, action: Callable[[], Found], path: Path, *, token: int | None = None) -> Found:
        """Return what `action` returns, which is tried again where the file system may come back."""
        try:
            return patiently(action)
        except OSError as error:
            # Who takes a place over removes what others were writing.
            if token is not None:
                self._refuse_fenced(token)
            raise self._refused(error, path) from None

    def _refused(self, error: OSError, path: Path) -> TwinrunError:
        """Return what to say of a file system that does not read or write; nothing was moved."""
        reason, found = error.strerror or str(error), None
        with contextlib.suppress(OSError, StopIteration):
            free = shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free
            wanted = f"{self._needed} bytes are needed, " if self._needed else ""
            found = f"{wanted}{free} bytes are free"
        closed = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        remedy = "choose a folder that this user can write to" if closed else "mend it, or free some space"
        hint = f"no checkpoint was changed; {remedy}; then --resume goes on"
        kind, message = MachineError if closed else UnreachableError, f"the file system refused: {reason}"
        return kind(message, place=str(path), found=found, hint=hint)


class _Whole:
    """Writes everything it is given; a file may take a part at once."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def write(self, data: memoryview | bytes) -> None:
        left = memoryview(data).cast("B")
        while left:
            left = left[patiently(functools.partial(os.write, self.descriptor, left)) :]

    def close(self) -> None:
        os.close(self.descriptor)


Refusal = Callable[[OSError, Path], TwinrunError]


class ReadableFile:
    """A file that is being read, by several threads at once."""

    def __init__(self, path: Path, refused: Refusal) -> None:
        self._path, self._refused = path, refused
        self._stream = _read(lambda: open_regular(path), path, refused)
        self.size = _read(lambda: os.fstat(self._stream.fileno()).st_size, path, refused)

    def read_into(self, room: memoryview, begin: int) -> int:
        """Fill `room` from byte `begin` on; return how many bytes there were."""
        wanted = room[: max(0, self.size - begin)]
        done = 0
        while done < len(wanted):
            more = functools.partial(self._some, wanted[done:], begin + done)
            done += _read(more, self._path, self._refused)
        return done

    def whole(self, limit: int) -> bytes:
        """Return the content; raises DamagedError where that is more than `limit` bytes."""
        if self.size > limit:
            raise _no_file(self._path, f"{self.size} bytes, at most {limit}")
        room = bytearray(self.size)
        self.read_into(memoryview(room), 0)
        return bytes(room)

    def close(self) -> None:
        """Read no more."""
        self._stream.close()

    def _some(self, room: memoryview, begin: int) -> int:
        try:
            return _some(self._stream.fileno(), room, begin)
        except OSError:
            # A handle that a file server has forgotten stays so; the file may be there all the same.
            with open_regular(self._path) as again:
                return _some(again.fileno(), room, begin)


def _some(descriptor: int, room: memoryview, begin: int) -> int:
    """Read at least one byte; raises OSError where there is none, though the file is that long."""
    if not (got := os.preadv(descriptor, [room], begin)):
        raise OSError(errno.EIO, f"no byte {begin}, though the file is longer")
    return got


def _read(action: Callable[[], Found], path: Path, refused: Refusal) -> Found:
    """Return what `action` reads; raises DamagedError where there is no file, else what `refused` makes."""
    try:
        return patiently(action)
    except FileNotFoundError:
        raise DamagedError("missing", place=str(path), found="no file", allowed="the file") from None
    except IrregularFileError as error:
        raise _no_file(path, str(error.strerror)) from None
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path, str(error.strerror)) from None
        raise refused(error, path) from None


def _no_file(path: Path, found: str) -> DamagedError:
    return DamagedError("no regular file", place=str(path), found=found, allowed="a file")


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
