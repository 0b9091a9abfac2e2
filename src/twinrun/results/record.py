"""Records: one JSON file with every circumstance of a run and all that its ranks sent, and a digest of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.planning.plan import Plan
from twinrun.protocol.allocation import Allocation, Revision
from twinrun.workloads import load_workload
from twinrun.workloads.workload import PlanPart, PointPart, PointRecord, RankResult

SENT_IN: Literal["as sent in"] = "as sent in"
# Of a new major version old records are no records; a minor one adds keys that older files do not have.
MAJOR, MINOR = 3, 1
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _a_time(text: str) -> str:
    datetime.datetime.fromisoformat(text)
    return text


class Environment(Frozen):
    """The software as found where the ranks ran, beside the versions that the ranks themselves report."""

    lock_differences: dict[str, str]
    """Packages whose version is not the locked one: `found, lock has ...`."""
    changed_files: dict[str, str] = Field(default_factory=dict)
    """Files of the environment that are not as their wheels have them; no results take such a record."""
    image_digest: str | None
    variables: dict[str, str]
    """Environment variables that steer the frameworks, of a list of names; what looks secret is left out."""


class Record(Frozen, Generic[PlanPart, PointPart, RankResult]):
    """record.json: what was planned, where it ran, and what came back; nothing that follows from these."""

    schema_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")] = f"{MAJOR}.{MINOR}"
    twinrun: str
    run: str
    """Name of its folder: when it began, eight letters of the plan's digest, and four of chance."""
    created: Annotated[str, Field(pattern=r"^[-0-9]{10}T[:0-9]{8}\+00:00$"), AfterValidator(_a_time)]
    """When it ended, UTC, ISO 8601."""
    evidence: Literal["measured", "as sent in"] = "measured"
    """`as sent in` where the sender alone says who ran it, and on what."""
    plan: Plan[PlanPart, PointPart]
    revision: Revision
    allocation: Allocation
    """The nodes that ran, each as its first rank found it."""
    environment: Environment
    points: tuple[PointRecord[RankResult], ...]
    files: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")], Sha256]
    """SHA-256 of the other files of the run."""
    sha256: str = ""
    """Digest over everything else in this file."""

    @field_validator("points")
    @classmethod
    def _typed_points(cls, points: tuple[PointRecord, ...], read: ValidationInfo) -> tuple[PointRecord, ...]:
        """Read what a file says of the points as the results of their workload."""
        plan = read.data.get("plan")
        return load_workload(plan.workload).read_results(points) if plan else points

    @property
    def libraries(self) -> dict[str, str]:
        """Versions of the libraries that the ranks imported."""
        return {name: version for one in self.points for name, version in one.result.libraries.items()}

    def with_digest(self) -> Self:
        """Return the record with its digest filled in."""
        return self.model_copy(update={"sha256": content_digest(self.model_dump(mode="json"))})


def write_record(path: Path, record: Record) -> None:
    """Write `record` with its digest, whole or not at all; raises MachineError."""
    write_atomically(path, json.dumps(record.with_digest().model_dump(mode="json"), indent=1) + "\n")


def content_digest(content: dict[str, Any]) -> str:
    """Return the digest of what a record file says, but for the digest itself."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return sha256_of_bytes(canonical_json(rest).encode())
