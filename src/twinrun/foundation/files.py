"""Files that are either whole or absent, and their digests."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import MachineError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        MachineError: the file system refused, for example because it is full.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write all files, each as `write_atomically` does, or none; raises MachineError.

    Between two renames the file system may still refuse; the error names what was written by then.
    """
    staged: dict[Path, Path] = {}
    written: list[str] = []
    try:
        for path, text in texts.items():
            staged[path] = _temporary(path)
            _write(staged[path], text)
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


def cannot_write(error: OSError, path: Path | str, *, kept: str) -> MachineError:
    """Return what to say of a refused write: the reason, what helps, and what is lost or `kept`."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space" if full else "choose a folder that this user can write to"
    reason = error.strerror or str(error)
    return MachineError(f"cannot write: {reason}", place=str(path), hint=f"{remedy}; {kept}")


def _temporary(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    return Path(name)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    # mkstemp makes the file private; results are meant to be read by others.
    path.chmod(0o644)


def is_file_in(folder: Path, name: str) -> bool:
    """Say whether `name` is a file inside `folder`; a name no file system takes is not."""
    path = folder / name
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except OSError:
        return False


def sha256_of_bytes(content: bytes) -> str:
    """Return the hexadecimal SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of the file at `path`."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(data: Any) -> str:
    """Return the one JSON text of `data` that hashes are taken over."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
