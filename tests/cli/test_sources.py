"""What ran is what the record says, whatever is edited before, during and between points."""

from __future__ import annotations

import dataclasses
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.flow_sites import RECIPE, FlowSite
from tests.cli.played_ranks import Job
from tests.commands import ROOT
from tests.execution.fake_engine import Play
from tests.trials import CHANGED_SOURCES
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.protocol.allocation import LoadedFiles

MODULE, OWN = Path("src/twinrun/train/loop.py"), Path("recipes", RECIPE, "own.py")


def git(root: Path, *words: str) -> str:
    author = ("-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "core.autocrlf=false")
    done = subprocess.run(["git", *author, *words], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(trained: FlowSite) -> FlowSite:
    """A checkout of git with one commit, one module of the package and one of the recipe."""
    root = trained.root
    (root / "images").unlink()
    shutil.copytree(ROOT / "images", root / "images", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (MODULE, OWN, Path("src/twinrun/results/__init__.py")):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("RATE = 1\n", encoding="utf-8")
    (root / ".gitignore").write_text("hidden*\n*.log\n", encoding="utf-8")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "A"]):
        git(root, *words)
    return trained


def write(text: str, *files: Path | str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        for file in files:
            (root / file).write_text(text, encoding="utf-8")

    return plant


def flagged(flag: str) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        git(root, "update-index", flag, str(MODULE))
        (root / MODULE).write_text("RATE = 2\n", encoding="utf-8")

    return plant


def staged(root: Path) -> None:
    (root / OWN).write_text("RATE = 2\n", encoding="utf-8")
    git(root, "add", str(OWN))


SEEN: dict[str, Callable[[Path], None]] = {
    "a module": write("RATE = 2\n", MODULE),
    "a module of the recipe, staged": staged,
    "a file beside the modules": write("RATE = 2\n", OWN.with_name("README.md")),
    "a module that git does not know": write("", MODULE.with_name("new.py")),
    "a module that git ignores": write("", MODULE.with_name("hidden.py")),
    "a native library that git ignores": write("", MODULE.with_name("hidden.so")),
    "a module of the package of results": write("", "src/twinrun/results/new.py"),
    "assume unchanged": flagged("--assume-unchanged"),
    "skip worktree": flagged("--skip-worktree"),
    "a module that is gone": lambda root: (root / MODULE).unlink(),
}


@pytest.mark.parametrize("plant", SEEN.values(), ids=SEEN)
def test_what_the_commit_does_not_have_is_a_change(
    repository: FlowSite, plant: Callable[[Path], None]
) -> None:
    plant(repository.root)
    repository.invoke()
    revision = repository.record().record.revision
    assert revision.commit == git(repository.root, "rev-parse", "HEAD")
    assert revision.changes_sha256
    assert "the commit of the run had changes" in repository.record().doubts


def test_what_no_rank_reads_is_no_change(repository: FlowSite) -> None:
    root = repository.root
    write("more", "README.md", OWN.with_name("notes.txt"), OWN.with_name("a.log"))(root)
    (root / "src" / "twinrun.egg-info").mkdir()
    write("", "src/twinrun.egg-info/top_level.txt")(root)
    repository.invoke()
    assert repository.record().record.revision.is_clean
    assert not [one for one in repository.record().doubts if "commit" in one]


def test_an_edit_during_a_run_changes_nothing_of_it(repository: FlowSite) -> None:
    seen = []

    def edited(job: Job) -> Play:
        (repository.root / MODULE).write_text("RATE = 2\n", encoding="utf-8")
        (folder,) = repository.folders()
        seen.append((folder / "sources" / MODULE).read_text(encoding="utf-8"))
        started = repository.script.started[-1]
        assert started.variables["PYTHONPATH"].startswith(f"{folder}/sources/src")
        assert started.folder == folder / "sources"
        return repository.play(job)

    repository.script.play = edited
    repository.invoke()
    assert seen == ["RATE = 1\n"] * len(seen)
    assert repository.record().record.revision.is_clean


def test_an_edit_of_the_copy_is_named_and_doubted(repository: FlowSite) -> None:
    def edited(job: Job) -> Play:
        (folder,) = repository.folders()
        (folder / "sources" / MODULE).write_text("RATE = 2\n", encoding="utf-8")
        return repository.play(job)

    repository.script.play = edited
    repository.invoke()
    assert repository.record().record.revision.changed == (str(MODULE),)
    assert f"sources were edited while they ran: {MODULE}" in repository.record().doubts


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(CHANGED_SOURCES.change, CHANGED_SOURCES.seed, id="day"),
        pytest.param(CHANGED_SOURCES.nightly, 29, id="night", marks=pytest.mark.trials),
    ],
)
def test_a_change_is_named_wherever_it_falls(repository: FlowSite, count: int, seed: int) -> None:
    root, library = repository.root, repository.root.parent / "package.so"
    chance = random.Random(seed)
    for trial in range(count):
        for flag in ("--no-assume-unchanged", "--no-skip-worktree"):
            git(root, "update-index", flag, str(MODULE))
        # Of another content and the same size and second git may think that it is as it was.
        (root / MODULE).unlink(missing_ok=True)
        git(root, "reset", "-q", "--hard")
        git(root, "clean", "-qfdx")
        write("1", library)(root)
        repository.out = root.parent / f"runs-{trial}"
        plays = dict.fromkeys(f"devices={number}" for number in (1, 2))
        moment = chance.choice(["never", "before", "before and undone", "copy", "checkout", "package"])
        where, (what, plant) = chance.choice(list(plays)), chance.choice(list(SEEN.items()))
        if "before" in moment:
            plant(root)

        def played(job: Job, moment: str = moment, where: str = where) -> Play:
            (folder,) = repository.folders()
            if job["point"] == where and moment == "before and undone":
                (root / MODULE).write_text("RATE = 1\n", encoding="utf-8")
            if job["point"] == where and moment in ("copy", "checkout"):
                changed = folder / "sources" / MODULE if moment == "copy" else root / MODULE
                changed.write_text("RATE = 2\n", encoding="utf-8")
            if job["point"] == where and moment == "package":
                library.write_text("2", encoding="utf-8")
            given = {str(library): sha256_of_bytes(library.read_bytes())}
            written = (str(library),) if moment == "package" and job["point"] == where else ()
            loaded = LoadedFiles(host="node-0", began=1.0, ended=2.0, files=given, written=written)
            file = folder / "points" / job["point"] / "loaded" / "0.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(loaded.model_dump_json(), encoding="utf-8")
            return repository.play(job)

        repository.script.play = played
        repository.invoke()
        revision = repository.record().record.revision
        planted = f"trial {trial}: {moment}, {what}, {where}"
        assert (revision.changes_sha256 is not None) == ("before" in moment), planted
        assert bool(revision.changed) == (moment in ("copy", "package")), planted


