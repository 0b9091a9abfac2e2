"""The process group of a job's ranks; one rank needs none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from twinrun.foundation.errors import InputError
from twinrun.protocol.job import Job
from twinrun.train.job_files import rank_variable


def check_world_size(job: Job) -> None:
    """Raise InputError unless the launcher started as many ranks as the job has."""
    started = rank_variable("WORLD_SIZE", 1)
    if started != job.world_size:
        raise InputError("wrong number of ranks", place=job.point, found=started, allowed=job.world_size)


def join(job: Job, *, alone: bool = False) -> None:
    """Join the other ranks, over Gloo on CPUs; the current device is this rank's already.

    Args:
        alone: make a group of a single rank too, as FSDP needs.

    Raises:
        InputError: the launcher started another number of ranks than the job has.
    """
    check_world_size(job)
    if (job.world_size > 1 or alone) and not dist.is_initialized():
        dist.init_process_group("nccl" if job.accelerator else "gloo")


def rank() -> int:
    """Return the number of this rank, before it has joined the others too."""
    return rank_variable("RANK", 0)


def wait() -> None:
    """Wait until every rank has come here."""
    if dist.is_initialized():
        dist.barrier()


def largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of the ranks' values, place by place."""
    over_ranks = torch.tensor(values, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX)
    found: list[float] = over_ranks.tolist()
    return found
