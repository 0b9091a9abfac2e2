"""What checks found at each node, as operators' programs read it: health.json, and a textfile."""

from __future__ import annotations

import datetime
import math
import re
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from twinrun.foundation.manifest import Frozen

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