@pytest.mark.parametrize("answer", ["exit 1", "echo fatal: a lock >&2; exit 128"])
def test_a_git_that_fails_is_no_clean_commit(
    repository: FlowSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    (tmp_path / "bin").mkdir()
    played = tmp_path / "bin" / "git"
    played.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    played.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    repository.invoke()
    revision = repository.record().record.revision
    assert (revision.commit, revision.is_clean) == (None, False)
    assert "git rev-parse" in str(revision.unknown)
    assert any(one.startswith("it is unknown whether") for one in repository.record().doubts)


def test_outside_a_checkout_there_is_no_commit(trained: FlowSite) -> None:
    trained.invoke()
    revision = trained.record().record.revision
    assert (revision.commit, revision.unknown) == (None, None)
    assert revision.tree


def test_a_run_goes_on_with_the_sources_that_it_was_begun_with(repository: FlowSite) -> None:
    root, first = repository.root, git(repository.root, "rev-parse", "HEAD")

    def stopped(job: Job) -> Play:
        return dataclasses.replace(repository.play(job), result=None, interrupted=KeyboardInterrupt())

    repository.script.play = stopped
    with pytest.raises(RunInterruptedError):
        repository.invoke()
    (root / MODULE).write_text("RATE = 2\n", encoding="utf-8")
    git(root, "commit", "-qam", "B")
    second = git(root, "rev-parse", "HEAD")
    repository.script.play = repository.play
    with pytest.raises(InputError, match="the run was begun with other sources") as refused:
        repository.invoke(resume=True)
    assert first in str(refused.value.allowed)
    assert second in str(refused.value.found)
    assert str(MODULE) in str(refused.value.found)
    git(root, "checkout", "-q", first)
    repository.invoke(resume=True)
    assert repository.record().record.revision.commit == first
