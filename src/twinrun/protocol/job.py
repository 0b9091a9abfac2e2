"""What every job tells the ranks of a point, and what every result tells the host."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models.shape import Positive

# Exit status of a rank whose device ran out of memory; the host then tries what needs less.
OUT_OF_MEMORY = 77
# Exit status of a rank whose machine refused something, such as a disk that is full.
REFUSED = 78
# Exit status of ranks that were told to end and have saved, and the file in which the first rank says so.
STOPPED, STOPPED_FILE = 5, "stopped.json"


class Checkpointing(Frozen):
    """Where the ranks save the state of a point, and from what they go on."""

    place: str = ""
    """Folder; empty means the run folder. Each point has a part of its own there."""
    steps: Positive
    """Optimizer steps between two checkpoints."""
    mode: Literal["exact", "bounded"] = "exact"
    """`exact` goes on with the layout that was saved, bit for bit; `bounded` with any, inside an envelope."""
    source: str | None = None
    """Place of another run to go on from while `place` has no checkpoint."""
    begin: Annotated[int, Field(ge=0)] | None = None
    """Steps that must be done in what it goes on from; null: any number."""


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
    watchdog_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a rank may be at an operation that it has done before; null learns it from those."""
    sniff_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two sniff tests of the ranks; 0 for none."""


class Stop(Frozen):
    """What ranks say that were told to end and have saved."""

    step: int
    """The last that is saved."""


class Result(Frozen):
    """What the ranks report of one point when it has ended well."""

    point: str
    device_name: str
    """Name that the framework gives the device."""
    libraries: dict[str, str]
    """Versions as imported: torch, the collective library, ..."""


class MetricsLine(BaseModel):
    """What every line of metrics.jsonl has."""

    point: str
    attempt: str = ""
    """Empty in a line that is nobody's."""
