"""`[checks]`: named checks of devices, nodes and the allocation, each with a timeout."""

from __future__ import annotations

from twinrun.protocol.checks import ChecksResult
from twinrun.workloads.checks import plan, report
from twinrun.workloads.settings import PointSettings, factor
from twinrun.workloads.workload import Overview, Workload

WORKLOAD = Workload(
    table="checks",
    tables=plan.ChecksTables,
    plan_part=plan.ChecksPlan,
    point_part=plan.ChecksPoint,
    result=ChecksResult,
    headline=(plan.PASSED,),
    factors=(factor("checks", "none", "none", "other checks"),),
    smaller="name fewer checks with --set only=",
    timed=False,
    check=plan.check,
    plan=plan.plan,
    describe=plan.describe,
    settings=PointSettings(of=plan.settings, as_written=plan.as_written),
    job=plan.job,
    progress=plan.progress,
    numbers=plan.numbers,
    rules=plan.rules,
    terms=plan.terms,
    show=report.show,
    overview=lambda _records, _context: Overview(),
)
