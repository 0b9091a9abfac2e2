"""What a workload is: all that is special to one kind of run, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, SerializeAsAny

from twinrun.foundation.manifest import Frozen, validate
from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.job import Checkpointing, Job, Result
from twinrun.protocol.measurements import Fact, Measurement, Numbers
from twinrun.protocol.training import DataSource
from twinrun.workloads.charts import Chart
from twinrun.workloads.fingerprint import Difference, Fingerprint
from twinrun.workloads.tables import Table

Grade = Literal["large", "some", "small", "none"]


class Part(Frozen, extra="allow"):
    """What a workload says of a plan or of a point; read as it is, then as the type of its workload."""

    def typed(self, model: type[Part], *, place: str) -> Part:
        """Return the part as its workload's type; raises InputError at `place`."""
        return self if type(self) is not Part else validate(self.model_dump(mode="json"), model, place=place)


class Placement(Frozen):
    """Where the ranks of something go, one rank a device."""

    id: str
    nodes: int
    devices_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.devices_per_node


class Point(Placement):
    """One placement of a plan, with what its workload says of it."""

    part: SerializeAsAny[Part]
    seconds: float | None = None
    """Estimated before anything runs; None where nothing is known of the device."""


class Choice(Frozen):
    """One decision and its reason."""

    name: str
    value: str
    because: str


class Hardware(Frozen):
    """The devices that a plan is made for."""

    gpu: Gpu | None
    """None for a processor, or for a GPU that images/gpus.toml lacks."""
    device_memory_bytes: int | None
    """None on a processor."""
    devices: int
    """GPUs of this machine, 0 on a processor."""
    cores: int
    """Processors that this process may run on."""
    vendor: str = ""
    """Folder of images/vendors, of what the run has."""
    processor: str = ""
    """That of the processor, which every machine has beside."""


class PlanRequest(Frozen):
    """What a workload plans from."""

    recipe: LoadedRecipe
    scale: str
    overrides: dict[str, Any]
    """`--set` as parsed."""
    leg: int | None = None
    """The one leg to run; None: all that there is."""
    hardware: Hardware


class WorkloadPlan(Frozen):
    """What a workload answers: its part of a plan."""

    part: SerializeAsAny[Part]
    points: tuple[Point, ...]
    choices: tuple[Choice, ...]


class DataRequest(Frozen):
    """Prepared data that the ranks read."""

    name: str
    source: DataSource
    sequence: int
    """Tokens of one sequence."""


class Progress(Frozen):
    """What one line of metrics tells."""

    done: int
    """Steps of the point so far."""
    status: str


class Factor(Frozen):
    """A setting or circumstance, and what a change of it is likely to do."""

    pattern: str
    """Shell pattern over names."""
    speed: Grade
    numerics: Grade
    because: str


class LegPosition(Frozen):
    """Where a point that is a leg stands in its run."""

    number: int
    """Counted from 1."""
    previous: str | None
    """The point from whose checkpoint it goes on; None for the first."""
    begin: int
    """Steps that are done when it starts."""
    end: int
    """Steps that are done when it ends."""


class Run(Frozen):
    """The common part of a job, see `Job`."""

    recipe: str
    accelerator: bool
    data: str
    """Folder of prepared data, empty where the workload needs none."""
    out: str
    metrics: str
    attempt: str
    checkpointing: Checkpointing | None = None
    watchdog_seconds: float | None = None


class PointRecord(Numbers):
    """One measured point: what ran, where, and what came out."""

    id: str
    nodes: int
    devices: int
    """Over all nodes."""
    hosts: tuple[str, ...] = ()
    """That the ranks reported; empty in records from before they did."""
    part: SerializeAsAny[Part]
    attempts: tuple[str, ...] = ()
    """What was tried before, and did not fit into memory."""


class ControlledCurve(Frozen):
    """A curve, its control runs, and what it started from."""

    name: str
    values: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...] = ()
    configuration: dict[str, str]
    """Settings that decide the curve, rounding aside."""
    origins: dict[str, str]
    """Digests by name: of the initial weights, the data, and the order of the data over the whole curve."""
    rounding: float
    """What two kinds of hardware may be apart at the first step, relative; of the arithmetic's type."""


class RecordView(Frozen):
    """What reports and comparisons need of a record to show one workload."""

    label: str
    """What tells the record from others, for example `2 x H200`."""
    run: str
    part: SerializeAsAny[Part]
    gpu: Gpu | None
    points: tuple[PointRecord, ...]
    differences: tuple[Difference, ...] = ()


class PictureContext(Frozen):
    """What a picture of a recipe is drawn from."""

    recipe: LoadedRecipe
    gpus: dict[str, Gpu] = Field(default_factory=dict)


