"""What every job tells the ranks of a point, and what every result tells the host."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models.shape import Positive

# Exit status of a rank whose device ran out of memory; the host then tries what needs less.
OUT_OF_MEMORY = 77


class Checkpointing(Frozen):
    """Where the ranks save the state of a point, and from what they go on."""

    place: str = ""
    """Folder or `s3://bucket/prefix`; empty means the run folder. Each point has a part of its own there."""
    steps: Positive
    """Optimizer steps between two checkpoints."""
    mode: Literal["exact", "bounded"] = "exact"
    """`exact` goes on with the layout that was saved, bit for bit; `bounded` with any, inside an envelope."""
    source: str | None = None
    """Place of another run to go on from while `place` has no checkpoint."""


class Job(Frozen):
    """One point as its ranks receive it; paths are as the ranks see them."""

    recipe: str
    point: str
    """For example `devices=4`."""
    world_size: Positive
    """Ranks, one a device."""
    accelerator: bool
    """Whether ranks use the machine's GPUs; on a CPU they use Gloo."""
    out: str
    """Folder the ranks write to."""
    metrics: str
    """JSON-lines file that the first rank appends to."""
    attempt: str
    """Which start of the point this is; every line of metrics names it."""
    checkpointing: Checkpointing | None = None
    """Null saves nothing."""


class Result(Frozen):
    """What the ranks report of one point when it has ended well."""

    point: str
    device_name: str
    """As the framework names it."""
    libraries: dict[str, str]
    """Versions as imported: torch, the collective library, ..."""


class MetricsLine(BaseModel):
    """What every line of metrics.jsonl has."""

    point: str
    attempt: str = ""
    """Empty in a line that is nobody's."""
