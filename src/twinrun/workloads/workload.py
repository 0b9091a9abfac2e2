"""What a workload is: all that is special to one kind of run, behind a few functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, NamedTuple

from pydantic import Field
from typing_extensions import TypeVar

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen, validate
from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import LoadedRecipe, Tables
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Run as TimedRun
from twinrun.predict.prediction import PointPrediction
from twinrun.protocol.allocation import Placement, PointId
from twinrun.protocol.evaluation import DocumentsFile, PackageSource
from twinrun.protocol.job import Job, PowerReading, Result
from twinrun.protocol.layout import Precision, StorageNeed
from twinrun.protocol.measurements import Numbers
from twinrun.protocol.model_source import ModelSource
from twinrun.protocol.models.shape import Positive
from twinrun.protocol.training import DataSource
from twinrun.workloads.settings import Factor, Fingerprint, PointSettings, leaves, nearest
from twinrun.workloads.tables_and_charts import Chart, Table

# Types of a workload for a plan, a point and a result; `Any` where every workload is served.
PlanPart = TypeVar("PlanPart", default=Any)
PointPart = TypeVar("PointPart", default=Any)
RankResult = TypeVar("RankResult", bound=Result, default=Any)


# Counts up when ranks ask for files that preparation did not write before; older folders are made anew.
DATA_FORMAT = 3


class DataRequest(Frozen):
    """Prepared data that the ranks read."""

    name: str
    source: DataSource | PackageSource
    sequence: int
    """Tokens of one sequence; 0 for documents, which are no sequences."""

    def folder(self, python: str = "") -> str:
        """Return the name of the folder of what is prepared, by all that decides it.

        Args:
            python: version of the interpreter, whose standard library differs from another's.
        """
        # A key at its default leaves the name as it was before the key existed.
        pinned = self.source.model_dump(mode="json", exclude={"source", "folder"}, exclude_defaults=True)
        mark = sha256_of_bytes(canonical_json([DATA_FORMAT, pinned, self.sequence]).encode())[:12]
        kind = f"{self.name}-python{python}" if self.source.kind == "standard-library" else self.name
        return f"{kind}-{self.sequence}-{mark}"


class Point(Placement, Generic[PointPart]):
    """One placement of a plan, with what its workload says of it."""

    part: PointPart = Field(json_schema_extra={"type": "object"})
    seconds: float | None = None
    """Estimated before anything runs; None where nothing is known of the device."""
    predicted: tuple[PointPrediction, ...] = ()
    """What each attempt will need and take, as far as the workload predicts it."""


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
    network_gbit_s: float | None = None
    nodes: int | None = None
    """Gbit/s that a node sends, None where nobody said; nodes that can be had, None for a plan alone."""
    vendor: str = ""
    processor: str = ""
    """Vendors, folders of images/vendors, of the hardware that the run uses and of the processor."""


class PlanRequest(Frozen, Generic[Tables]):
    """What a workload plans from."""

    recipe: LoadedRecipe[Tables]
    scale: str
    overrides: dict[str, Any]
    """`--set` as parsed."""
    leg: int | None = None
    """The one leg to run; None: all that there is."""
    hardware: Hardware
    stack: LoadedStack
    node_devices: int | None = None
    """Devices of a node, of which a point fills as many as it needs; None: one has all."""


class WorkloadPlan(Frozen, Generic[PlanPart, PointPart]):
    """What a workload answers: its part of a plan."""

    part: PlanPart
    points: tuple[Point[PointPart], ...]
    choices: tuple[Choice, ...]


class Progress(Frozen):
    """What one line of metrics tells."""

    done: int
    """Steps of the point so far."""
    status: str
    values: Mapping[str, float] = Field(default_factory=dict)
    """What a step measured, by metric."""


class LegSteps(Frozen):
    """A stretch of one run that a point is: the steps done when it begins and ends, and its hardware."""

    number: Positive
    """Counted from 1."""
    vendor: str
    processor: bool
    """Whether it leaves the GPUs of its machine alone."""
    begin: Annotated[int, Field(ge=0)]
    end: Positive
    last: bool
    """Whether the run ends with it."""

    @property
    def previous(self) -> str | None:
        """The point from whose checkpoint it goes on; None for the first."""
        return f"leg={self.number - 1}" if self.number > 1 else None


class Run(Job):
    """The part of a job that is the same for every workload."""

    point: str = ""
    world_size: Positive = 1
    power: PowerReading | None = None
    folders: Mapping[str, str] = Field(default_factory=dict, exclude=True)
    """Folders that ranks read, by the field of the plan's description that asks for them."""

    def at(self, point: Placement, *without: str) -> dict[str, Any]:
        """Return the fields of a job at a point, `without` those that its workload has otherwise."""
        named = {"point": point.id, "world_size": point.world_size}
        return self.model_dump(exclude={*without}) | named


