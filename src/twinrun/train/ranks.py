"""The ranks of a job: their process group, what all of them must know, and being told to end.

One rank needs no group.
"""

from __future__ import annotations

import datetime
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.protocol.job import Job
from twinrun.train.job_files import rank_variable


def check_world_size(job: Job) -> None:
    """Raise InputError unless the launcher started as many ranks as the job has."""
    started = rank_variable("WORLD_SIZE", 1)
    if started != job.world_size:
        raise InputError("wrong number of ranks", place=job.point, found=started, allowed=job.world_size)


def join(job: Job, *, alone: bool = False, timeout: float | None = None) -> None:
    """Join the other ranks, over Gloo on CPUs; the current device is this rank's already.

    Args:
        alone: make a group of a single rank too, as FSDP needs.
        timeout: seconds after which a collective fails; None for what PyTorch has for the backend.

    Raises:
        InputError: the launcher started another number of ranks than the job has.
    """
    check_world_size(job)
    if (job.world_size > 1 or alone) and not dist.is_initialized():
        # The launcher's store may have met other points of the same ranks: each has names of its own there.
        store, number, ranks = next(iter(dist.rendezvous("env://")))
        dist.init_process_group(
            "nccl" if job.accelerator else "gloo",
            store=dist.PrefixStore(job.attempt, store),
            rank=number,
            world_size=ranks,
            timeout=None if timeout is None else datetime.timedelta(seconds=timeout),
        )


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


_signals: list[int] = []


class TrainingStoppedError(Exception):
    """All ranks have saved what they did, and end."""

    def __init__(self, step: int) -> None:
        super().__init__(f"saved after step {step}")
        self.step = step


def listen_for_stop() -> None:
    """Take SIGTERM, which schedulers send before they kill, as a request; for a run that can save."""
    signal.signal(signal.SIGTERM, _note)


def stop_wanted() -> bool:
    """Say whether this rank was told to end."""
    return bool(_signals)


def _note(number: int, _frame: FrameType | None) -> None:
    _signals.append(number)


def together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Do `work` on the first rank; return its result, or raise its TwinrunError, on all.

    Args:
        group: all ranks, None where there is one.
    """
    found: list[Any] = [None, None]
    if rank() == 0:
        try:
            found[0] = work()
        except TwinrunError as error:
            found[1] = error
    if group is not None:
        dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise found[1]
    return found[0]


def everyone() -> dist.ProcessGroup | None:
    """Return the group of all ranks, None where there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def from_first(value: Any) -> Any:
    """Return what the first rank has for `value`, on all."""
    found = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def first_fault(fault: str | None, group: dist.ProcessGroup | None) -> str | None:
    """Return the fault of the lowest rank that has one."""
    found: list[str | None] = [fault]
    if group is not None:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, fault, group=group)
    return next((one for one in found if one is not None), None)
