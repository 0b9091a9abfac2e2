"""Files that are either whole or absent, and their digests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinrun.errors import MachineError


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part.

    Raises:
        MachineError: the file system refused, for example because it is full.
    """
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write all files, each as `write_atomically` does, or none; raises MachineError."""
    staged: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            staged[path] = _temporary(path)
            _write(staged[path], text)
        # All content is on the disk: from here on only names change, which needs no space.
        for path, temporary in staged.items():
            temporary.replace(path)
    except OSError as error:
        raise MachineError(
            f"cannot write: {error.strerror}",
            place=str(path),
            hint="free some space or choose another folder with --out; nothing was written",
        ) from None
    finally:
        for temporary in staged.values():
            with contextlib.suppress(OSError):
                temporary.unlink()


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
