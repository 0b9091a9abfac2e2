"""Files that are either whole or absent, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from twinrun.foundation.errors import InputError, MachineError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        InputError: something other than a regular file stands there.
        MachineError: the file system refused, for example because it is full.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write all files, each as `write_atomically` does, or none; raises as that does.

    Between two renames the file system may still refuse; the error names what was written by then.
    """
    for path in texts:
        demand_replaceable(path)
    drafts = {path: path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex}") for path in texts}
    written: list[str] = []
    try:
        for path, draft in drafts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with draft.open("x", encoding="utf-8") as stream:
                stream.write(texts[path])
                stream.flush()
                os.fsync(stream.fileno())
        # All content is on the disk: from here on only names change, which needs no space.
        for path, draft in drafts.items():
            draft.replace(path)
            written.append(path.name)
    except OSError as error:
        left = [other.name for other in texts if other.name not in written]
        done = f"written: {', '.join(written)}; " if written else ""
        kept = f"{done}not written: {', '.join(left)}; all other files are kept as they were"
        raise cannot_write(error, path, kept=kept) from None
    finally:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink()


def demand_replaceable(path: Path) -> None:
    """Raise InputError where something other than a regular file stands: a rename would take its place.

    Of a device, which root may replace, nothing would be left; a pipe would lose its reader.
    """
    if (found := _standing(path)) not in (None, "a file"):
        message, allowed = "cannot be written here", "a regular file, or a new name"
        raise InputError(message, place=str(path), found=found, allowed=allowed)


def demand_absent(folder: Path) -> None:
    """Raise InputError where something stands that a new folder would replace, a link to nothing too."""
    if found := _standing(folder):
        hint = "choose another name, or remove it"
        raise InputError("there is something already", place=str(folder), found=found, hint=hint)


def _standing(path: Path) -> str | None:
    """Return what stands at `path`, or why no file system takes the name; None where nothing does."""
    try:
        return kind_of(path.lstat().st_mode) or "a file"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def cannot_write(error: OSError, path: Path | str, *, kept: str) -> MachineError:
    """Return what to say of a refused write: the reason, what helps, and what is lost or `kept`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space" if full else "choose a folder that this user can write to"
    reason = error.strerror or str(error)
    return MachineError(f"cannot write: {reason}", place=str(path), hint=f"{remedy}; {kept}")


class IrregularFileError(OSError):
    """What stands where a regular file should be: a link, a pipe, a device, a socket, or too many bytes."""


# By the letter that `ls -l` has for it.
_KINDS = {"l": "a link", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device", "d": "a folder"}


def open_regular(path: Path, *, links: bool = False) -> FileIO:
    """Open a regular file for reading, without a buffer; nothing else is opened, so that nothing waits.

    Args:
        links: follow a link to a regular file instead of refusing it.

    Raises:
        OSError: there is no such file, or it cannot be read.
        IrregularFileError: it is something else than a file.
    """
    _demand_regular(path.stat() if links else path.lstat(), path)
    # It may have been replaced since: a pipe does not wait for its writer, and a link is not followed.
    wary = os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    stream = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | wary), "rb")
    try:
        _demand_regular(os.fstat(stream.fileno()), path)
    except BaseException:
        stream.close()
        raise
    return stream


def copy_regular(source: Path, target: Path) -> None:
    """Copy a regular file; a link is not followed, for what it leads to may be anybody's.

    Raises:
        InputError: something other than a regular file stands at `source`.
    """
    try:
        with open_regular(source) as stream, target.open("wb") as copy:
            shutil.copyfileobj(stream, copy)
    except IrregularFileError as error:
        message, found = "not a file of this folder", error.strerror
        raise InputError(message, place=str(source), found=found, allowed="a regular file") from None


def read_regular(path: Path, *, limit: int, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; raises as `open_regular` does."""
    with open_regular(path, links=links) as stream:
        if (size := os.fstat(stream.fileno()).st_size) > limit:
            raise IrregularFileError(errno.EINVAL, f"{size} bytes, at most {limit}", str(path))
        content: bytes | None = stream.read()
    if content is None:
        # A log of the kernel below /proc looks like a regular file and waits for its next line.
        raise IrregularFileError(errno.EINVAL, "a file without content yet", str(path))
    return content


def kind_of(mode: int) -> str:
    """Return what a directory entry of this mode is, in words; nothing for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.filemode(mode)[0], "no file")


def _demand_regular(found: os.stat_result, path: Path) -> None:
    if kind := kind_of(found.st_mode):
        raise IrregularFileError(errno.EINVAL, kind, str(path))


def real(path: Path) -> Path:
    """Return `path` without links; one that leads to itself stays, and cannot be opened."""
    return Path(os.path.realpath(path))


def is_file_in(folder: Path, name: str) -> bool:
    """Say whether `name` is a file inside `folder`; a name no file system takes is not."""
    path = folder / name
    try:
        return path.is_file() and real(path).is_relative_to(real(folder))
    except OSError:
        return False


def sha256_of_bytes(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, following links; raises as `open_regular` does."""
    with open_regular(path, links=True) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says; what two readers could understand in two ways is refused.

    Raises:
        ValueError: not JSON, a key that stands twice in one table, half a character, which no file holds, or
            hundreds of brackets, one in another.
    """
    # Python's own parser counts against the interpreter's limit. Where a library has raised that, 100,000
    # brackets end the process by a segmentation fault, as was seen in Python 3.11.
    from_json(text)
    return json.loads(text, object_pairs_hook=_table)


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each text, number and truth value of JSON with its dotted key, and each name and place."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, one in inside:
        inner = f"{key}.{name}" if key else str(name)
        yield inner, name
        yield from leaves(one, inner)
    if not isinstance(data, (dict, list)):
        yield key, data


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def canonical_json(data: Any) -> str:
    """Return the one JSON text of `data` that hashes are taken over."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