class PointRecord(Frozen, Generic[RankResult]):
    """One point as it came back: where it ran, and what its ranks sent."""

    id: PointId
    hosts: tuple[str, ...]
    """As its ranks reported them, in the order of their first ranks."""
    attempts: tuple[str, ...] = ()
    """What was tried before, and did not fit into memory."""
    slow: tuple[str, ...] = ()
    """Ranks that were slower than the others, each in words."""
    began: str | None = None
    """When its first rank was started, UTC, ISO 8601; null in older records, as the next two."""
    ended: str | None = None
    loaded_sha256: str | None = None
    """Digest over the modules and native libraries that the first rank had loaded, each by its digest."""
    result: RankResult = Field(json_schema_extra={"type": "object"})
    """The workload's result with every sample."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPoint(Numbers, Generic[PointPart, RankResult]):
    """One measured point: what was planned, what its ranks sent, and all numbers that follow."""

    planned: Point[PointPart]
    sent: PointRecord[RankResult]
    cards: int | None = None
    """Cards of the devices; None where they fill none, and on a processor."""

    @property
    def id(self) -> str:
        """Its name in the plan."""
        return self.planned.id

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.planned.nodes

    @property
    def devices(self) -> int:
        """Devices over all nodes."""
        return self.planned.world_size

    @property
    def part(self) -> PointPart:
        """What the workload says of it in the plan."""
        return self.planned.part

    @property
    def result(self) -> RankResult:
        """What its ranks sent."""
        return self.sent.result

    @property
    def facts(self) -> dict[str, str]:
        """Single values that the ranks sent, by their dotted names, for a reader."""
        given = leaves(self.result.model_dump(mode="json", exclude={"point"}, exclude_none=True))
        kept = ((name, one) for name, one in given if one != "" and not isinstance(one, list))
        return {name: f"{one:,}" if isinstance(one, int) else str(one) for name, one in kept}

    def summary(self) -> dict[str, object]:
        """Return its place and its numbers, without their samples, as `--json` prints them."""
        kept = {name: getattr(self, name) for name in ("id", "nodes", "devices", "cards", "facts")}
        ends, without = ("median", "low", "high", "count"), {"samples", "divisor"}
        measured = [
            one.model_dump(mode="json", exclude=without) | {end: getattr(one, end) for end in ends}
            for one in self.measurements
        ]
        kept["checks"] = [one.model_dump(mode="json") for one in self.checks]
        return {**kept, "hosts": self.sent.hosts, "measurements": measured}


class ControlledCurve(Frozen):
    """A curve, its control runs, and what it started from."""

    name: str
    values: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...] = ()
    configuration: dict[str, str]
    """Settings that decide the curve, rounding aside."""
    origins: dict[str, str]
    """Digests by name: of the initial weights, the data, and the order of the data over the whole curve."""
    arithmetic: Precision
    """Type of the arithmetic, for example `bf16`; a claim has a bound for each."""
    rounding: float
    """Largest relative difference of two kinds of hardware at the first step, by the arithmetic's type."""


class CardRate(NamedTuple):
    """A speed of training on a GPU model, as the rate of one card."""

    mark: Literal["published", "reference", "measured"]
    """`reference` for a number published elsewhere, which nothing is judged against."""
    gpu: Gpu
    model: str
    precision: str
    """Type of the matrix products."""
    cards: float
    """Cards of the whole run."""
    tokens: float | None
    """Tokens a second of a card; None where the FLOP of a token are unknown."""
    flops: float
    """Model TFLOP/s of a card, by `formula`."""
    formula: str
    label: str
    """Software and size where it was published; date, stack and hardware where it was measured."""
    document: str = ""
    """Document of a published number."""
    where: str = ""
    """Place in the document."""


