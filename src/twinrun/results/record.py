"""Records: one JSON file with every circumstance and number of a run, and a digest of them all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.signatures import UNSIGNED
from twinrun.manifests.vendor import Gpu
from twinrun.planning.plan import Plan
from twinrun.predict.point import PointPrediction
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.machine import Machine, Revision
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.workload import (
    ComparisonTerms,
    PlanDescription,
    PlanPart,
    PointPart,
    PointRecord,
    RecordView,
    Workload,
    whole,
)

SENT_IN: Literal["as sent in"] = "as sent in"


class Environment(Frozen):
    """The software as found where the ranks ran."""

    python: str
    libraries: dict[str, str]
    """Versions of the libraries that the ranks imported."""
    lock_differences: dict[str, str]
    """Packages whose version is not the locked one: `found, lock has ...`."""
    changed_files: dict[str, str] = Field(default_factory=dict)
    """Files of the environment that are not as their wheels have them; no results take such a record."""
    attested: tuple[str, ...] = ()
    """Pins of the lock whose hashes public lock files have, and that were not verified at their index."""
    unverified: tuple[str, ...] = ()
    """Pins that the lock has no hash of."""
    image_digest: str | None
    variables: dict[str, str]
    """Environment variables that steer the frameworks, of a list of names; what looks secret is left out."""

    @property
    def as_locked(self) -> bool:
        """Whether versions and files are those of the lock."""
        return not self.lock_differences and not self.changed_files


class Conversion(Frozen):
    """The file that a record was converted from when the form of records changed."""

    schema_version: int
    """Version of the form that the file had."""
    sha256: str
    """Digest that the file had."""


class Record(Frozen, Generic[PlanPart, PointPart]):
    """record.json."""

    schema_version: Literal[2] = 2
    twinrun: str
    run: str
    created: str
    """UTC, ISO 8601."""
    evidence: Literal["measured", "as sent in"] = "measured"
    """`as sent in` where the sender alone says who ran it, and on what."""
    plan: Plan[PlanPart, PointPart]
    plan_sha256: str
    claims_sha256: str
    """Digest of the claims that were judged."""
    rules: int = 1
    """Version of the rules that gave the verdicts, `RULES` of twinrun/results/judge.py."""
    revision: Revision
    machine: Machine
    """The first node of the allocation."""
    allocation: Allocation | None
    """The nodes that ran; null in records made before ranks reported their hosts."""
    gpu: Gpu | None
    environment: Environment
    points: tuple[PointRecord[PointPart], ...]
    verdicts: tuple[Verdict, ...]
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")], str]
    """SHA-256 of the other files of the run."""
    converted_from: Conversion | None = None
    """The older file that the record was converted from; null where the run wrote this form itself."""
    sha256: str = ""
    """Digest over everything else in this file."""
    _signature: str = PrivateAttr(default=UNSIGNED)
    _judged_anew: str = PrivateAttr(default="")

    @property
    def signature(self) -> str:
        """Who signed the digest of the file that this was read from, in words."""
        return self._signature

    def signed(self, signature: str) -> Self:
        """Return the record with who signed it."""
        record = self.model_copy()
        record._signature = signature
        return record

    @property
    def claims_changed(self) -> str:
        """Which claims are others than the run was judged under, in words; empty where none is."""
        return self._judged_anew

    def judged_anew(self, verdicts: tuple[Verdict, ...], changed: str) -> Self:
        """Return the record with the verdicts on claims that are not those of its run."""
        record = self.model_copy(update={"verdicts": verdicts})
        was = f"The run was judged under claims {self.claims_sha256[:8]}"
        record._judged_anew = f"{was}; changed since, to {changed}."
        return record

    @field_validator("points")
    @classmethod
    def _typed_points(cls, points: tuple[PointRecord, ...], read: ValidationInfo) -> tuple[PointRecord, ...]:
        """Read what a file says of the points as the type of their workload."""
        plan = read.data.get("plan")
        return load_workload(plan.workload).read_points(points) if plan else points

    @property
    def workload(self) -> Workload:
        """The workload that ran."""
        return load_workload(self.plan.workload)

    @property
    def description(self) -> PlanDescription:
        """What follows from the plan."""
        return self.plan.description

    @property
    def whole(self) -> tuple[PointRecord, ...]:
        """The points whose curve reaches to the end of the run, undisturbed ones first."""
        points = self.description.points
        return whole(self.points, lambda one: points[one.id].leg)

    def terms(self, point: PointRecord) -> ComparisonTerms:
        """Return what a point is compared by."""
        return self.workload.terms(self.plan.part, point)

    def point(self, name: str) -> PointRecord | None:
        """Return the point called `name`, if the run has it."""
        return self._by_id.get(name)

    @cached_property
    def _by_id(self) -> dict[str, PointRecord]:
        """The points by id, gathered once."""
        return {point.id: point for point in self.points}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values; one of other points gathers them anew."""
        copied = super().model_copy(update=update, deep=deep)
        if update and "points" in update:
            copied.__dict__.pop("_by_id", None)
        return copied

    def _predicted(self) -> dict[str, PointPrediction]:
        """Return what was predicted of the attempt that ran at each point."""
        planned = {point.id: point.predicted for point in self.plan.points}
        return {
            point.id: one
            for point in self.points
            for one in planned.get(point.id, ())
            if one.attempt == len(point.attempts)
        }

    def digest(self) -> str:
        """Return the digest that `sha256` must hold."""
        return content_digest(self.model_dump(mode="json"))

    def with_digest(self) -> Self:
        """Return the record with its digest filled in."""
        return self.model_copy(update={"sha256": self.digest()})

    def shown(self) -> RecordView[PlanPart, PointPart]:
        """Return what the workload shows of this record."""
        return RecordView(
            label=hardware(self),
            run=self.run,
            made=f"{self.created[:10]}, {self.plan.stack}",
            evidence=self.evidence,
            part=self.plan.part,
            gpu=self.gpu,
            points=self.points,
            predicted=self._predicted(),
            differences=self.plan.differences,
        )


def hardware(record: Record) -> str:
    """Name what the largest point of the record ran on, and that only its sender says so where that is so."""
    return _machine(record) + (f", {SENT_IN}" if record.evidence == SENT_IN else "")


def _machine(record: Record) -> str:
    most = max((point.devices for point in record.points), default=0)
    gpu = record.gpu
    if gpu is not None and gpu.devices_per_card > 1:
        return f"{most} device{'' if most == 1 else 's'} of {gpu.name}, {gpu.devices_per_card} to a card"
    if gpu is not None:
        return f"{most} x {gpu.name}"
    if record.machine.devices:
        return f"{most} x {record.machine.devices[0].name}"
    return f"{most} rank{'' if most == 1 else 's'} on {record.machine.cpu}"


def file_name(record: Record) -> str:
    """Return the name under which a record is committed."""
    model = record.gpu.id if record.gpu else record.machine.vendor
    count = max((point.devices for point in record.points), default=0)
    return f"{model}x{count}_{record.plan.stack}_{record.created[:10]}.json"


def write_record(path: Path, record: Record) -> None:
    """Write `record` with its digest, whole or not at all; raises MachineError."""
    write_atomically(path, json.dumps(record.with_digest().model_dump(mode="json"), indent=1) + "\n")


def content_digest(content: dict[str, Any]) -> str:
    """Return the digest of what a record file says, but for the digest itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return sha256_of_bytes(canonical_json(rest).encode())
