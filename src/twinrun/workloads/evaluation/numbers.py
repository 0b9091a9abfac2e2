"""From what the ranks report of an evaluation to the numbers of its record.

The score of a task is named after it, `TASK`, its standard error `TASK/error`, what another rule makes of the
same answers `TASK@RULE`, and the score of an earlier checkpoint `TASK/step-STEP`, its standard error
`TASK/step-STEP/error`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from twinrun.foundation.errors import RunError
from twinrun.foundation.text import GIB, TERA
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.evaluation import MEAN, EvaluationLine, EvaluationResult, ModelScores, TaskScore
from twinrun.protocol.formulas import FORWARD_SHARE
from twinrun.protocol.measurements import Fact, Measurement, Numbers, Series, rate, sampled
from twinrun.protocol.model_source import in_words
from twinrun.protocol.training import StepMetrics, TrainingResult
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint
from twinrun.workloads.evaluation.plan import ERROR, FORWARD, KEPT, RATE, SCORE
from twinrun.workloads.settings import factor, flat
from twinrun.workloads.workload import ComparisonTerms, Point, PointRecord, Premise, Progress

# Parts of a curve over which losses are averaged.
TENTHS = 10
FACTORS = (
    factor("model", "large", "large", "another model"),
    factor("weights sha256", "none", "large", "other weights"),
    factor("tensors sha256", "none", "large", "other weights, or another type of them"),
    factor("evaluation.tasks", "large", "large", "other questions"),
    factor("evaluation.shots", "large", "large", "longer prompts, other answers"),
    factor("rule of *", "none", "large", "another rule has moved HellaSwag by ten points"),
    factor("prompts of *", "some", "large", "other prompts"),
    factor("harness", "some", "large", "another version builds other prompts"),
    factor("tokenizer sha256", "some", "large", "other tokens"),
    factor("evaluation.precision", "large", "small", "rounding of log-likelihoods"),
    factor("evaluation.batch", "some", "small", "size of one forward pass"),
    factor("evaluation.*", "some", "some", "what is scored, and how"),
    factor("training.*", "some", "large", "another training"),
    factor("shape.*", "some", "large", "part of the model"),
    factor("data.*", "none", "large", "another source of tokens"),
)


def progress(line: bytes) -> Progress:
    """Read the line that a training step or a batch of requests writes."""
    if b'"task":' not in line:
        step = StepMetrics.model_validate_json(line)
        return Progress(done=step.step, status=f"loss {step.loss:.4f}  {step.seconds:.3f} s/step")
    found = EvaluationLine.model_validate_json(line)
    if found.score is not None:
        return Progress(done=0, status=f"{found.task}: score {found.score:.3f}")
    return Progress(done=0, status=f"{found.task}: {found.done} sequences scored")


def measured(part: EvaluationPlan, _point: Point[EvaluationPoint], result: EvaluationResult) -> Numbers:
    """Return scores with their errors, and the losses of the training; raises RunError for another model."""
    last, before = result.models[-1], result.models[:-1]
    found = [one for task in last.tasks for one in _task(task)]
    found += [_score(f"{MEAN}", _mean(last)), _error(MEAN, _mean_error(last))]
    for model in before:
        found += [one for task in model.tasks for one in _at_step(model, task.task, task.score, task.error)]
        found += _at_step(model, MEAN, _mean(model), _mean_error(model))
    found += _rates(last)
    memory = result.peak_memory_bytes / GIB
    trained = result.training
    if trained is None:
        found.append(sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"))
        facts: dict[str, Fact] = {**_facts(result), "parameters": last.parameters}
        return Numbers(measurements=tuple(found), facts=facts)
    training = _training(part, trained)
    found.append(sampled("peak-memory", [memory], metric="peak-memory", unit="GiB", per="device"))
    return Numbers(
        measurements=(*training.measurements, *found),
        series=training.series,
        facts={**training.facts, **_facts(result)},
    )


def _at_step(model: ModelScores, name: str, score: float, error: float) -> tuple[Measurement, ...]:
    """Return what a checkpoint before the last got."""
    at = f"{name}/step-{model.step}"
    return _score(at, score), _error(at, error)


def _rates(model: ModelScores) -> Iterator[Measurement]:
    """Yield requests a second, and their share of what the forward passes alone would reach."""
    names = ("requests", "seconds", "forward_seconds")
    requests, seconds, forward = (sum(getattr(one, name) for one in model.tasks) for name in names)
    yield sampled(RATE, [requests / seconds], metric=RATE, unit="1/s", per="run")
    share = [forward / seconds]
    yield sampled(FORWARD, share, metric=FORWARD, unit="ratio", per="run", formula=FORWARD_SHARE)


def _task(one: TaskScore) -> Iterator[Measurement]:
    yield _score(one.task, one.score, rule=one.rule, shots=str(one.shots))
    yield _error(one.task, one.error)
    for rule, score in one.by_rule.items():
        if rule != one.rule:
            yield _score(f"{one.task}@{rule}", score, rule=rule, shots=str(one.shots))


def _score(name: str, value: float, **labels: str) -> Measurement:
    return sampled(name, [value], metric=SCORE, unit="ratio", per="run", labels=labels)


def _error(name: str, value: float) -> Measurement:
    return sampled(f"{name}/error", [value], metric=ERROR, unit="ratio", per="run")


def _mean(model: ModelScores) -> float:
    """Return the mean over tasks, each counting once however many documents it has."""
    return sum(one.score for one in model.tasks) / len(model.tasks)


def _mean_error(model: ModelScores) -> float:
    return math.sqrt(sum(one.error**2 for one in model.tasks)) / len(model.tasks)


def _training(part: EvaluationPlan, trained: TrainingResult) -> Numbers:
    """Return the losses and step times of the training; raises RunError for another model."""
    assert part.shape is not None, "a training has a model of its own"
    expected = part.shape.parameters()
    if trained.parameters != expected:
        raise RunError(
            "the ranks trained another model than was planned",
            place=trained.point,
            found=f"{trained.parameters:,} parameters",
            allowed=f"{expected:,} by the closed form of `{part.shape.family}`",
        )
    timed = [step.seconds for step in trained.steps if step.timed]
    losses = tuple(step.loss for step in trained.steps)
    return Numbers(
        measurements=(sampled("step-time", timed, metric="step-time", unit="s", per="run"),),
        series=(Series(id="loss", metric="loss", unit="nats/token", per="run", values=losses),),
        facts={
            "microbatch": trained.microbatch,
            "parameters": trained.parameters,
            "parallelism": trained.parallelism,
            "attention backend": trained.attention_backend,
            "data hash": trained.data_hash,
            "order hash": trained.order_hash,
            "initial weights hash": trained.weights_hash,
        },
    )


def _facts(result: EvaluationResult) -> dict[str, Fact]:
    facts: dict[str, Fact] = {
        "device name": result.device_name,
        "harness": result.harness,
        "tokenizer sha256": result.tokenizer_sha256,
        "samples sha256": result.samples_sha256,
        "weights sha256": result.models[-1].sha256,
        "tensors sha256": result.models[-1].tensors_sha256,
        "checkpoint sha256": result.models[-1].checkpoint_sha256,
    }
    for model in result.models[:-1]:
        facts[f"weights sha256 at step {model.step}"] = model.sha256
        facts[f"checkpoint sha256 at step {model.step}"] = model.checkpoint_sha256
    for one in result.models[-1].tasks:
        facts |= {
            f"rule of {one.task}": one.rule,
            f"documents of {one.task}": one.documents,
            f"requests of {one.task}": one.requests,
            f"prompts of {one.task}": one.prompts_sha256,
            f"version of {one.task}": one.version,
            f"batch of {one.task}": one.batch,
        }
    return facts


def derived(
    part: EvaluationPlan, point: PointRecord[EvaluationPoint], _gpu: Gpu | None
) -> tuple[Measurement, ...]:
    """Return the model FLOP/s and the last loss of the training, and what its curve kept of its fall."""
    found: list[Measurement] = []
    if (step_time := point.measurement("step-time")) and part.shape:
        tokens = part.evaluation.training.global_batch * part.shape.sequence
        work, name = part.shape.flops_per_token() * tokens / point.devices / TERA, "model-flops"
        formula = part.shape.formula
        found.append(
            rate(step_time, work, name=name, metric=name, unit="TFLOP/s", per="device", formula=formula)
        )
    if (losses := point.one_series("loss")) and losses.values:
        found.append(sampled("loss", losses.values[-1:], metric="loss", unit="nats/token", per="run"))
        if (kept := kept_fall(losses.values)) is not None:
            found.append(sampled(KEPT, [kept], metric=KEPT, unit="ratio", per="run"))
    return tuple(found)


def kept_fall(losses: Sequence[float]) -> float | None:
    """Return what a curve has kept at its end of its fall, 1 at most; None where it never fell.

    The ends of the fall are means over a tenth of the steps: the losses of single batches scatter.
    """
    size = max(1, len(losses) // TENTHS)
    sums = tuple(accumulate(losses, initial=0.0))
    means = [(end - begin) / size for begin, end in zip(sums, sums[size:], strict=False)]
    # Not a number anywhere leaves no means to compare.
    fall = losses[0] - min(means)
    if not all(map(math.isfinite, losses)) or fall <= 0:
        return None
    return max(0.0, (losses[0] - means[-1]) / fall)


def terms(part: EvaluationPlan, point: PointRecord[EvaluationPoint]) -> ComparisonTerms:
    """Return what an evaluation is compared by: scores only where tasks, rules and prompts are the same."""
    asked = part.evaluation
    prompts = {
        name: value for name, value in point.facts.items() if name.startswith(("rule of", "prompts of"))
    }
    settings = {name: str(value) for name, value in prompts.items()}
    settings |= {
        name: str(point.facts.get(name)) for name in ("harness", "tokenizer sha256", "weights sha256")
    }
    settings |= {
        f"evaluation.{name}": value
        for name, value in flat(asked).items()
        if name != "model" and not name.startswith("training.")
    }
    if part.shape and part.data:
        trained = {"training": asked.training, "shape": part.shape, "data": part.data}
        settings |= {
            f"{table}.{name}": value for table, one in trained.items() for name, value in flat(one).items()
        }
    model = in_words(part.given) if part.given else asked.training.model
    return ComparisonTerms(
        settings={"model": model, **settings},
        premises=(
            Premise(values=prompts, otherwise="other questions, or scored by another rule ({changed})"),
        ),
    )
