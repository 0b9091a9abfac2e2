"""What a recipe of checks runs and reports: shared by the host and the script on the devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.job import Job, Result
from twinrun.protocol.measurements import Check
from twinrun.protocol.power import PowerReading

Scope = Literal["device", "node", "allocation"]


class CheckSpec(Frozen):
    """One named check, in the order of the manifest."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: str
    scope: Scope
    """Who runs it: every rank, the first rank of each node, or all ranks together."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds after which it has failed."""


class ChecksJob(Job):
    """The checks of one placement."""

    checks: tuple[CheckSpec, ...]
    power: PowerReading | None = None


class CheckLine(Frozen):
    """A line of metrics.jsonl."""

    point: str
    attempt: str
    check: Check


class ChecksResult(Result):
    """Outcomes of all ranks, in the order of the manifest, then of the places."""

    checks: tuple[Check, ...]


def failed_nodes(checks: Iterable[Check]) -> tuple[str, ...]:
    """Return the nodes that a failed check names, sorted."""
    return tuple(sorted({node for check in checks if check.outcome == "fail" for node in check.nodes}))
