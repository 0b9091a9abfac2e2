"""Ranks that are preempted, killed, halted or cut off: who is named, what is left, and what goes on."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("streaming")

from tests.execution.clusters import ROOT, changed, container, docker, processes, until
from tests.execution.placements import PlacementStandIn, commands_of
from tests.train.small import MakeJob
from twinrun.execution.engine import Workspace, point_folder
from twinrun.execution.engines import Interpreter
from twinrun.execution.failures import rank_states
from twinrun.execution.ranks import METRICS, Launch, Ranks
from twinrun.foundation.errors import RunError, RunInterruptedError
from twinrun.images import local_cluster
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.training import TrainingJob

pytestmark = pytest.mark.cluster

# One of each for every change, five by night.
TRIALS = [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(1, 5))]
WATCHDOG_SECONDS = 10.0
STEPS, PLANTED_AT = 30, 8
# Ranks wait there, alive, until the fault is planted: a machine that is slow to plant it loses no race.
HELD_AT = PLANTED_AT + 2
NODES = ("worker1", "worker2")
POINT = PlacementStandIn(id="nodes=2", nodes=2)
SCRIPT = "fault_ranks.py"
# Ranks, but not what has started them.
RANK = rf"^[^ ]*python[^ ]* (-u )?[^ ]*/{SCRIPT}"
Fault = Callable[[], object]


@dataclass
class Trial:
    """A run on two nodes, into which a fault is planted at a step."""

    site: LoadedSite
    run: Path
    job: TrainingJob
    launcher: str = "srun"

    def losses(self, fault: Fault | None = None, *, tells: bool = False) -> list[float]:
        """Run to the end and return the loss of each step.

        Args:
            tells: the fault is that ranks are told to end; they are held until that has reached each of them.
        """
        planted: list[bool] = []
        if fault is None:
            self._let_go()

        def show(line: bytes) -> None:
            if fault and not planted and json.loads(line)["step"] >= PLANTED_AT:
                planted.append(True)
                fault()
                if not tells:
                    self._let_go()

        script = ROOT / "tests" / "execution" / SCRIPT
        assert self._ranks().run(Launch(placement=POINT, script=script, job=self.job), show=show)
        assert bool(fault) == bool(planted)
        lines = [json.loads(line) for line in (self.run / METRICS).read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        return [line["loss"] for line in lines]

    @property
    def ranks(self) -> str:
        """What fits the command lines of the ranks of this trial and of what watches them."""
        return f"{RANK}.*{re.escape(str(self.run))}/"

    def pid(self, rank: int) -> str:
        return str(rank_states(point_folder(self.run, POINT.id))[rank].pid)

    def _let_go(self) -> None:
        self.run.mkdir(exist_ok=True)
        (self.run / "released").touch()

    def _ranks(self) -> Ranks:
        workspace = Workspace(root=ROOT, run=self.run, data=self.run, packages=(ROOT,))
        engine = Interpreter(python=sys.executable, workspace=workspace)
        told = {"STEP_SECONDS": "0.2", "HOLD_STEP": str(HELD_AT), "HOLD_UNTIL": str(self.run / "released")}
        return commands_of(engine, workspace, launcher=self.launcher, site=self.site, **told)


Start = Callable[..., Trial]


@pytest.fixture(scope="module")
def start(site: LoadedSite, folder: Path, make_job: MakeJob) -> Start:
    """Return what makes a trial of its own, with or without Slurm starting it again."""
    made = make_job(world_size=2, steps=STEPS)
    shutil.copytree(made.data, folder / "data")

    def of(name: str, *, launcher: str = "srun", **keys: object) -> Trial:
        keys = {"watchdog_seconds": WATCHDOG_SECONDS, "qos": "low", **keys}
        run = folder / name
        saving = Checkpointing(place=str(run / "saved"), steps=STEPS)
        fields: dict[str, object] = {"out": str(point_folder(run, POINT.id)), "point": POINT.id}
        fields |= {"metrics": str(run / METRICS), "data": str(folder / "data")}
        fields |= {"watchdog_seconds": WATCHDOG_SECONDS, "checkpointing": saving}
        return Trial(
            site=changed(site, **keys), run=run, job=made.model_copy(update=fields), launcher=launcher
        )

    return of


@pytest.fixture(scope="module")
def undisturbed(start: Start) -> list[float]:
    """The loss of each step where nothing happens."""
    return start("undisturbed").losses()


def alive(pattern: str) -> bool:
    """Say whether any process fits; those of containers are this machine's too, and asked in no time."""
    done = subprocess.run(["pgrep", "--full", pattern], stdout=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def asked(site: LoadedSite, *words: str) -> list[str]:
    """Return what a command of Slurm prints, in words."""
    command = [*site.site.client, words[0], "--noheader", *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


def fails(trial: Trial, fault: Fault) -> str:
    """Plant a fault that ends the run; return what is said of it, once nothing is left."""

    def plant() -> None:
        assert alive(trial.ranks)
        fault()

    with pytest.raises(RunError) as caught:
        trial.losses(plant)
    until(lambda: not alive(trial.ranks))
    assert caught.value.exit_code == 4
    return str(caught.value)


def goes_on(trial: Trial, undisturbed: list[float]) -> None:
    """Wait until nothing is left and all nodes are there, and run the point again as `--resume` does."""
    idle = ("sinfo", "--Node", "--states=idle", "--format=%N")
    until(lambda: set(asked(trial.site, *idle)) == set(NODES) and not asked(trial.site, "squeue"), pause=1)
    assert not any(processes(node, RANK) for node in NODES)
    assert trial.losses() == undisturbed


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_what_is_preempted_goes_on_by_itself(
    start: Start, undisturbed: list[float], launcher: str, trial: int
) -> None:
    run = start(f"preempted-{launcher}-{trial}", launcher=launcher, requeue=True)
    urgent = ("--qos=high", "--account=research", "--nodes=2", "--ntasks-per-node=2", "--gres=slot:2")
    command = [*run.site.site.client, "sbatch", *urgent, "--output=/dev/null", "--wrap=true"]
    found = run.losses(lambda: subprocess.run(command, check=True, capture_output=True), tells=True)
    assert found == undisturbed
    saved = sorted(path.name for path in (run.run / "saved").glob("step-*"))
    assert len(saved) == 2, "saved when it was told to end, and at the end"
    assert saved[-1] == f"step-{STEPS:08d}"
    sys.stdout.write(f"preempted-{launcher}-{trial}: saved {saved[0]}, {STEPS} losses equal\n")


def test_a_time_limit_that_nears_stops_at_a_step_that_is_saved(
    start: Start, undisturbed: list[float]
) -> None:
    """As Slurm signals the steps of a job `signal_seconds` before its end."""
    run = start("limit")
    end = ("scancel", "--signal=TERM", "--name=twinrun-nodes=2")
    with pytest.raises(RunInterruptedError, match=r"told to end and have saved after step \d+") as caught:
        run.losses(lambda: subprocess.run([*run.site.site.client, *end], check=True), tells=True)
    assert caught.value.exit_code == 5
    goes_on(run, undisturbed)


def on_worker2(*words: str) -> Callable[[str], None]:
    return lambda pid: docker("exec", container("worker2"), *words, pid)


def nothing() -> None:
    """Mend nothing."""


def connected() -> None:
    with contextlib.suppress(subprocess.CalledProcessError):
        docker("network", "connect", local_cluster.NAME, container("worker2"))


# What is done to the second rank's process or node, how it is mended, and what is said of it.
FAULTS: dict[str, tuple[Callable[[str], None], Callable[[], None], str]] = {
    "rank-killed": (
        on_worker2("kill", "-KILL"),
        nothing,
        r"rank 1 of 2 failed with signal 9\n.*worker2, pid {pid}, at step \d+: \w",
    ),
    "halted": (
        on_worker2("kill", "-STOP"),
        nothing,
        r"no progress for 10 s and were killed[^~]*rank 1 on worker2, pid {pid}, .*; its process was stopped",
    ),
    "node-killed": (
        lambda _pid: docker("kill", container("worker2")),
        lambda: docker("start", container("worker2")),
        r"rank 1 on worker2, pid {pid}, at step \d+: \w",
    ),
    "cut-off": (
        lambda _pid: docker("network", "disconnect", local_cluster.NAME, container("worker2")),
        connected,
        r"rank 1 on worker2, pid {pid}, at step \d+: \w",
    ),
}


@pytest.mark.parametrize("trial", TRIALS)
@pytest.mark.parametrize("name", FAULTS)
def test_who_fails_is_named_and_the_point_goes_on(
    start: Start, undisturbed: list[float], name: str, trial: int
) -> None:
    run, (plant, mend, expected) = start(f"{name}-{trial}"), FAULTS[name]
    pid: list[str] = []

    def fault() -> None:
        pid.append(run.pid(1))
        plant(*pid)

    try:
        said = fails(run, fault)
    finally:
        mend()
    assert re.search(expected.replace("{pid}", pid[0]), said), said
    goes_on(run, undisturbed)
