"""The two ends of a bisection: a stack, a lock file or a record, each as what a run of it needs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from pydantic import Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.locks import PythonLock, parse_python_lock
from twinrun.manifests.stack import normalise
from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

STACKS, LOCK = "images/stacks", "requirements.lock"
Packages = dict[str, PythonLock]
"""Locked entries by the name of their package; one that has a version for each marker has several."""


class BisectSide(Frozen):
    """One end of a bisection."""

    label: str
    """Name that the user gave it."""
    stack: str | None
    """Folder of images/stacks; null for a lock file, which takes that of the recipe."""
    packages: Packages
    commit: str | None = None
    """Commit of this project that ran; null: the checkout as it is."""
    variables: dict[str, str] | None = None
    """Variables of the record that steer frameworks; null: those of this shell."""
    system: dict[str, str] = Field(default_factory=dict)
    """Versions of base image and system packages of the stack as it is now; empty for a lock file."""
    lifted: frozenset[str] = frozenset()
    """Packages whose declared bounds the stack lifts."""
    driver: str | None = None
    """Driver of the record's machine, which no environment can bring."""


def side_of(project: Project, text: str, *, option: str) -> BisectSide:
    """Return the end that `text` names.

    Raises:
        InputError: it is no stack, lock file or record, or the record's lock is not to be had.
    """
    place = Path(text)
    if place.suffix == ".lock" and place.is_file():
        return BisectSide(label=text, stack=None, packages=_packages(place.read_text(encoding="utf-8"), text))
    if place.suffix == ".json" or (place / "record.json").is_file():
        return side_of_record(project, read_record(place, project), text)
    known = sorted(path.parent.name for path in (project.root / STACKS).glob("*/stack.toml"))
    if text not in known:
        allowed = [*known, "a file requirements.lock", "a record"]
        raise InputError("no stack, lock or record", place=option, found=text, allowed=allowed)
    lock = project.stack(text).lock(project.root).read_text(encoding="utf-8")
    return BisectSide(label=text, stack=text, packages=_packages(lock, text), **_of_stack(project, text))


def side_of_record(project: Project, record: Judged, text: str) -> BisectSide:
    """Return a record as an end; raises InputError where its lock is not to be had."""
    name, commit = record.plan.stack, record.record.revision.commit
    known = (project.root / STACKS / name / "stack.toml").is_file()
    if known and project.stack(name).lock_sha256 == record.plan.lock_sha256:
        lock = project.stack(name).lock(project.root).read_text(encoding="utf-8")
    else:
        lock = _committed(project.root, commit, f"{STACKS}/{name}/{LOCK}", text)
    there = commit and git(project.root, "cat-file", "-e", f"{commit}^{{commit}}") is not None
    return BisectSide(
        label=text,
        stack=name,
        packages=_packages(lock, text),
        **(_of_stack(project, name) if known else {}),
        commit=commit if there else None,
        variables=record.environment.variables,
        driver=record.node.driver,
    )


def _of_stack(project: Project, name: str) -> dict[str, Any]:
    """Return what a stack has beside its lock."""
    loaded = project.stack(name)
    locked = loaded.system_packages(project.root)
    system = {one.name: one.version for one in locked.all()} if locked else {}
    system |= {"base image": loaded.stack.base.suite} if loaded.stack.base else {}
    lifted = frozenset(normalise(one.package()) for one in loaded.stack.lifted)
    return {"system": system, "lifted": lifted}


def _committed(root: Path, commit: str | None, file: str, text: str) -> str:
    found = git(root, "show", f"{commit}:{file}") if commit else None
    if found is None:
        raise InputError(
            "the lock of the record is not to be had",
            place=text,
            found=f"{file} of commit {commit or 'unknown'}",
            allowed="a record whose commit this checkout has, or whose lock is that of the stack now",
            hint="git fetch brings the history of the project, or name the lock file itself",
        )
    return found


def git(root: Path, *arguments: str) -> str | None:
    """Return what git prints in `root`; None where it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _packages(text: str, place: str) -> Packages:
    found: Packages = {}
    for pin, hashes in parse_python_lock(text, place=place).items():
        found.setdefault(normalise(pin.partition("==")[0]), {})[pin] = hashes
    if not found:
        raise InputError("no package is locked there", place=place, found="no pin", allowed="a hashed lock")
    return found


def versions(entries: PythonLock) -> str:
    """Return the versions of one package in words."""
    found = dict.fromkeys(pin.partition("==")[2].partition(" ")[0] for pin in entries)
    return " or ".join(found) or "absent"
