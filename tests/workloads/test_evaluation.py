"""Scores of checkpoints before the last: numbers, facts, and the picture beside the loss."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.records import PROJECT, plan
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.protocol.evaluation import EvaluationJob, EvaluationResult, GivenModel, ModelScores, TaskScore
from twinrun.protocol.measurements import FORWARD_SHARE, Series
from twinrun.results.judged import measured_points
from twinrun.runs.checkpointing import checkpointing_of
from twinrun.runs.data import demand_documents, given_folder, take_documents
from twinrun.workloads import load_workload
from twinrun.workloads.evaluation import scores
from twinrun.workloads.tables_and_charts import LineChart
from twinrun.workloads.workload import PictureContext, PointRecord, RecordView, Run

STEPS = 120
TASKS = 'tasks=["fixture-shuffled", "boolq"]'


def scored(step: int, right: float) -> ModelScores:
    tasks = tuple(
        TaskScore(
            task=one.name,
            rule=one.rule,
            shots=0,
            documents=48,
            score=right,
            error=0.07,
            by_rule={one.rule: right},
            prompts_sha256="p",
            version="1",
            requests=96,
            batch=16,
            seconds=2.0,
            forward_seconds=0.5,
        )
        for one in plan("mpt-chinchilla", scale="smoke", gpu=None, settings=(TASKS,)).part.tasks
    )
    return ModelScores(
        step=step,
        checkpoint_sha256=f"c{step}",
        sha256=f"w{step}",
        tensors_sha256=f"t{step}",
        parameters=9,
        tasks=tasks,
    )


@pytest.fixture
def record() -> RecordView:
    made = plan("mpt-chinchilla", scale="smoke", gpu=None, settings=(TASKS,))
    result = EvaluationResult(
        point="devices=1",
        device_name="a processor",
        libraries={},
        models=(scored(40, 0.5), scored(80, 0.625), scored(STEPS, 0.75)),
        samples_sha256="s",
        harness="lm-eval",
        tokenizer_sha256="t",
        peak_memory_bytes=1,
    )
    sent = PointRecord(id="devices=1", hosts=("node-0",), result=result)
    (point,) = measured_points(made, (sent,), None)
    losses = Series(id="loss", metric="loss", unit="nats/token", per="run", values=(3.0,) * STEPS)
    point = dataclasses.replace(point, series=(losses,))
    return RecordView(label="here", run="r", part=made.part, gpu=None, points=(point,))


def test_a_score_of_a_checkpoint_has_its_error_and_both_digests(record: RecordView) -> None:
    (point,) = record.points
    for name, tasks in (("fixture-shuffled", 1), ("mean", 2)):
        for suffix, right in (("/step-40", 0.5), ("/step-80", 0.625), ("", 0.75)):
            score, of_it = (point.measurement(f"{name}{suffix}{end}") for end in ("", "/error"))
            assert score is not None
            assert of_it is not None
            assert score.median == right
            assert of_it.median == pytest.approx(math.sqrt(right * (1 - right) / 47 / tasks))


def test_requests_a_second_and_the_share_of_forward_passes_are_of_the_last_model(record: RecordView) -> None:
    (point,) = record.points
    rate, share = point.measurement("requests-per-second"), point.measurement("forward-share")
    assert rate is not None
    assert share is not None
    assert (rate.median, rate.unit) == (48.0, "1/s")
    assert (share.median, share.unit, share.formula) == (0.25, "ratio", FORWARD_SHARE)


def test_scores_of_checkpoints_are_a_table_and_the_loss_a_picture(record: RecordView) -> None:
    (loss,) = scores.overview([record], PictureContext(recipe=PROJECT.recipe("mpt-chinchilla"))).charts
    assert isinstance(loss, LineChart)
    assert len(loss.curves[0].spots) == STEPS
    (table,) = scores.show(record)[1:]
    assert [(row[0].text, row[1].text) for row in table.rows] == [
        ("40", "0.500"),
        ("80", "0.625"),
        (str(STEPS), "0.750"),
    ]
    assert table.rows[0][1].detail == "±0.073"
    assert table.notes[0] == "checkpoint after step 40: sha256 c40"


GIVEN = f"model=cerebras/Cerebras-GPT-1.3B@{'0' * 40}"


def test_a_model_that_is_there_is_trained_on_nothing() -> None:
    made = plan("mpt-chinchilla", scale="node", settings=(GIVEN,))
    described = load_workload("evaluation").describe(made.part, made.points)
    assert described.subject == "cerebras/Cerebras-GPT-1.3B@000000000000, 6 tasks"
    assert (described.data, described.identity) == (None, {})
    assert described.documents is not None
    marks = made.description.marks(PROJECT.recipe("mpt-chinchilla").published.fingerprint)
    own = {name: value for name, value in marks.items() if name.startswith("model.")}
    assert own == {
        "model.kind": "repository",
        "model.repository": "cerebras/Cerebras-GPT-1.3B",
        "model.revision": "0" * 40,
    }
    seen = {"recipe": "r", "accelerator": False, "out": "/o", "metrics": "/r/m", "attempt": "1"}
    run = Run.model_validate({**seen, "folders": {"documents": "/d", "model": "/m"}})
    job = load_workload("evaluation").job(made.part, made.points[0], 0, run)
    assert isinstance(job, EvaluationJob)
    assert (job.training, job.model, job.documents) == (None, GivenModel(folder="/m"), "/d")


def test_nothing_of_a_model_that_is_there_is_saved() -> None:
    made = plan("mpt-chinchilla", scale="node", settings=(GIVEN,))
    with pytest.raises(InputError, match="nothing is trained, so nothing is saved"):
        checkpointing_of(("steps=2",), workload=load_workload("evaluation"), plan=made)


def test_a_task_without_documents_is_refused_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "wsc273.jsonl"
    file.write_bytes(b"{}\r\n")
    named = f"documents={file}@{sha256_of_file(file)}"
    described = plan("mpt-chinchilla").description
    assert (described.undocumented, described.given_documents) == (("wsc273",), None)
    with pytest.raises(InputError, match="in no package") as caught:
        demand_documents(described.undocumented, described.given_documents)
    assert "--set documents=FOLDER/wsc273.jsonl@SHA256" in str(caught.value)

    made = plan("mpt-chinchilla", settings=(named,))
    assert made.description.undocumented == ()
    given = made.description.given_documents
    assert given is not None
    take_documents(given)
    assert (given_folder(given) / "wsc273.jsonl").read_bytes() == file.read_bytes()
    assert json.loads((given_folder(given) / "corpus.json").read_text()) == {
        "files": {"wsc273.jsonl": given.sha256}
    }
    settings = load_workload("evaluation").settings.of(made.part, made.points[0])
    assert settings["documents.wsc273.sha256"] == given.sha256
    assert str(tmp_path) not in str(settings)
    file.write_text("{}")
    with pytest.raises(InputError, match="not the documents that were named"):
        demand_documents((), given)
