"""From a recipe of an evaluation to the one placement at which it runs, and to the job of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from twinrun.foundation.errors import InputError
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.protocol.evaluation import MEAN, EvaluationJob, NamedTask, PackageSource
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.training import TrainingJob, identity
from twinrun.workloads.data_request import DataRequest
from twinrun.workloads.evaluation.manifest import (
    EvaluationPlan,
    EvaluationPoint,
    EvaluationTables,
    check_names,
    demand_known,
)
from twinrun.workloads.settings import Fingerprint, flat
from twinrun.workloads.sweep import placement, refuse_demands, sizes
from twinrun.workloads.training_terms import fingerprint, refuse_composer
from twinrun.workloads.workload import (
    Choice,
    Demand,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Run,
    WorkloadPlan,
)

DOCUMENTS = "documents"
SCORE, ERROR, RATE, KEPT = "score", "score-error", "requests-per-second", "kept-fall"
FORWARD = "forward-share"
HARNESS = "lm-eval"
# Frameworks that the ranks of a training import when they start.
_MODULES = {"composer": ("twinrun.train.composer_loop",), "plain": ("twinrun.train.data_parallel",)}


def check(recipe: LoadedRecipe[EvaluationTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold the names inside recipe.toml, and what claims ask, against each other; raises InputError."""
    check_names(recipe)
    tables = recipe.tables
    refuse_demands(demands, lambda one: _missing(tables, one))
    sequence = tables.models[tables.evaluation.training.model].sequence
    known = {
        name: DataRequest(name=name, source=source, sequence=sequence) for name, source in tables.data.items()
    }
    return known | ({DOCUMENTS: _documents(tables.documents)} if tables.documents else {})


def _documents(source: PackageSource) -> DataRequest:
    return DataRequest(name=DOCUMENTS, source=source, sequence=0)


def _missing(tables: EvaluationTables, asked: Demand) -> str | None:
    """Return why no scale gives a number, or None."""
    if asked.point is not None and not any(tables.scale(name).sweep.gives(asked.point) for name in SCALES):
        return f"no scale has a point {asked.point}"
    names = (*tables.tasks, MEAN)
    given = {SCORE: names, ERROR: tuple(f"{name}/error" for name in names), "loss": ("loss",)}
    given |= {RATE: (RATE,), FORWARD: (FORWARD,), "step-time": ("step-time",), KEPT: (KEPT,)}
    if asked.metric not in given:
        return f"an evaluation measures {', '.join(given)}"
    if asked.measurement is None and asked.metric == SCORE:
        return "which task is not said: `measurement` is needed"
    if asked.measurement in (None, *given[asked.metric]):
        return None
    return f"the tasks give no measurement {asked.measurement}"


def plan(request: PlanRequest[EvaluationTables]) -> WorkloadPlan[EvaluationPlan, EvaluationPoint]:
    """Turn a request into one evaluation at one placement.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: this machine has too few devices.
    """
    recipe, tables, overrides = request.recipe, request.recipe.tables, dict(request.overrides)
    scale, hardware = tables.scale(request.scale), request.hardware
    counts = sizes(scale.sweep, requested=overrides.pop("devices", None), devices=hardware.devices)
    asked = overlay(tables.evaluation, scale=scale.set, manifest=recipe.manifest, user=overrides)
    demand_known(tables, asked, "--set ")
    # Scores are the same at every size: the most devices are the fastest.
    place, training = placement(scale.sweep, counts[-1]), asked.training
    if training.trainer == "deepspeed":
        raise InputError(
            "a training that is scored has no layouts",
            place="--set training.trainer",
            found=training.trainer,
            allowed=tuple(_MODULES),
        )
    refuse_composer(training, hardware, table="training.")
    if training.global_batch % place.world_size:
        raise InputError(
            "the global batch does not divide over the devices",
            place="--set training.global_batch",
            found=training.global_batch,
            allowed=f"a multiple of {place.world_size}",
        )
    named = tuple(NamedTask(name=name, **tables.tasks[name].model_dump()) for name in asked.tasks)
    point = EvaluationPoint(microbatches=_microbatches(training.microbatch))
    shape, data = tables.models[training.model], tables.data[training.data]
    return WorkloadPlan(
        part=EvaluationPlan(
            evaluation=asked, tasks=named, shape=shape, data=data, documents=_needed(tables, named)
        ),
        points=(Point(**place.model_dump(), part=point),),
        choices=(
            Choice(name="model", value=training.model, because=f"trained for {training.steps} steps"),
            Choice(
                name="tasks", value=plural(len(named), "task"), because=", ".join(one.name for one in named)
            ),
        ),
    )