class RecordView(Frozen, Generic[PlanPart, PointPart]):
    """What reports and comparisons need of a record to show one workload."""

    label: str
    """What tells the record from others, for example `2 x H200`."""
    run: str
    made: str = ""
    """Date of the run and its stack."""
    part: PlanPart
    gpu: Gpu | None
    points: tuple[MeasuredPoint[PointPart], ...]


class PictureContext(Frozen, Generic[Tables]):
    """What a picture of a recipe is drawn from."""

    recipe: LoadedRecipe[Tables]
    gpus: dict[str, Gpu] = Field(default_factory=dict)


class Demand(Frozen):
    """A number that a claim asks of a recipe."""

    place: str
    """Key of the claim that asks for it."""
    point: str | None
    metric: str
    measurement: str | None


@dataclass(frozen=True, kw_only=True)
class PointDescription:
    """What follows from the plan of one point."""

    attempts: tuple[str, ...]
    """What is tried in turn until one fits into memory, for example `microbatch 8`."""
    steps: int
    """Lines of metrics that the point writes, as far as known."""
    rising_steps: int = 0
    """First steps of a training, in which the learning rate still rises."""
    vocabulary: int | None = None
    """Tokens between which a loss chooses; None where nothing is trained."""
    leg: LegSteps | None = None
    """The leg that the point is; None for a point that starts by itself and runs to the end."""
    unsaved: str = ""
    """What of the layout no checkpoint is made of; empty where one is."""
    storage: StorageNeed | None = None
    processor_bytes: int | None = None
    """Memory that all ranks of the point need together on a processor, estimated; None where unknown."""
    case: Mapping[str, Any] | None = None
    """The point in the terms of the publication; None where the plan says so for all points."""


@dataclass(frozen=True, kw_only=True)
class PlanDescription:
    """What follows from a plan; computed whenever a plan or a record is read."""

    subject: str
    """What is run, in a few words."""
    configuration: tuple[tuple[str, dict[str, str]], ...]
    """Titled groups of what was asked for."""
    points: Mapping[str, PointDescription]
    data: DataRequest | None = None
    """The data that the ranks read, None where there is none."""
    documents: DataRequest | None = None
    """Further data that must have been fetched, None where there is none."""
    given_documents: DocumentsFile | None = None
    """Documents that the user names, None where there are none."""
    undocumented: tuple[str, ...] = ()
    """Tasks that have no documents, without which the run is refused."""
    model: ModelSource | None = None
    """Model that is there and is read, None where there is none."""
    identity: Mapping[str, str] = field(default_factory=dict)
    """What a checkpoint must have in common with a run that goes on from it, before any data."""
    reports: tuple[str, ...] = ()
    """Further numbers that the recipe's script gives, by metric."""
    kernels: bool = True
    """Whether the kernels that the recipe names are run; they are compiled only then."""
    files: tuple[str, ...] = ()
    """Further files that ranks leave in the run folder, whose digests the record holds."""
    fingerprint: Fingerprint | None = None
    """The run in the terms of the publication; None where each point is a case of its own."""

    def marks(self, published: Mapping[str, Accepted]) -> Fingerprint:
        """Return the run in the terms of the publication; of cases, the one that is nearest to it."""
        if self.fingerprint is not None:
            return self.fingerprint
        return nearest([point.case or {} for point in self.points.values()], published)


@dataclass(frozen=True, kw_only=True)
class ComparisonTerms:
    """What a measured point is compared by."""

    settings: Mapping[str, str]
    """What may change its numbers, by name."""
    curves: Mapping[str, ControlledCurve] = field(default_factory=dict)
    """Curves by metric, each with all that decides it."""
    timed: Callable[[Gpu, float | None], TimedRun | None] = lambda *_: None
    """Return what predictions learn from it on a GPU, where a node sends so many bytes a second, if known."""


@dataclass(frozen=True, kw_only=True)
class Overview:
    """What one record, or all of a recipe, show beside what was published."""

    charts: tuple[Chart, ...] = ()
    rates: tuple[CardRate, ...] = ()
    """Speeds of trainings by GPU model, published and measured."""


