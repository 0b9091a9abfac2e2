"""What checks found at each node, as operators' programs read it: health.json, and a textfile."""

from __future__ import annotations

import datetime
import re
from typing import Literal

from twinrun.foundation.manifest import Frozen

TEXTFILE, HEALTH_FILE = "twinrun.prom", "health.json"
_VALUES = {"pass": "1", "fail": "0", "unknown": "NaN"}


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
    lines = []
    for name in dict.fromkeys(one.check for one in health.checks):
        metric = f"twinrun_check_{re.sub('[^a-z0-9]', '_', name)}"
        lines.append(f"# HELP {metric} Whether the check {name} passed: 1 yes, 0 no, NaN not known.")
        lines.append(f"# TYPE {metric} gauge")
        found = {(one.node, one.device): _VALUES[one.outcome] for one in health.checks if one.check == name}
        lines += [
            f'{metric}{{node="{_escaped(node)}",device="{_escaped(device)}"}} {value}'
            for (node, device), value in found.items()
        ]
    seconds = datetime.datetime.fromisoformat(health.created).timestamp()
    lines += [
        "# HELP twinrun_checks_timestamp_seconds When the checks ran.",
        "# TYPE twinrun_checks_timestamp_seconds gauge",
        f"twinrun_checks_timestamp_seconds {seconds:.0f}",
    ]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