def _needed(tables: EvaluationTables, named: Sequence[NamedTask]) -> PackageSource | None:
    """Return where the documents come from; raises InputError where the recipe does not say."""
    harness = [one.name for one in named if one.kind == "harness"]
    if harness and tables.documents is None:
        raise InputError("tasks of the harness need documents", place=DOCUMENTS, found=", ".join(harness))
    return tables.documents if harness else None


def _microbatches(largest: object) -> tuple[int, ...]:
    """Return the size that was asked for, and halves of it for devices with less memory."""
    assert isinstance(largest, int), "refused when the manifest is read"
    return tuple(largest >> half for half in range(largest.bit_length()))


def describe(part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]) -> PlanDescription:
    """Return what follows from a plan of an evaluation."""
    asked, training = part.evaluation, part.evaluation.training
    rules = {one.name: f"{one.rule}, {asked.shots} shots" for one in part.tasks}
    scored = {name: value for name, value in flat(asked).items() if not name.startswith("training.")}
    return PlanDescription(
        subject=f"{training.model}, {plural(len(part.tasks), 'task')}",
        configuration=(
            ("Evaluation", scored),
            ("Tasks", rules),
            ("Training", flat(training)),
            ("Model", flat(part.shape)),
            ("Data", flat(part.data)),
        ),
        points={
            point.id: PointDescription(
                attempts=tuple(f"microbatch {size}" for size in point.part.microbatches),
                steps=training.steps,
                rising_steps=training.optimizer.warmup_steps or 0,
                expected={"parameters": (part.shape.parameters(),)},
            )
            for point in points
        },
        data=DataRequest(name=training.data, source=part.data, sequence=part.shape.sequence),
        documents=_documents(part.documents) if part.documents else None,
        identity=identity(part.shape, training),
        kernels=training.kernels == "ours" or training.attention == "triton",
        modules=_MODULES[training.trainer],
        fingerprint=_fingerprint(part),
    )


def _fingerprint(part: EvaluationPlan) -> Fingerprint:
    """Return the training's fields, and those of a score: harness, shots, and the rule of each task."""
    asked = part.evaluation
    tokens = asked.training.steps * asked.training.global_batch * part.shape.sequence
    return {
        **fingerprint(part.shape, asked.training, part.data),
        "tokens": tokens,
        "evaluation.harness": HARNESS,
        "evaluation.shots": asked.shots,
        "evaluation.precision": asked.precision,
        "evaluation.limit": asked.limit or "none",
        **{f"evaluation.rule.{one.name}": one.rule for one in part.tasks},
    }


def job(part: EvaluationPlan, point: Point[EvaluationPoint], attempt: int, run: Run) -> EvaluationJob:
    """Return the job of one attempt, with the microbatch that its training tries."""
    asked, training = part.evaluation, part.evaluation.training
    folder = PurePosixPath(run.metrics).parent
    saved = run.checkpointing or Checkpointing(
        place=str(folder / "checkpoints" / point.id), steps=asked.every or training.steps
    )
    shared = run.model_dump(exclude={"checkpointing"}) | {"point": point.id, "world_size": point.world_size}
    trained = TrainingJob(
        **shared,
        checkpointing=saved,
        shape=part.shape,
        training=training,
        microbatch=point.part.microbatches[attempt],
        sharding="none" if point.world_size == 1 else training.sharding,
    )
    documents = _documents(part.documents).folder() if part.documents else ""
    return EvaluationJob(
        **{name: value for name, value in shared.items() if name not in ("data", "power")},
        tasks=part.tasks,
        shots=asked.shots,
        batch=asked.batch,
        precision=asked.precision,
        limit=asked.limit,
        training=trained,
        every=asked.every,
        documents=str(PurePosixPath(run.data).parent / documents) if documents else "",
        kept=str(folder / "models" / point.id),
    )
