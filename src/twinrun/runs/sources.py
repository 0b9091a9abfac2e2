"""The sources that ranks import: copied into the run folder before its first point, and told by their digest.

Ranks see the copy alone, so that no edit of the checkout changes a run that has begun.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_bytes, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import tool_output
from twinrun.protocol.allocation import LOADED, LoadedFiles, Revision
from twinrun.runs.prepared import Prepared

FOLDER, SEAL = "sources", "sources.json"
# Folders of a recipe that no rank reads, and the most bytes of a file that is no module: data lie elsewhere.
_UNREAD, _MODULES, _LARGEST = {"results", "tests"}, {".py", ".so"}, 4 << 20


class Sources(Frozen):
    """sources.json: what was copied, from which state of the project; written when all of it is there."""

    revision: Revision
    files: dict[str, str]
    """SHA-256 by name."""


def sealed(prepared: Prepared, *, starts: bool) -> tuple[Prepared, Sources]:
    """Copy what ranks import into the run folder, once, and return the run that starts from there.

    Args:
        starts: whether anything is still to be started.

    Raises:
        InputError: it is, and the run was begun with other sources.
    """
    run, folders = prepared.run, _folders(prepared)
    copy, seal = run / FOLDER, run / SEAL
    if seal.is_file():
        sources = load_json(seal, Sources)
        if starts:
            _demand_same(prepared, sources, _digests(folders))
    else:
        part = run / f".{FOLDER}"
        shutil.rmtree(part, ignore_errors=True)
        for source, name in folders.items():
            for file in _files(source):
                target = part / name / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
        shutil.rmtree(copy, ignore_errors=True)
        part.rename(copy)
        found = _digests({copy: ""})
        sources = Sources(revision=_revision(prepared.project.root, folders, copy, found), files=found)
        write_atomically(seal, sources.model_dump_json(indent=1) + "\n")
    workspace, own = prepared.workspace, prepared.script

    def moved(path: Path) -> Path:
        old = next(one for one in folders if path.is_relative_to(one))
        return copy / folders[old] / path.relative_to(old)

    packages = tuple(map(moved, workspace.packages))
    workspace = workspace.model_copy(update={"root": copy, "packages": packages, "recipe": None})
    script = moved(own) if isinstance(own, Path) else own
    return replace(prepared, workspace=workspace, script=script), sources


def _demand_same(prepared: Prepared, sources: Sources, found: Mapping[str, str]) -> None:
    """Raise InputError where the checkout is no longer what the run was begun with."""
    if (tree := _tree(found)) != sources.revision.tree:
        now, begun = _git(prepared.project.root, "rev-parse", "HEAD")[0], sources.revision
        names = ", ".join(_apart(found, sources.files)[:5])
        message, here = "the run was begun with other sources", str(prepared.run)
        apart = f"commit {(now or 'none').strip()}, sources {tree[:12]}: {names}"
        allowed = f"commit {begun.commit or 'none'}, sources {str(begun.tree)[:12]}"
        hint = "check out what it was begun with, or leave --resume out to start another run"
        raise InputError(message, place=here, found=apart, allowed=allowed, hint=hint)


def changed_since(run: Path, sources: Sources) -> tuple[str, ...]:
    """Return the files of the copy that are no longer what was copied."""
    return tuple(_apart(_digests({run / FOLDER: ""}), sources.files))


def loaded_by(folder: Path) -> list[LoadedFiles]:
    """Return what the ranks of the point in `folder` had loaded, the first rank's first."""
    files = sorted((folder / LOADED).glob("*.json"), key=lambda one: int(one.stem))
    return [load_json(file, LoadedFiles) for file in files]


def when_and_what(loaded: Sequence[LoadedFiles]) -> dict[str, str]:
    """Return what a record says of that: when the ranks began and ended, and the first one's digest."""
    if not loaded:
        return {}
    began, ended = min(one.began for one in loaded), max(one.ended for one in loaded)
    times = (datetime.fromtimestamp(one, UTC).isoformat(timespec="seconds") for one in (began, ended))
    return {**dict(zip(("began", "ended"), times, strict=True)), "loaded_sha256": _tree(loaded[0].files)}


def replaced(loaded: Iterable[LoadedFiles]) -> tuple[str, ...]:
    """Return what was written while ranks had it loaded, or is another file to ranks of the same host."""
    found, names = dict[tuple[str, str], str](), dict[str, None]()
    for one in loaded:
        other = [name for name, sha in one.files.items() if found.setdefault((one.host, name), sha) != sha]
        names |= dict.fromkeys((*one.written, *other))
    return tuple(names)


