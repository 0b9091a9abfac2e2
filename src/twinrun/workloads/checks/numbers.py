"""From what the ranks report of checks to the outcomes of a record, and to the share that passed."""

from __future__ import annotations

from twinrun.manifests.vendor import Gpu
from twinrun.protocol.checks import CheckLine, ChecksResult
from twinrun.protocol.measurements import Measurement, Numbers, sampled
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint
from twinrun.workloads.checks.plan import PASSED
from twinrun.workloads.workload import ComparisonTerms, Point, PointRecord, Progress


def progress(line: bytes) -> Progress:
    """Read the line that a finished check writes."""
    check = CheckLine.model_validate_json(line).check
    return Progress(done=0, status=f"{check.id}: {check.outcome}")


def measured(_part: ChecksPlan, _point: Point[ChecksPoint], result: ChecksResult) -> Numbers:
    """Return the outcomes of the checks."""
    return Numbers(checks=result.checks, facts={"device name": result.device_name})


def derived(_part: ChecksPlan, point: PointRecord[ChecksPoint], _gpu: Gpu | None) -> tuple[Measurement, ...]:
    """Return the share of the checks that passed."""
    if not point.checks:
        return ()
    share = sum(one.outcome == "pass" for one in point.checks) / len(point.checks)
    return (sampled(PASSED, [share], metric=PASSED, unit="ratio", per="run"),)


def terms(part: ChecksPlan, _point: PointRecord[ChecksPoint]) -> ComparisonTerms:
    """Return which checks ran."""
    return ComparisonTerms(settings={"checks": ", ".join(one.id for one in part.checks)})
