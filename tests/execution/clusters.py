"""A cluster of containers for tests, and what they do to its nodes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from twinrun.execution.engine import NodeCommand
from twinrun.execution.job_script import Task
from twinrun.execution.schedulers import Submission, load_scheduler
from twinrun.foundation.errors import TwinrunError
from twinrun.images import local_cluster
from twinrun.manifests.cluster import LoadedSite, load_site

ROOT = Path(__file__).resolve().parents[2]
# So long is waited for what comes: a machine with other work on it is no failure.
SECONDS = 600


@contextlib.contextmanager
def cluster(*, nodes: int, folder: Path) -> Iterator[LoadedSite]:
    """Yield the site of a cluster whose nodes see `folder`; nothing of it is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TWINRUN_CLUSTER", raising=False)
        try:
            found = local_cluster.up(ROOT, nodes=nodes, mounts=(folder,), say=print)
            workers = [(name, "idle") for name in local_cluster.node_names(nodes)]
            assert [(one.name, one.slurm) for one in found] == [
                ("controller", "answers"),
                *workers,
                ("worker0", "drained"),
            ]
            yield load_site(ROOT, "local")
        finally:
            local_cluster.down()
    assert local_cluster.status() == ()


def changed(site: LoadedSite, **keys: object) -> LoadedSite:
    return site.model_copy(update={"site": site.site.model_copy(update=keys)})


def until(reached: Callable[[], object], *, pause: float = 0.2) -> float:
    """Wait until `reached()` and return the seconds that took."""
    start = time.monotonic()
    while not reached():
        assert time.monotonic() - start < SECONDS
        time.sleep(pause)
    return time.monotonic() - start


def program(text: str, *words: str) -> NodeCommand:
    """Return the command that runs a Python program on a node."""
    return NodeCommand(arguments=(sys.executable, "-c", text, *words), variables={}, folder=Path("/"))


def handed(site: LoadedSite, run: Path, command: NodeCommand) -> Submission:
    """Return the job of two nodes that run a command."""
    task = Task(
        point="nodes=2", nodes=2, ranks_per_node=1, cores_per_rank=site.site.rank_cores, commands=(command,)
    )
    (run / "log").mkdir(parents=True, exist_ok=True)
    scheduler = load_scheduler(site.site.scheduler, site=site)
    return scheduler.submit(task, run=run, logs=run / "log", start=lambda one, log: pytest.fail("here"))


def ended(job: Submission) -> TwinrunError | int:
    """Return how a job ends."""
    found: list[TwinrunError | int] = []

    def over() -> bool:
        try:
            status = job.poll()
        except TwinrunError as error:
            found.append(error)
        else:
            found.extend([] if status is None else [status])
        return bool(found)

    until(over)
    return found[0]


def trained(folder: Path, site: str, engine: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a training of four steps on two nodes."""
    sets = [word for pair in ("steps=4", "warmup_steps=1", "nodes=2") for word in ("--set", pair)]
    given = ["--cluster", site, "--engine", engine, "--out", str(folder), "--json", *options, *sets]
    command = [sys.executable, "-m", "twinrun", "run", "recipes/mpt7b-scaling", *given]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=SECONDS)


def docker(*words: str) -> None:
    subprocess.run(["docker", *words], check=True, capture_output=True)


def container(node: str) -> str:
    return f"{local_cluster.NAME}-{node}"


def processes(node: str, pattern: str) -> list[str]:
    """Return the processes of a node whose command line fits; none of a node that is dead."""
    command = ["docker", "exec", container(node), "pgrep", "--full", pattern]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
