"""Files of a checkout that git tracks: what else lies in a folder never leaves this machine."""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file
from twinrun.foundation.processes import read_output

_SECONDS = 20
_VARIABLES = {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}


def tracked_files(root: Path, folder: str) -> list[Path]:
    """Return the regular files below `folder` that git tracks, sorted.

    Raises:
        InputError: `root` is no repository, git tracks nothing there, or what it tracks is a link or leads
            through one.
    """
    command = ["git", "ls-files", "-z", "--cached", "--", f":(literal){folder}"]
    try:
        listed = read_output(command, variables=_VARIABLES, folder=root, seconds=_SECONDS)
    except RunError as error:
        raise InputError(
            "git does not say which files belong to it",
            place=str(root / folder),
            found=error.found or error.message,
            hint="work in a clone of the repository",
        ) from None
    names = [PurePosixPath(name) for name in sorted(set(listed.split("\0")) - {""})]
    if not names:
        raise InputError("git tracks no file there", place=str(root / folder), hint="`git add` what belongs")
    for above in sorted({parent for name in names for parent in name.parents} - {PurePosixPath()}):
        _refuse_link(root / above)
    return [file for file in (root / name for name in names) if _is_regular(file)]


def _refuse_link(path: Path) -> None:
    """Raise InputError for a link, whatever it leads to."""
    if path.is_symlink():
        raise InputError("a link cannot go into an image", place=str(path), found=str(path.readlink()))


def _is_regular(file: Path) -> bool:
    """Say whether a file is there; raises InputError for a link and for what is neither."""
    _refuse_link(file)
    if not file.exists():
        return False
    if not stat.S_ISREG(file.stat().st_mode):
        raise InputError("not a regular file", place=str(file))
    return True


def tree_sha256(root: Path, folder: str) -> str:
    """Return the checksum of names and contents of the tracked files; raises as `tracked_files`."""
    files = {
        path.relative_to(root / folder).as_posix(): sha256_of_file(path)
        for path in tracked_files(root, folder)
    }
    return sha256_of_bytes(canonical_json(files).encode())
