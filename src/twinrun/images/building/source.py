"""Files of this checkout that an image contains: twinrun's source, the kernels, and their last commit."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file
from twinrun.images.git import git

SOURCE = "src/twinrun"
# Compiled files depend on the interpreter that wrote them, caches on the tool.
_EXCLUDED = ("__pycache__", ".mypy_cache", ".ruff_cache", ".DS_Store")
_SECONDS = 20


def source_files(folder: Path) -> list[Path]:
    """Return the files below `folder` that go into an image, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not set(path.relative_to(folder).parts) & set(_EXCLUDED)
        and path.suffix != ".pyc"
    )


def tree_sha256(folder: Path) -> str:
    """Return the checksum of names and contents below `folder`; raises InputError when it does not exist."""
    if not folder.is_dir():
        raise InputError("no such folder", place=str(folder))
    files = {path.relative_to(folder).as_posix(): sha256_of_file(path) for path in source_files(folder)}
    return sha256_of_bytes(canonical_json(files).encode())


def last_commit(root: Path, paths: Sequence[str]) -> str | None:
    """Return the last commit that changed one of the paths, with `+changes` after it for uncommitted ones."""
    commit = _git(root, "log", "-1", "--format=%H", "--", *paths)
    if not commit:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--", *paths) else "")


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints; nothing outside a repository or without git."""
    with contextlib.suppress(RunError):
        return git(root, "--no-optional-locks", *arguments, seconds=_SECONDS).strip()
    return ""
