"""Jobs that save, and how tests start their ranks: forked where torch is imported already."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import environment
from tests.train.checkpoint_run import run_rank
from tests.train.small import ROOT
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.parts import read_part
from twinrun.checkpoints.verification import verify
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.training import TrainingJob

# After one rank died, the others end by themselves or are killed, as by a launcher.
PATIENCE_SECONDS = 2
# What a run measures of itself; no two runs agree.
MEASURED = ("history.seconds", "history.timed", "history.watts", "history.blocked")


def saving(job: TrainingJob, place: Path | str, **settings: object) -> TrainingJob:
    """Return `job` with a checkpoint every two steps."""
    checkpointing = Checkpointing.model_validate({"place": str(place), "steps": 2} | settings)
    return job.model_copy(update={"checkpointing": checkpointing})


@dataclass(frozen=True)
class Ended:
    """How a run ended: the status of each rank, what they said, and the losses if it came to its end."""

    statuses: tuple[int, ...]
    said: str
    losses: list[str]


def start(job: TrainingJob, **variables: object) -> Ended:
    """Run the ranks of `job`; when one dies the others are killed, as a launcher does."""
    out = Path(job.out)
    (out / "losses.json").unlink(missing_ok=True)
    (out / "job.json").write_text(job.model_dump_json())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.checkpoint_run"])
    shared = {name: str(value) for name, value in variables.items()}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(job.world_size)}
    with rank_environment():
        processes = [
            context.Process(
                target=run_rank,
                args=(str(out / "job.json"), str(out / f"rank-{rank}.log"), shared | {"RANK": str(rank)}),
            )
            for rank in range(job.world_size)
        ]
        for process in processes:
            process.start()
    while living := [one.sentinel for one in processes if one.exitcode is None]:
        multiprocessing.connection.wait(living)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.join(PATIENCE_SECONDS)
                process.kill()
                process.join()
    said = "".join((out / f"rank-{rank}.log").read_text() for rank in range(job.world_size))
    file = out / "losses.json"
    losses = json.loads(file.read_text()) if file.exists() else []
    return Ended(tuple(process.exitcode or 0 for process in processes), said, losses)


@contextlib.contextmanager
def rank_environment() -> Iterator[None]:
    """Let the process that forks ranks find what they import, and use one thread each."""
    before = dict(os.environ)
    os.environ.update(environment())
    os.environ["PYTHONPATH"] += f":{ROOT}"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def digests(place: Path, step: int) -> dict[str, list[str]]:
    """Return the digests of all that a step's checkpoint holds, but for what a run measured."""
    store = FolderStore(place)
    manifest = verify(store, step)
    parts = [read_part(store, manifest, number) for number in range(len(manifest.parts))]
    return {
        name: [chunk.sha256 for part in parts for chunk in part.tensors.get(name, ())]
        for name in sorted(manifest.tensors.keys() - set(MEASURED))
    }
