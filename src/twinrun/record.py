"""Records: one JSON file with every circumstance and number of a run, sealed by its own digest."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from twinrun.benchmark import Ceiling, Settings
from twinrun.errors import InputError
from twinrun.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.hardware import Gpu, Machine
from twinrun.job import BenchPlan, Plan
from twinrun.manifest import Frozen, load_json

Outcome = Literal["reproduced", "not-reproduced", "not-comparable", "config-mismatch", "failed"]


class Spread(Frozen):
    """Repeated measurements of one quantity."""

    median: float
    low: float
    high: float
    count: int
    unit: str
    per: Literal["device", "run"]

    def scaled(self, factor: float, *, unit: str, per: Literal["device", "run"]) -> Spread:
        """Return the same measurements in another unit."""
        ends = sorted((self.low * factor, self.high * factor))
        return Spread(
            median=self.median * factor, low=ends[0], high=ends[1], count=self.count, unit=unit, per=per
        )


def spread(values: Sequence[float], *, unit: str, per: Literal["device", "run"]) -> Spread:
    """Summarise `values`, at least one."""
    return Spread(
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        count=len(values),
        unit=unit,
        per=per,
    )


class ModelFlops(Frozen):
    """Model FLOP/s of one device, named after its formula."""

    rate: Spread
    formula: str


class Utilisation(Frozen):
    """Model FLOP/s over the dense peak of one device."""

    value: float
    formula: str
    peak_tflops: float
    peak_per: Literal["device"] = "device"
    peak_source: str


class Attempt(Frozen):
    """A microbatch that was tried."""

    microbatch: int
    outcome: Literal["fits", "out of memory"]


class PointRecord(Frozen):
    """One measured point of the sweep."""

    id: str
    nodes: int
    devices: int
    microbatch: int
    attempts: tuple[Attempt, ...]
    parameters: int
    parallelism: str
    attention_backend: str
    device_name: str
    warmup_steps: int
    seconds_per_step: Spread
    tokens_per_second: Spread
    model_flops: ModelFlops
    utilisation: Utilisation | None
    """None without a dense 16-bit peak in images/gpus.toml, or in another precision."""
    peak_memory_bytes: int
    losses: tuple[float, ...]
    """Mean cross entropy of each global batch, nats per token, warm-up included."""
    data_hash: str
    order_hash: str


class CallRecord(Frozen):
    """One implementation at one measurement."""

    implementation: str
    version: str
    milliseconds: Spread | None
    """None in a run that checks and does not time."""
    error: float | None
    """Largest of `errors`; None when not finite."""
    errors: dict[str, float | None] = Field(default_factory=dict)
    """Relative distance from float64 of each tensor that is returned, of an input its gradient; None when not
    finite. Older records have none."""
    kept_bytes: int | None
    """Memory kept from forward to backward."""


class Floor(Frozen):
    """The least time of a call on this device, by what the device was measured to do at most."""

    milliseconds: float
    ceiling: str
    """Which ceiling sets it."""
    formula: str
    """Identifier of what was counted."""


class MeasurementRecord(Frozen):
    """Ours and what it is held against, from one process, in turns."""

    id: str
    operation: str
    element: str
    way: str
    amounts: dict[str, float]
    """The least work, by ceiling; that of `copy` is in bytes."""
    gigabytes_per_second: float | None
    """Those bytes over our median time."""
    copy_share: float | None
    """That over the bandwidth of a copy on this device."""
    floor: Floor | None
    floor_share: float | None
    """The floor over our median time."""
    allowed_error: float
    ours: CallRecord
    baseline: CallRecord | None
    baseline_absent: str | None
    """Why there is no baseline."""
    ratio: float | None
    """How many times as fast as the baseline ours is, by medians."""


class CaseRecord(Frozen):
    """One measured case."""

    id: str
    settings: Settings
    seed: int
    """Of the random inputs."""
    ceilings: tuple[Ceiling, ...]
    measurements: tuple[MeasurementRecord, ...]
    device_name: str
    peak_memory_bytes: int
    devices: int = 1

    def measurement(self, name: str) -> MeasurementRecord | None:
        """Return the measurement called `name`, if the case has it."""
        return next((one for one in self.measurements if one.id == name), None)


class Verdict(Frozen):
    """What became of one claim, and why."""

    claim: str
    statement: str
    outcome: Outcome
    reason: str
    published: float
    measured: float | None
    unit: str
    per: Literal["card", "device", "run"]


class Environment(Frozen):
    """The software as found where the ranks ran."""

    python: str
    libraries: dict[str, str]
    """As the ranks imported them."""
    lock_differences: dict[str, str]
    """Packages that are not what the lock says: `found, lock has ...`."""
    image_digest: str | None
    variables: dict[str, str]
    """Environment variables that steer the frameworks, secrets left out."""


class Revision(Frozen):
    """The state of the project's own files."""

    commit: str | None
    changes_sha256: str | None
    """Digest of the uncommitted difference; null when there is none."""