class Workload(ABC):
    """One folder of `workloads/` offers one instance of this as `WORKLOAD`."""

    table: str
    """The table of recipe.toml that means this workload."""
    tables: type[Frozen]
    """All that it reads of recipe.toml."""
    plan_part: type[Part]
    point_part: type[Part]
    result: type[Result]
    headline: tuple[str, ...]
    """Metrics that stand for a record, the first that a point has."""
    factors: tuple[Factor, ...]
    """What its settings do, in the order of likely effect on speed."""
    smaller: str
    """What to do where nothing fits into memory."""
    module: str | None = None
    """What ranks run where the recipe has no script; None: every recipe needs one."""
    saves: bool = False
    """Whether its ranks can save a point half way, and go on from there."""
    timed: bool
    """Whether its numbers are worth nothing where ranks share a processor."""

    @abstractmethod
    def check(self, recipe: LoadedRecipe) -> None:
        """Hold the names inside recipe.toml against each other; raises InputError."""

    @abstractmethod
    def missing(
        self, tables: Frozen, *, point: str | None, metric: str, measurement: str | None
    ) -> str | None:
        """Return why no scale can give this point or measurement, or None."""

    @abstractmethod
    def plan(self, request: PlanRequest) -> WorkloadPlan:
        """Turn a request into points; pure. Raises InputError, MachineError."""

    @abstractmethod
    def fingerprint(
        self, part: Part, points: Sequence[Point], published: Mapping[str, Accepted]
    ) -> Fingerprint:
        """Return a plan in the terms of the publication; computed again whenever a record is read."""

    def refuse(
        self, part: Part, points: Sequence[Point], *, scale: str, hardware: Hardware, here: bool
    ) -> None:
        """Raise a TwinrunError where the hardware cannot run a scale; a plan is still printed.

        Args:
            here: ranks run on this machine, whose disks can be looked at.
        """

    def continued(self, point: Point) -> LegPosition | None:
        """Return from which point's checkpoint a point goes on, None for one that starts by itself."""
        return None

    def identity(self, part: Part) -> dict[str, str]:
        """Return what a checkpoint must have in common with a run that goes on from it, before any data."""
        return {}

    def data(self, part: Part) -> DataRequest | None:
        """Return the data that the ranks read, None where there is none."""
        return None

    def data_sets(self, tables: Frozen) -> dict[str, DataRequest]:
        """Return the data sets that recipe.toml names."""
        return {}

    @abstractmethod
    def attempts(self, part: Part, point: Point) -> tuple[str, ...]:
        """Name what is tried in turn until one fits into memory, for example `microbatch 8`."""

    @abstractmethod
    def job(self, part: Part, point: Point, *, attempt: int, run: Run) -> Job:
        """Return the job of one attempt."""

    @abstractmethod
    def steps(self, part: Part, point: Point) -> int:
        """Return how many lines of metrics a point writes, as far as known."""

    @abstractmethod
    def progress(self, line: bytes) -> Progress:
        """Read one line of metrics."""

    @abstractmethod
    def numbers(self, part: Part, point: Point, result: Result) -> Numbers:
        """Return what the ranks measured, and nothing computed from it."""

    @abstractmethod
    def derived(self, part: Part, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
        """Return what follows from the measured numbers; recomputed whenever a record is read."""

    def uses_kernels(self, part: Part) -> bool:
        """Say whether this plan runs the kernels that the recipe names; they are compiled only then."""
        return True

    def expected(self, part: Part, point: PointRecord) -> dict[str, tuple[Fact, ...]]:
        """Return by name the facts of a point that its plan decides, each with the values that it allows."""
        return {}

    @abstractmethod
    def is_measured(self, measurement: str) -> bool:
        """Say whether a measurement of this name comes from the ranks, and not from `derived`."""

    @abstractmethod
    def settings(self, part: Part, point: PointRecord) -> dict[str, str]:
        """Return by name what may change the numbers of a point."""

    @abstractmethod
    def configuration(self, part: Part) -> tuple[tuple[str, dict[str, str]], ...]:
        """Return titled groups of what was asked for."""

    @abstractmethod
    def subject(self, part: Part) -> str:
        """Return what was run, in a few words."""

    @abstractmethod
    def incomparable(
        self, a: RecordView, b: RecordView, point_a: PointRecord, point_b: PointRecord
    ) -> str | None:
        """Return why series of two points cannot be held against each other, or None."""

    def whole(self, points: Sequence[PointRecord]) -> tuple[PointRecord, ...]:
        """Return the points whose curves are of a whole run, the undisturbed first."""
        return tuple(points)

    def traced(self, part: Part, point: PointRecord, metric: str) -> ControlledCurve | None:
        """Return the curve of a point with all that decides it; None where it has none."""
        return None

    def point_differences(
        self, point: PointRecord, published: dict[str, Any]
    ) -> tuple[Difference, ...] | None:
        """Return where one point is not the published configuration; None where the plan says so for all."""
        return None

    @abstractmethod
    def point_tables(self, record: RecordView) -> tuple[Table, ...]:
        """Return the measured numbers as tables."""

    def hardware_tables(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Table, ...]:
        """Return published and measured hardware side by side; those after the first table are folded."""
        return ()

    def files(self, record: RecordView) -> dict[str, str]:
        """Return further files of the run's folder by name, for other programs."""
        return {}

    @abstractmethod
    def charts(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Chart, ...]:
        """Return the pictures of one record, or of all of a recipe."""