def _folders(prepared: Prepared) -> dict[Path, str]:
    """Return the folders that ranks may read code from, by where each lies in the copy."""
    root, recipe = prepared.project.root, prepared.selection.recipe
    own = root / recipe.folder
    stack = root / prepared.selection.stack.folder
    kernels = [one.parent for one in prepared.workspace.packages if not one.is_relative_to(own)]
    inner = {one: one.relative_to(root).as_posix() for one in (root / "src", stack, *kernels)}
    return {own: f"recipes/{recipe.recipe.name}", **inner}


def _files(folder: Path) -> Iterator[Path]:
    """Yield what is copied of a folder: modules, and other files that are not large."""
    for place, folders, names in os.walk(folder, followlinks=True):
        unread = _UNREAD if Path(place) == folder else set[str]()
        folders[:] = sorted(one for one in folders if one not in unread and _is_source(one))
        for file in (Path(place, one) for one in sorted(names) if _is_source(one)):
            if file.is_file() and (file.suffix in _MODULES or file.stat().st_size <= _LARGEST):
                yield file


def _is_source(name: str) -> bool:
    made = name.endswith((".pyc", ".egg-info")) or name == "__pycache__"
    return name.isprintable() and not name.startswith(".") and not made


def _digests(folders: Mapping[Path, str]) -> dict[str, str]:
    """Return the SHA-256 of what is copied of some folders, by its name in the copy."""
    return {
        Path(name, file.relative_to(folder)).as_posix(): sha256_of_file(file)
        for folder, name in folders.items()
        for file in _files(folder)
    }


def _tree(files: Mapping[str, str]) -> str:
    return sha256_of_bytes("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode())


def _apart(found: Mapping[str, str], allowed: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({**found, **allowed}) if found.get(name) != allowed.get(name)]


def _revision(root: Path, folders: Mapping[Path, str], copy: Path, files: Mapping[str, str]) -> Revision:
    """Return the commit, and what it does not have of the copy: git's own index may be told to look away.

    A recipe outside the checkout is of no commit of it.
    """
    names = [name for folder, name in folders.items() if folder.is_relative_to(root)]
    head, unknown = _git(root, "rev-parse", "HEAD")
    commit = head.strip() if head else None
    listed, unseen = _git(root, "ls-tree", "-r", "-z", commit, "--", *names) if commit else (None, None)
    found = Revision(commit=commit, changes_sha256=None, tree=_tree(files), unknown=unknown or unseen)
    if not (commit and listed):
        # Without a file of ours it is the checkout of something else.
        return found if listed is None else found.model_copy(update={"commit": None})
    rows = (row.partition("\t") for row in listed.split("\0") if row)
    known = {name: row.split()[2] for row, _, name in rows}
    ours, unread = tuple(f"{one}/" for one in names), tuple(f"{one}/{no}/" for one in names for no in _UNREAD)

    def differs(name: str) -> bool:
        module = Path(name).suffix in _MODULES
        if name in files:
            return (module or name in known) and known.get(name) != _blob(copy / name, like=commit)
        # Of the modules that a commit has, all that a copy takes must be there.
        return module and not name.startswith(unread) and "/." not in name

    held = sorted(name for name in {*known, *files} if name.startswith(ours))
    lines = [f"{files.get(name, 'gone')}  {name}\n" for name in held if differs(name)]
    changes = sha256_of_bytes("".join(lines).encode()) if lines else None
    return found.model_copy(update={"changes_sha256": changes})


def _blob(file: Path, *, like: str) -> str:
    """Return git's name of a content, by the hash of the repository's names."""
    content = file.read_bytes()
    made: Any = hashlib.sha256 if len(like) == 64 else hashlib.sha1
    return str(made(b"blob %d\0" % len(content) + content).hexdigest())


def _git(root: Path, *arguments: str) -> tuple[str | None, str | None]:
    """Return what git prints; else None, with why that is not known where the folder is a checkout."""
    top = next((one for one in (root, *root.parents) if (one / ".git").exists()), None)
    if top is None:
        return None, None
    # Variables of git, as its hooks have them, may lead to another repository.
    command = ["git", f"--git-dir={top / '.git'}", f"--work-tree={top}", *arguments]
    # LC_ALL and no optional locks: reading must neither translate nor touch the checkout.
    plain, name = {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}, f"git {arguments[0]}"
    try:
        return tool_output(command, failure="failed", variables=plain, folder=root, seconds=20), None
    except MachineError as error:
        return None, " ".join(f"{name}: {error.message} {error.found or ''}".split())