class AnyRecord(Frozen):
    """What every record.json says of its run."""

    schema_version: Literal[1] = 1
    twinrun: str
    run: str
    created: str
    """UTC, ISO 8601."""
    evidence: Literal["measured"] = "measured"
    plan_sha256: str
    revision: Revision
    machine: Machine
    gpu: Gpu | None
    environment: Environment
    verdicts: tuple[Verdict, ...]
    files: dict[str, str]
    """SHA-256 of the other files of the run."""
    sha256: str = ""
    """Digest over everything else in this file."""

    def digest(self) -> str:
        """Return the digest that `sha256` must hold."""
        return _digest(self.model_dump(mode="json"))

    def sealed(self) -> Self:
        """Return the record with its digest filled in."""
        return self.model_copy(update={"sha256": self.digest()})


class Record(AnyRecord):
    """record.json of a training sweep."""

    plan: Plan
    points: tuple[PointRecord, ...]

    def point(self, name: str) -> PointRecord | None:
        """Return the point called `name`, if the run has it."""
        return next((point for point in self.points if point.id == name), None)


class BenchRecord(AnyRecord):
    """record.json of a benchmark."""

    plan: BenchPlan
    points: tuple[CaseRecord, ...]

    def point(self, name: str) -> CaseRecord | None:
        """Return the case called `name`, if the run has it."""
        return next((point for point in self.points if point.id == name), None)


def write_record(path: Path, record: AnyRecord) -> None:
    """Seal `record` and write it whole or not at all; raises MachineError."""
    write_atomically(path, json.dumps(record.sealed().model_dump(mode="json"), indent=1) + "\n")


def read_record(path: Path) -> Record:
    """Read the record of a training sweep as `read_any_record` does; a benchmark's is an InputError."""
    record = read_any_record(path)
    if isinstance(record, BenchRecord):
        raise InputError(
            "the record is of a benchmark",
            place=str(path),
            found=record.plan.recipe,
            allowed="a training sweep",
        )
    return record


def read_any_record(path: Path) -> Record | BenchRecord:
    """Read a record, or the record of a run folder, and check its digest.

    Raises:
        InputError: missing, not a record, or changed since it was written.
    """
    file = path / "record.json" if path.is_dir() else path
    hint = "name a run folder of runs/, or a record of recipes/RECIPE/results"
    if not file.is_file():
        raise InputError("no such record", place=str(file), hint=hint)
    content = _content(file)
    if content and not content.keys() & Record.model_fields.keys():
        raise InputError("not a record", place=str(file), found=", ".join(list(content)[:3]), hint=hint)
    plan = content.get("plan")
    benches = isinstance(plan, dict) and "bench" in plan
    record: Record | BenchRecord = load_json(file, BenchRecord) if benches else load_json(file, Record)
    # Of the file's own content: fields that the model has gained since do not count.
    found = _digest(content)
    if found != record.sha256:
        raise InputError(
            "the record was changed after it was written",
            place=str(file),
            found=f"content {found[:12]}",
            allowed=f"content {record.sha256[:12]}, as the record says of itself",
            hint="compare the untouched file; a record is never edited",
        )
    return record


def _content(file: Path) -> dict[str, Any]:
    """Return what a record file says; empty where that is no table, which its model then names."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _digest(content: dict[str, Any]) -> str:
    sealed = {key: value for key, value in content.items() if key != "sha256"}
    return sha256_of_bytes(canonical_json(sealed).encode())
