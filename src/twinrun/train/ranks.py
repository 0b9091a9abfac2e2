"""The ranks of a job: their process group, and what all of them must know.

One rank needs no group.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from twinrun.foundation.errors import TwinrunError
from twinrun.protocol.job import Job
from twinrun.train import rank


def join(job: Job, *, alone: bool = False, timeout: float | None = None) -> None:
    """Join the other ranks, over Gloo on CPUs; the current device is this rank's already.

    Args:
        alone: make a group of a single rank too, as FSDP needs.
        timeout: seconds after which a collective fails; None for what PyTorch has for the backend.

    Raises:
        InputError: the launcher started another number of ranks than the job has.
    """
    rank.demand_world_size(job)
    if (job.world_size > 1 or alone) and not dist.is_initialized():
        # A launcher's store may have met an earlier start of the ranks: each has names of its own there.
        store, place, size = next(iter(dist.rendezvous("env://")))
        backend, own = "nccl" if job.accelerator else "gloo", dist.PrefixStore(job.attempt, store)
        limit = None if timeout is None else datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=own, rank=place, world_size=size, timeout=limit)


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


def each(work: Callable[[], Any], group: dist.ProcessGroup | None) -> list[Any]:
    """Do `work` on every rank; return the results of all, or raise the error of one of them on all.

    Args:
        group: all ranks, None where there is one.
    """
    found = [_outcome(work)]
    if group is not None:
        mine, found = found[0], found * dist.get_world_size()
        dist.all_gather_object(found, mine, group=group)
    errors = [error for _, error in found if error]
    if errors:
        raise next((one for one in errors if isinstance(one, TwinrunError)), errors[0])
    return [result for result, _ in found]


def together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Do `work` on the first rank; return its result, or raise its error, on all."""
    found = [_outcome(work) if rank.number() == 0 else (None, None)]
    if group is not None:
        dist.broadcast_object_list(found, src=0, group=group)
    ((result, error),) = found
    if error:
        raise error
    return result


def _outcome(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def everyone() -> dist.ProcessGroup | None:
    """Return the group of all ranks, None where there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


def from_first(value: Any) -> Any:
    """Return what the first rank has for `value`, on all."""
    return together(lambda: value, everyone())
