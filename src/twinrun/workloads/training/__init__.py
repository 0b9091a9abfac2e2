"""`[training]`: one training configuration at several placements."""

from __future__ import annotations

from twinrun.protocol.training import TrainingResult
from twinrun.workloads.settings import PointSettings
from twinrun.workloads.training import numbers, plan, report
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint, TrainingTables
from twinrun.workloads.workload import Workload

WORKLOAD = Workload(
    table="training",
    tables=TrainingTables,
    plan_part=TrainingPlan,
    point_part=TrainingPoint,
    result=TrainingResult,
    module="twinrun.train.training",
    headline=("model-flops-share", "tokens-per-second"),
    factors=numbers.FACTORS,
    smaller="choose a smaller model, --set activation_checkpointing=true, or --set microbatch=1",
    saves=True,
    timed=True,
    check=plan.check,
    plan=plan.plan,
    describe=plan.describe,
    settings=PointSettings(of=plan.settings, as_written=plan.as_written),
    job=plan.job,
    progress=numbers.progress,
    numbers=numbers.numbers,
    rules=lambda _tables, part, point: numbers.rules(part, point),
    terms=numbers.terms,
    show=report.show,
    overview=report.overview,
)
