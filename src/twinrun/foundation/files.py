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
from pathlib import Path
from typing import IO, Any

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
    staged: dict[Path, Path] = {}
    written: list[str] = []
    try:
        for path, text in texts.items():
            staged[path] = _stage(path, text)
        # All content is on the disk: from here on only names change, which needs no space.
        for path, temporary in staged.items():
            temporary.replace(path)
            written.append(path.name)
    except OSError as error:
        left = [other.name for other in texts if other.name not in written]
        kept = f"not written: {', '.join(left)}; all other files are kept as they were"
        raise cannot_write(
            error, path, kept=f"written: {', '.join(written)}; {kept}" if written else kept
        ) from None
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


def demand_replaceable(path: Path) -> None:
    """Raise InputError where something other than a regular file stands: a rename would take its place.

    Of a device, which root may replace, nothing would be left; a pipe would lose its reader.
    """
    try:
        kind = kind_of(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        # A folder of the path is a link to itself, or no file system takes the name.
        kind = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if kind:
        raise InputError(
            "cannot be written here", place=str(path), found=kind, allowed="a regular file, or a new name"
        )


def demand_absent(folder: Path) -> None:
    """Raise InputError where something stands that a new folder would replace, a link to nothing too."""
    try:
        there = os.path.lexists(folder)
        folder.parent.stat()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InputError("no folder can be made here", place=str(folder), found=found) from None
    if there:
        raise InputError(
            "there is something already", place=str(folder), hint="choose another name, or remove it"
        )


def cannot_write(error: OSError, path: Path | str, *, kept: str) -> MachineError:
    """Return what to say of a refused write: the reason, what helps, and what is lost or `kept`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space" if full else "choose a folder that this user can write to"
    reason = error.strerror or str(error)
    return MachineError(f"cannot write: {reason}", place=str(path), hint=f"{remedy}; {kept}")


def _stage(path: Path, text: str) -> Path:
    """Write a text beside its place, readable by whom the user's own new files are, and return where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex}")
    try:
        with draft.open("x", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return draft


class IrregularFileError(OSError):
    """What stands where a regular file should be: a link, a pipe, a device, a socket, or too many bytes."""

    def __init__(self, found: str, path: Path) -> None:
        super().__init__(errno.EINVAL, found, str(path))


_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path, *, links: bool = False) -> IO[bytes]:
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
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | wary), "rb", buffering=0)
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
        raise InputError(
            "not a file of this folder", place=str(source), found=error.strerror, allowed="a regular file"
        ) from None


def read_regular(path: Path, *, limit: int, links: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; raises as `open_regular` does."""
    with open_regular(path, links=links) as stream:
        if (size := os.fstat(stream.fileno()).st_size) > limit:
            raise IrregularFileError(f"{size} bytes, at most {limit}", path)
        content: bytes | None = stream.read()
    if content is None:
        # A log of the kernel below /proc looks like a regular file and waits for its next line.
        raise IrregularFileError("a file without content yet", path)
    return content


def kind_of(mode: int) -> str:
    """Return what a directory entry of this mode is, in words; nothing for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no file")


def _demand_regular(found: os.stat_result, path: Path) -> None:
    if kind := kind_of(found.st_mode):
        raise IrregularFileError(kind, path)


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
    digest = hashlib.sha256()
    with open_regular(path, links=True) as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says; what two readers could understand in two ways is refused.

    Raises:
        ValueError: not JSON, a key that stands twice in one table, or half a character, which no file holds.
        RecursionError: hundreds of brackets, one in another.
    """
    # Python's own parser counts against the interpreter's limit. Where a library has raised that, 100,000
    # brackets end the process by a segmentation fault, as was seen in Python 3.11.
    try:
        from_json(text)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise RecursionError("brackets nest deeper than 200") from None
    data = json.loads(text, object_pairs_hook=_table)
    # Only an escape can bring half a character in: JSON itself is UTF-8.
    if _HALF in (text.lower() if isinstance(text, bytes) else text.lower().encode(errors="replace")):
        try:
            canonical_json(data).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"half a character, {error.object[error.start]!a}") from None
    return data


def leaves(data: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each text, number and truth value of JSON with its dotted key, and each name of a table."""
    if isinstance(data, dict):
        for name, one in data.items():
            inner = f"{key}.{name}" if key else str(name)
            yield inner, name
            yield from leaves(one, inner)
    elif isinstance(data, list):
        for number, one in enumerate(data):
            yield from leaves(one, f"{key}.{number}" if key else str(number))
    else:
        yield key, data


_HALF = b"\\ud"


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice!r} stands twice")
    return table


def canonical_json(data: Any) -> str:
    """Return the one JSON text of `data` that hashes are taken over."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
