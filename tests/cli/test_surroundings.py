"""Runs without locks of a file system, with clocks that are set, and with passwords in remotes and paths."""

from __future__ import annotations

import datetime
import errno
import fcntl
import subprocess

import pytest

from tests.cli.flow_sites import REFUSED, FlowSite
from twinrun.foundation.errors import MachineError
from twinrun.planning.project import Project
from twinrun.results.reading import read_record


def test_a_file_system_without_locks_is_named_before_anything_starts(
    trained: FlowSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    trained.script.play = lambda job: pytest.fail("started")
    with pytest.raises(MachineError, match="the file system has no locks") as refused:
        trained.invoke()
    assert refused.value.found == "No locks available"
    assert "--out" in str(refused.value.hint)


@pytest.mark.parametrize("days", [-400, -1, 400], ids=["back", "a day back", "on"])
def test_a_clock_that_is_set_between_two_runs_loses_none(
    trained: FlowSite, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    assert trained.invoke() == 0
    other = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)

    class Set(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Set:
            return cls.fromtimestamp(other.timestamp(), tz)

    monkeypatch.setattr("twinrun.runs.run.datetime.datetime", Set)
    trained.script.opening = REFUSED
    with pytest.raises(MachineError):
        trained.invoke()
    trained.script.opening = None
    assert trained.invoke(resume=True) == 0
    records = [read_record(one / "record.json", Project(trained.root)) for one in trained.folders()]
    assert len({one.run for one in records}) == 2
    times = [point.measurement("step-time") for one in records for point in one.points]
    assert {one and one.median for one in times} == {0.5}


def test_no_password_of_a_remote_or_a_path_gets_into_what_a_run_leaves(
    trained: FlowSite, capsys: pytest.CaptureFixture[str]
) -> None:
    """A remote may carry a token, as hosts of repositories tell their users to clone, and a path too."""
    address = "https://user:glpat-remote0123456789@example.com/project.git"
    for arguments in (
        ("init", "--quiet"),
        ("remote", "add", "origin", address),
        ("add", "recipes"),
        ("-c", "user.name=t", "-c", "user.email=t@t", "commit", "--quiet", "--message", "all"),
    ):
        subprocess.run(["git", *arguments], cwd=trained.root, check=True)
    trained.out = trained.out / "ghp_path0123456789abcdef"
    assert trained.invoke() == 0
    (folder,) = trained.folders()
    said = capsys.readouterr()
    texts = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert trained.record().record.revision.commit
    for name, text in texts.items():
        assert b"glpat-remote" not in text, name
    # What ranks read in the run folder has to name it; what is kept and sent does not.
    for name in ("record.json", "plan.json", "metrics.jsonl", "report.html"):
        assert b"ghp_path" not in texts[name], name
    assert "glpat-remote" not in said.out + said.err
