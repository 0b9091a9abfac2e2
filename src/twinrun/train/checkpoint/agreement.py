"""What ranks do or find alone, made known to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from twinrun.foundation.errors import TwinrunError
from twinrun.train import ranks


def together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Do `work` on the first rank; return its result, or raise its TwinrunError, on all.

    Args:
        group: all ranks, None where there is one.
    """
    found: list[Any] = [None, None]
    if ranks.rank() == 0:
        try:
            found[0] = work()
        except TwinrunError as error:
            found[1] = error
    if group is not None:
        dist.broadcast_object_list(found, src=0, group=group)
    if found[1] is not None:
        raise found[1]
    return found[0]


def first(fault: str | None, group: dist.ProcessGroup | None) -> str | None:
    """Return the fault of the lowest rank that has one."""
    found: list[str | None] = [fault]
    if group is not None:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, fault, group=group)
    return next((one for one in found if one is not None), None)
