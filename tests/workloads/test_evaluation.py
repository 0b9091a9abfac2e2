"""Scores, those of checkpoints among them; models that are there; documents that no package has."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.records import plan, replaced, smoke_record
from twinrun.execution.engine import Engine
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.protocol.evaluation import EvaluationJob, GivenModel, ModelScores
from twinrun.report.page import overview
from twinrun.results.judged import Judged
from twinrun.runs.data import Maker, demand_documents, input_folders
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import LineChart
from twinrun.workloads.workload import Run

RECORD, POINT, STEPS = smoke_record("mpt-chinchilla"), "devices=1", 120


def scored(step: int, **changed: float) -> ModelScores:
    """Return what the model of the record got, with other answers to every task."""
    model: ModelScores = RECORD.points[0].result.models[-1]
    tasks = tuple(one.model_copy(update=changed) for one in model.tasks)
    return model.model_copy(update={"step": step, "checkpoint_sha256": f"c{step}", "tasks": tasks})


@pytest.fixture(scope="module")
def checkpoints() -> Judged:
    models = (scored(40, score=0.5), scored(80, score=0.625), scored(STEPS, score=0.75))
    return replaced(RECORD, POINT, models=models)


def test_a_score_of_a_checkpoint_has_its_error(checkpoints: Judged) -> None:
    (point,) = checkpoints.points
    values = {one.id: one.median for one in point.measurements}
    for name, tasks in (("fixture-shuffled", 1), ("mean", 7)):
        for suffix, right in (("/step-40", 0.5), ("/step-80", 0.625), ("", 0.75)):
            error = math.sqrt(right * (1 - right) / 47 / tasks)
            assert values[f"{name}{suffix}"] == right
            assert values[f"{name}{suffix}/error"] == pytest.approx(error)


def test_scores_of_checkpoints_stand_beside_the_last_and_the_loss_is_a_picture(checkpoints: Judged) -> None:
    (loss,) = overview([checkpoints], checkpoints.recipe, checkpoints.project).charts
    assert isinstance(loss, LineChart)
    assert len(loss.curves[0].spots) == STEPS
    (table,) = checkpoints.workload.show(checkpoints.view)
    assert [one.title for one in table.columns[:4]] == ["task", "score", "after\nstep 40", "after\nstep 80"]
    assert [one.text for one in table.rows[0][:4]] == ["fixture-shuffled", "0.750", "0.500", "0.625"]
    assert table.rows[0][2].detail == "±0.073"
    assert table.notes[-2] == "checkpoint after step 40: sha256 c40"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"models": (scored(STEPS, shots=5),)}, "tasks"),
        ({"models": (scored(STEPS, requests=47),)}, "requests of fixture-shuffled"),
        ({"models": (scored(STEPS, score=0.51),)}, "the score of fixture-shuffled"),
        ({"models": (scored(40), scored(STEPS))}, "steps of models"),
        ({"training": None}, "whether a model was trained"),
    ],
)
def test_scores_that_cannot_be_or_were_not_planned_are_refused(changed: dict[str, object], said: str) -> None:
    assert said in {one.what for one in replaced(RECORD, POINT, **changed).refusals}


GIVEN = f"model=cerebras/Cerebras-GPT-1.3B@{'0' * 40}"


def test_a_model_that_is_there_is_trained_on_nothing() -> None:
    made = plan("mpt-chinchilla", scale="node", settings=(GIVEN,))
    described = load_workload("evaluation").describe(made.part, made.points)
    assert described.subject == "cerebras/Cerebras-GPT-1.3B@000000000000, 6 tasks"
    assert (described.data, described.identity) == (None, {})
    assert described.documents is not None
    marks = described.fingerprint or {}
    named = ("repository", "cerebras/Cerebras-GPT-1.3B", "0" * 40)
    assert tuple(marks[f"model.{name}"] for name in ("kind", "repository", "revision")) == named
    assert "model.width" not in marks
    seen = {"recipe": "r", "accelerator": False, "out": "/o", "metrics": "/r/m", "attempt": "1"}
    run = Run.model_validate({**seen, "folders": {"documents": "/d", "model": "/m"}})
    job = load_workload("evaluation").job(made.part, made.points[0], 0, run)
    assert isinstance(job, EvaluationJob)
    assert (job.training, job.model, job.documents) == (None, GivenModel(folder="/m"), "/d")


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
    described = dataclasses.replace(made.description, data=None)
    folders = input_folders(described)
    Maker(Engine(), tmp_path / "log", print).inputs(described, folders)
    assert (folders["given"] / "wsc273.jsonl").read_bytes() == file.read_bytes()
    index = json.loads((folders["given"] / "corpus.json").read_text())
    assert index == {"files": {"wsc273.jsonl": given.sha256}}
    settings = load_workload("evaluation").settings.of(made.part, made.points[0])
    assert settings["documents.wsc273.sha256"] == given.sha256
    assert str(tmp_path) not in str(settings)
    file.write_text("{}")
    with pytest.raises(InputError, match="not the documents that were named"):
        demand_documents((), given)
