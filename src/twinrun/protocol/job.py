"""What every job tells the ranks of a point, and what every result tells the host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from twinrun.foundation.files import write_atomically
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


class Line(Frozen):
    """A line of metrics.jsonl, of one point and one start of it."""

    point: str
    attempt: str


class MetricsLine(BaseModel):
    """What every line of metrics.jsonl has."""

    point: str
    attempt: str = ""
    """Empty in a line that is nobody's."""


def forget(metrics: Path, point: str) -> None:
    """Drop the lines of `point` and any torn line, so that a point which starts over counts once.

    It reads every line of the file: who knows that a point has none does not call it.
    """

    def is_of_another(line: str) -> bool:
        try:
            return MetricsLine.model_validate_json(line).point != point
        except ValidationError:
            return False

    lines = metrics.read_text(encoding="utf-8", errors="replace").splitlines() if metrics.exists() else []
    kept = [line for line in lines if is_of_another(line)]
    if len(kept) < len(lines):
        write_atomically(metrics, "".join(f"{line}\n" for line in kept))


class ProofResult(Result):
    """What the ranks measured."""

    message_bytes: int
    seconds: float
    """Time of one all-reduce, the shortest of several."""
    ranks: int
    cores: int
    """Processors that the processes of the first node may run on, before a rank binds itself."""
    memory_bytes: int
    """The limit of the job there, or the machine's memory where it has none."""

    @property
    def bus_gb_s(self) -> float:
        """Bytes that each link carries in a second, in GB: 2 (N - 1) / N of the message."""
        return 2 * (self.ranks - 1) / self.ranks * self.message_bytes / self.seconds / 1e9


class PowerReading(Frozen):
    """The row of a job's GPU; what a sensor measures is a card, which may be several devices."""

    devices_per_card: Positive = 1
    gpu: str | None = None
    """Row of images/gpus.toml; null for a card that has none."""
    clock_mhz: float | None = None
    """Peak engine clock of that row; null where it names none."""


class PowerSource(Frozen):
    """Where the power of a training comes from."""

    sensor: str | None
    """Name of the sensor; null where there is no power."""
    reason: str | None = None
    """Why there is none."""
    samples_per_second: Annotated[float, Field(ge=0)] | None = None
    """Readings of the first rank in a second while steps were timed."""
