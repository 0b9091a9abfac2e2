"""What a recipe of checks runs and reports: shared by the host and the script on the devices.

Operators' programs read what was found at each node from health.json, and from a textfile of Prometheus.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.job import Job, Line, PowerReading, Result
from twinrun.protocol.measurements import Check


class CheckSpec(Frozen):
    """One named check, in the order of the manifest."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: str
    scope: Literal["device", "node", "allocation"]
    """Who runs it: every rank, the first rank of each node, or all ranks together."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds after which it has failed."""


class ChecksJob(Job):
    """The checks of one placement."""

    checks: tuple[CheckSpec, ...]
    power: PowerReading | None = None


class CheckLine(Line):
    """A line of metrics.jsonl."""

    check: Check


class ChecksResult(Result):
    """Outcomes of all ranks, in the order of the manifest, then of the places."""

    checks: tuple[Check, ...]


def failed_nodes(checks: Iterable[Check]) -> tuple[str, ...]:
    """Return the nodes that a failed check names, sorted."""
    return tuple(sorted({node for check in checks if check.outcome == "fail" for node in check.nodes}))


TEXTFILE, HEALTH_FILE = "twinrun.prom", "health.json"
_VALUES = {"pass": 1.0, "fail": 0.0, "unknown": math.nan}


class NodeCheck(Frozen):
    """The outcome of one check at one node or device."""

    check: str
    node: str
    device: str = ""
    """Empty for a check of the node."""
    outcome: Literal["pass", "fail", "unknown"]
    reason: str
    remedy: str | None = None


class Health(Frozen):
    """health.json."""

    run: str
    created: str
    """UTC, ISO 8601."""
    checks: tuple[NodeCheck, ...]


def textfile(health: Health) -> str:
    """Return the metrics of all nodes: a gauge a check, 1 passed, 0 failed, NaN not known."""
    # Ranks import this module, and have no such package.
    from prometheus_client import CollectorRegistry, Gauge, generate_latest  # noqa: PLC0415

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    for one in health.checks:
        if one.check not in gauges:
            name = f"twinrun_check_{re.sub('[^a-z0-9]', '_', one.check)}"
            about = f"Whether the check {one.check} passed: 1 yes, 0 no, NaN not known."
            gauges[one.check] = Gauge(name, about, ("node", "device"), registry=registry)
        gauges[one.check].labels(one.node, one.device).set(_VALUES[one.outcome])
    ran = Gauge("twinrun_checks_timestamp_seconds", "When the checks ran.", registry=registry)
    ran.set(datetime.datetime.fromisoformat(health.created).timestamp())
    return generate_latest(registry).decode()