FindingKind = Literal["account", "correctness", "bounds"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that stands against verdicts: something absent, wrong, or that there cannot be."""

    kind: FindingKind = "account"
    """The condition of a verdict that it breaks."""
    point: str = ""
    """The point that it is of; empty for the whole record."""
    number: str = ""
    """The measurement that it is of; empty where it is not of one."""
    what: str
    found: object
    allowed: object

    @property
    def words(self) -> str:
        """The finding in a sentence."""
        at = f" at {self.point}" if self.point else ""
        return f"{self.what}{at} is {shown(self.found)}, and must be {shown(self.allowed)}"


def shown(value: object) -> str:
    """Return a value in a message."""
    if value is None:
        return "absent"
    if isinstance(value, (set, frozenset, tuple, list, range)):
        return ", ".join(map(shown, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value) or "empty"


def held(what: str, found: object, allowed: object) -> Iterator[Finding]:
    """Yield a finding where something is not what follows from the plan."""
    if found != allowed:
        yield Finding(what=what, found=found, allowed=allowed)


@dataclass(frozen=True, kw_only=True)
class Workload(Generic[Tables, PlanPart, PointPart, RankResult]):
    """One folder of `workloads/` offers one instance of this as `WORKLOAD`."""

    table: str
    """The table of recipe.toml that means this workload."""
    tables: type[Tables]
    """All that it reads of recipe.toml."""
    plan_part: type[PlanPart]
    point_part: type[PointPart]
    result: type[RankResult]
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
    timed: bool = False
    """Whether its numbers are worth nothing where ranks share a processor."""
    measures_gpus: bool = False
    """Whether a scale above smoke is refused where there is no GPU."""

    check: Callable[[LoadedRecipe[Tables], Sequence[Demand]], Mapping[str, DataRequest]]
    """Return the data sets of a recipe that says nothing against itself or its claims; raises InputError."""
    plan: Callable[[PlanRequest[Tables]], WorkloadPlan[PlanPart, PointPart]]
    """Turn a request into points; pure. Raises InputError, MachineError."""
    describe: Callable[[PlanPart, Sequence[Point[PointPart]]], PlanDescription]
    """Return what follows from a plan."""
    settings: PointSettings
    """What decides a point, as planned and as recipe.toml has it."""
    job: Callable[[PlanPart, Point[PointPart], int, Run], Job]
    """Return the job of one attempt at a point, counted from 0."""
    progress: Callable[[bytes], Progress]
    """Read one line of metrics."""
    numbers: Callable[[PlanPart, Point[PointPart], RankResult, Gpu | None], Numbers]
    """Return all that follows from what the ranks of a point sent, on a GPU or on a processor; pure."""
    rules: Callable[[Tables, PlanPart, MeasuredPoint[PointPart, RankResult]], Iterator[Finding]]
    """Yield where a point is not whole, not the planned one, or not right by the tables of its recipe."""
    terms: Callable[[PlanPart, MeasuredPoint[PointPart, RankResult]], ComparisonTerms]
    """Return what a measured point is compared by."""
    show: Callable[[RecordView[PlanPart, PointPart]], tuple[Table, ...]]
    """Return the measured numbers as tables."""
    overview: Callable[[Sequence[RecordView[PlanPart, PointPart]], PictureContext[Tables]], Overview]
    """Return the pictures of one record, or of all of a recipe."""

    def read_plan(self, part: Any) -> PlanPart:
        """Return what a file says of a plan as this workload's type; raises InputError."""
        found: PlanPart = _read(part, self.plan_part, place="plan.part")
        return found

    def read_points(self, points: tuple[Point, ...]) -> tuple[Point, ...]:
        """Return points whose parts are this workload's type, also those from a file; raises InputError."""
        return tuple(_typed(one, "part", self.point_part) for one in points)

    def read_results(self, points: tuple[PointRecord, ...]) -> tuple[PointRecord, ...]:
        """Return points whose results are this workload's type, also those from a file; raises InputError."""
        return tuple(_typed(one, "result", self.result) for one in points)


def _typed(point: Any, name: str, model: Any) -> Any:
    part = getattr(point, name)
    read = _read(part, model, place=f"points.{point.id}.{name}")
    return point if read is part else point.model_copy(update={name: read})


def _read(part: Any, model: Any, *, place: str) -> Any:
    return part if isinstance(part, model) else validate(part, model, place=place)


def whole(
    points: Sequence[MeasuredPoint[PointPart]], leg: Callable[[MeasuredPoint[PointPart]], LegSteps | None]
) -> tuple[MeasuredPoint[PointPart], ...]:
    """Return the points whose curve reaches the end of the run, those that are no `leg` of it first."""
    undisturbed = [point for point in points if leg(point) is None]
    return (*undisturbed, *(point for point in points if (found := leg(point)) and found.last))
