"""`[evaluation]`: a model on tasks of lm-eval, trained first where the recipe has a training for it."""

from __future__ import annotations

from twinrun.protocol.evaluation import EvaluationResult
from twinrun.workloads.evaluation import numbers, plan, report
from twinrun.workloads.evaluation.plan import EvaluationPlan, EvaluationPoint, EvaluationTables
from twinrun.workloads.settings import PointSettings
from twinrun.workloads.workload import Workload

WORKLOAD = Workload(
    table="evaluation",
    tables=EvaluationTables,
    plan_part=EvaluationPlan,
    point_part=EvaluationPoint,
    result=EvaluationResult,
    module="twinrun.train.evaluation",
    headline=("score",),
    factors=numbers.FACTORS,
    smaller="choose a smaller model, or --set training.microbatch=1 and --set batch=1",
    saves=True,
    timed=False,
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
