"""`[bench]`: calls that are checked and timed beside their baselines."""

from __future__ import annotations

from twinrun.protocol.bench import BenchResult
from twinrun.workloads.bench import calls, plan
from twinrun.workloads.settings import PointSettings
from twinrun.workloads.workload import Workload

WORKLOAD = Workload(
    table="bench",
    tables=plan.BenchTables,
    plan_part=plan.BenchPlan,
    point_part=plan.BenchPoint,
    result=BenchResult,
    headline=("speedup", "time", "error"),
    factors=calls.FACTORS,
    smaller="name other cases with --set cases=",
    timed=True,
    measures_gpus=True,
    check=plan.check,
    plan=plan.plan,
    describe=plan.describe,
    settings=PointSettings(of=plan.settings, as_written=plan.as_written),
    job=plan.job,
    progress=calls.progress,
    numbers=calls.numbers,
    rules=calls.rules,
    terms=calls.terms,
    show=calls.show,
    overview=calls.overview,
)
