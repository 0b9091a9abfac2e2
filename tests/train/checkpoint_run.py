"""A small training run in torch alone, for tests that kill it; each rank is a process of its own.

What goes wrong, and when, is said by variables of the environment: KILL_RANK with KILL_STEP, the step before
which a rank dies, with TOLD_STEP, the one in which it is told to end, or with KILL_CALL, the system call of
its saves at which it dies. STEP_SECONDS slows steps down. In HOLD_STEP ranks that began at step 0 go on
living, and no further, until the file HOLD_UNTIL is there or they are told to end: who plants a fault has all
the time for it. Ranks that resume may have been told before that step, and nobody would let them go.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from twinrun.foundation.errors import TwinrunError
from twinrun.protocol.job import STOPPED
from twinrun.protocol.training import TrainingJob
from twinrun.train import rank, ranks
from twinrun.train.building import adamw, learning_rate, set_learning_rate
from twinrun.train.checkpoint.session import checkpoints_of
from twinrun.train.checkpoint.state import InPlaceState
from twinrun.train.corpus import Corpus, read_corpus
from twinrun.train.data_parallel import gradient_excess
from twinrun.train.metrics import Meter

WIDTH = 8


def train(job: TrainingJob, corpus: Corpus) -> list[float]:
    """Train on samples that follow from step and rank; return the losses."""
    ranks.join(job)
    torch.manual_seed(job.training.seed)
    model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
    called, excess = shared(job, model)
    optimizer = adamw(model, job.training.optimizer)
    meter = Meter(job, torch.device("cpu"))
    saves = checkpoints_of(job, corpus=corpus, parts=lambda: InPlaceState(model, optimizer), meter=meter)
    done = saves.resume()
    if done and job.sharding == "none" and job.world_size > 1:
        called(batch(job, 0)).sum().backward()
        optimizer.zero_grad(set_to_none=True)
    meter.start()
    for step in range(done, job.training.steps):
        if step == int(os.environ.get("KILL_STEP", "-1")) and is_doomed():
            os.kill(os.getpid(), signal.SIGKILL)
        if step == int(os.environ.get("TOLD_STEP", "-1")) and is_doomed():
            os.kill(os.getpid(), signal.SIGTERM)
        rate = learning_rate(step, job.training.optimizer, step_tokens=job.step_tokens)
        set_learning_rate(optimizer, rate)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        if not done and step == int(os.environ.get("HOLD_STEP", "-1")):
            hold(Path(os.environ["HOLD_UNTIL"]))
        samples = batch(job, step)
        meter.add_samples(torch.tensor([step * 1000 + rank.number()]))
        loss = loss_of(called, samples)
        meter.add_loss(loss, len(samples))
        (loss / excess).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.end_step()
        saves.after_step(step + 1)
    saves.wait()
    return [step.loss for step in meter.steps]


def loss_of(model: Callable[[Tensor], Tensor], samples: Tensor) -> Tensor:
    return (model(samples) - samples.roll(1, dims=1)).square().mean()


def shared(job: TrainingJob, model: nn.Module) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return the model as its ranks call it, and how many times too large its gradients are."""
    if job.world_size == 1:
        return model, 1.0
    if job.sharding == "none":
        return nn.parallel.DistributedDataParallel(model), 1.0
    excess = gradient_excess(torch.device("cpu"))
    fully_shard(model)
    return model, excess


def batch(job: TrainingJob, step: int) -> Tensor:
    """Return this rank's part of the global batch of a step, the same at every number of ranks."""
    draw = torch.Generator().manual_seed(job.training.seed + step)
    whole = torch.randn(job.training.global_batch, WIDTH, generator=draw)
    return whole.chunk(job.world_size)[rank.number()]


def hold(until: Path) -> None:
    while not until.exists() and not rank.stop_wanted():
        # As a reader that is slow but not stuck; the watchdog knows by now how long that takes.
        rank.beat("reads its samples")
        time.sleep(0.05)


def is_doomed() -> bool:
    return rank.number() == int(os.environ.get("KILL_RANK", "-1"))


def die_at_call(number: int) -> None:
    """Kill this process at the `number`-th system call that changes a file's state on the disk."""
    calls = itertools.count(1)

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            path = str(arguments[0]) if arguments else ""
            if not path.startswith("/dev") and next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def run_rank(job_file: str, log: str, variables: dict[str, str]) -> None:
    """Be one rank of a job: what a forked process does."""
    os.environ.update(variables)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    job = TrainingJob.model_validate_json(Path(job_file).read_text())
    corpus = read_corpus(Path(job.data))
    if is_doomed() and "KILL_CALL" in os.environ:
        die_at_call(int(os.environ["KILL_CALL"]))
    if limit := int(os.environ.get("FILE_BYTES", "0")):
        # The limit holds for the log too: a message before the save would end the rank.
        sys.stderr = io.StringIO()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        losses = train(job, corpus)
    except TwinrunError as error:
        # The log is no file of a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.write(2, f"{error}\n".encode())
        os._exit(error.exit_code)
    except rank.StoppedError:
        os._exit(STOPPED)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        os._exit(1)
    if rank.number() == 0:
        Path(job.out, "losses.json").write_text(json.dumps([loss.hex() for loss in losses]))
    os._exit(0)
