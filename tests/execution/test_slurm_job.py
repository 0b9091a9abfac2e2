"""A job followed through what Slurm says of it, also where Slurm falls silent; a script plays it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.execution.placements import SITE
from twinrun.execution.engine import NodeCommand
from twinrun.execution.schedulers import Submission, client_of, load_scheduler
from twinrun.execution.task import Task
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.manifests.cluster import LoadedSite

# Prints the file that is called like the command, or like what it is to show.
PLAYED = """
import pathlib, sys
_, command, *arguments = sys.argv
answer = pathlib.Path(__file__).with_name(arguments[1] if command == "scontrol" else command)
if not answer.exists():
    sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
print(answer.read_text())
"""
STATE = (
    "JobId=12 JobName=twinrun-nodes=2 UserId=alice(1000) JobState={state} Reason=None Restarts={restarts} "
    "ExitCode={code}:0 RunTime=00:00:10 TimeLimit=01:00:00 NodeList=node[1-2] StdOut=/shared/log\n"
)
SECONDS = 20
Say = Callable[..., None]


@pytest.fixture
def say(tmp_path: Path) -> Say:
    """Return what makes Slurm say a state of the job, or nothing any more."""
    (tmp_path / "sbatch").write_text("12;cluster\n")
    (tmp_path / "scancel").write_text("")
    (tmp_path / "sinfo").write_text("node2 Not responding\n")

    def says(state: str | None, *, restarts: int = 0, code: int = 0) -> None:
        answer = tmp_path / "job"
        answer.unlink(missing_ok=True)
        if state:
            answer.write_text(STATE.format(state=state, restarts=restarts, code=code))

    return says


@pytest.fixture
def site(tmp_path: Path) -> LoadedSite:
    played = tmp_path / "played.py"
    played.write_text(PLAYED)
    keys = {"client": (sys.executable, str(played)), "shared": (str(tmp_path),), "poll_seconds": 0.01}
    return SITE.model_copy(update={"site": SITE.site.model_copy(update=keys)})


@pytest.fixture
def job(site: LoadedSite, say: Say, tmp_path: Path) -> Submission:
    say("RUNNING")
    command = NodeCommand(arguments=("true",), variables={}, folder=tmp_path)
    task = Task(point="nodes=2", nodes=2, ranks_per_node=8, commands=(command,))
    scheduler = load_scheduler("slurm", site=site)
    made = scheduler.submit(
        task, run=tmp_path / "run", logs=tmp_path / "run" / "log", start=lambda *_: pytest.fail("here")
    )
    assert made.poll() is None
    return made


def ended(job: Submission) -> int:
    deadline = time.monotonic() + SECONDS
    while (status := job.poll()) is None:
        assert time.monotonic() < deadline
    return status


def test_a_slurm_that_is_gone_in_the_middle_of_a_run_is_told(
    job: Submission, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinrun.execution.batch.PATIENCE_SECONDS", 0.5)
    say(None)
    with pytest.raises(RunError, match="Slurm has not answered") as caught:
        ended(job)
    assert "Unable to contact slurm controller" in str(caught.value)
    assert "job 12 may still run" in str(caught.value)
    assert caught.value.exit_code == 4
    job.cancel()


def test_a_slurm_that_starts_again_is_waited_for(job: Submission, say: Say) -> None:
    say(None)
    for _ in range(3):
        assert job.poll() is None
    say("COMPLETED")
    assert ended(job) == 0


def test_a_job_that_is_requeued_is_followed_to_its_end(job: Submission, say: Say) -> None:
    for state in ("COMPLETING", "PENDING", "RUNNING"):
        say(state, restarts=1)
        for _ in range(3):
            assert job.poll() is None
    say("COMPLETED", restarts=1)
    assert ended(job) == 0


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "TIMEOUT"])
def test_a_job_that_somebody_ended_can_go_on(job: Submission, say: Say, state: str) -> None:
    say(state, code=1)
    with pytest.raises(RunInterruptedError, match=f"job 12 was ended: {state}"):
        ended(job)


def test_a_node_that_is_lost_is_named(job: Submission, say: Say) -> None:
    say("NODE_FAIL", code=1)
    with pytest.raises(RunError, match="job 12 lost a node") as caught:
        ended(job)
    assert "node2 Not responding" in str(caught.value)


# As Slurm and munge print them.
DISTRUST = (
    "sbatch: error: Batch job submission failed: Protocol authentication error",
    "slurm_load_partitions: error: Munge decode failed: Invalid credential",
    'error: Munge encode failed: Failed to access "/run/munge/munge.socket.2": No such file or directory',
)


@pytest.mark.parametrize("text", DISTRUST)
def test_a_machine_with_another_key_of_munge_is_told_so(tmp_path: Path, text: str) -> None:
    refuses = (sys.executable, "-c", f"import sys; sys.exit({text!r})")
    keys = {"client": refuses, "shared": (str(tmp_path),)}
    scheduler = load_scheduler(
        "slurm", site=SITE.model_copy(update={"site": SITE.site.model_copy(update=keys)})
    )
    command = NodeCommand(arguments=("true",), variables={}, folder=tmp_path)
    task = Task(point="nodes=2", nodes=2, ranks_per_node=8, commands=(command,))
    for ask in (
        lambda: scheduler.unusable(nodes=2),
        lambda: scheduler.submit(
            task, run=tmp_path, logs=tmp_path / "log", start=lambda *_: pytest.fail("here")
        ),
    ):
        with pytest.raises(MachineError, match="does not accept the credentials of this machine") as caught:
            ask()
        assert caught.value.exit_code == 3
        assert text in str(caught.value)
        assert "the controller's key" in str(caught.value)


def test_a_client_that_is_not_there_is_the_machines_fault(site: LoadedSite) -> None:
    gone = site.model_copy(update={"site": site.site.model_copy(update={"client": ("/no/such/program",)})})
    with pytest.raises(MachineError, match="cannot start") as caught:
        client_of(gone).jobs()
    assert f"{SITE.place}.client" in str(caught.value)


def test_a_site_of_another_scheduler_is_not_asked(site: LoadedSite) -> None:
    other = site.model_copy(update={"site": site.site.model_copy(update={"scheduler": "local"})})
    with pytest.raises(InputError, match="this machine is no site"):
        client_of(other)
