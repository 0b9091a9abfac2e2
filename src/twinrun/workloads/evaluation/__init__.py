"""`[evaluation]`: a model on tasks of lm-eval, trained first where the recipe has a training for it."""

from __future__ import annotations

from twinrun.protocol.evaluation import EvaluationResult
from twinrun.workloads.evaluation import plan, scores
from twinrun.workloads.settings import PointSettings
from twinrun.workloads.workload import Workload

WORKLOAD = Workload(
    table="evaluation",
    tables=plan.EvaluationTables,
    plan_part=plan.EvaluationPlan,
    point_part=plan.EvaluationPoint,
    result=EvaluationResult,
    module="twinrun.train.evaluation",
    headline=("score",),
    factors=scores.FACTORS,
    smaller="choose a smaller model, or --set training.microbatch=1 and --set batch=1",
    saves=True,
    timed=False,
    check=plan.check,
    plan=plan.plan,
    describe=plan.describe,
    settings=PointSettings(of=plan.settings, as_written=plan.as_written),
    job=plan.job,
    progress=scores.progress,
    numbers=scores.numbers,
    rules=lambda _tables, part, point: scores.rules(part, point),
    terms=scores.terms,
    show=scores.show,
    overview=scores.overview,
)
