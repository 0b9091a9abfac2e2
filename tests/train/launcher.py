"""A launcher of one node, forked where torch is imported already: starts ranks and waits for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch

from tests.train import checkpoint_run
from twinrun.protocol.job import Result
from twinrun.protocol.training import TrainingJob
from twinrun.train import rank as process
from twinrun.train.corpus import read_corpus


def train(job: TrainingJob) -> Result:
    torch.set_num_threads(1)
    checkpoint_run.train(job, read_corpus(Path(job.data)))
    return Result(point=job.point, device_name="cpu", libraries={})


def launch(job_file: str, log: str, variables: dict[str, str], ranks: int) -> NoReturn:
    """Start the ranks, each as `rank.run` frames it, and end as they do."""
    os.environ.update(variables)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    for rank in range(ranks):
        if os.fork() == 0:
            os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
            sys.argv = ["ranks", "--job", job_file]
            process.run(train, TrainingJob)
            os._exit(0)
    statuses = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(ranks)]
    os._exit(1 if any(statuses) else 0)
