"""What a recipe's script may bring: a model of its own, and metrics; and what is refused of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("streaming", reason="needs the packages of a stack")

from tests.train.checkpoint_jobs import saving
from tests.train.small import ROOT, SHAPE, STEPS, TRAINING, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingJob, TrainingResult, Validation

GUIDE = (ROOT / "docs" / "guides" / "add-a-recipe.md").read_text(encoding="utf-8")
# A model and an engine of a recipe's own, as the guide has them.
OWN_MODEL = next(
    text for text in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "model=build" in text
)
OWN_ENGINE = "\n".join(*re.findall(r"`(from [^`]+)`, then\s+`(training.main[^`]+)`", GUIDE))
OWN_LOOP = """
import torch
from twinrun.train import building, training
from twinrun.train.metrics import Meter

def train(job):
    model, device = building.build_model(job, torch.device("cpu")), torch.device("cpu")
    meter = Meter(job, device)
    meter.start()
    for _ in range(job.training.steps):
        meter.add_loss(torch.tensor(1.0), job.training.global_batch)
        meter.end_step()
    meter.report(METRIC, VALUE)
    return meter.result(model=model, kernel="none", parallelism="single")

training.main(loop=train)
"""


def script(folder: Path, text: str, **values: object) -> Path:
    for name, value in values.items():
        text = text.replace(name, repr(value))
    path = folder / "train.py"
    path.write_text(text)
    return path


def result(job: TrainingJob) -> TrainingResult:
    return load_json(Path(job.out) / "result.json", TrainingResult)


@pytest.mark.parametrize("trainer", ["plain", "composer"])
def test_a_model_of_the_script_is_counted_and_saved_by_every_trainer(
    make_job: MakeJob, tmp_path: Path, trainer: str
) -> None:
    pytest.importorskip("composer")
    job = saving(make_job(trainer=trainer), tmp_path / "place")
    done = launch(script(tmp_path, OWN_MODEL), job)
    assert done.returncode == 0, done.stderr[-2000:]
    assert result(job).parameters == SHAPE.parameters()
    assert (tmp_path / "place" / f"step-{STEPS:08d}").is_dir()
    usual = make_job(trainer=trainer)
    assert launch(TRAINING, usual).returncode == 0
    assert result(job).weights_hash != result(usual).weights_hash


def test_another_model_than_the_manifest_counts_ends_the_run(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    text = OWN_MODEL.replace("Gpt2(shape,", 'Gpt2(shape.model_copy(update={"layers": 1}),')
    done = launch(script(tmp_path, text), job)
    assert done.returncode == 1
    half = SHAPE.model_copy(update={"layers": 1}).parameters()
    assert f"found: {half:,} parameters" in done.stderr
    assert not (Path(job.out) / "metrics.jsonl").exists()


def test_a_script_that_saves_nothing_is_refused_with_checkpoints(make_job: MakeJob, tmp_path: Path) -> None:
    path = script(tmp_path, OWN_LOOP, METRIC="x", VALUE=1.0)
    done = launch(path, saving(make_job(), tmp_path / "place"))
    assert done.returncode == 1
    assert "this script keeps no checkpoints" in done.stderr


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [
        ("bits-per-byte", 1.5, None),
        ("bits-per-bite", 1.5, "not named by"),
        ("bits-per-byte", float("nan"), "a report is a finite number"),
    ],
)
def test_a_report_has_a_row_and_a_number(
    make_job: MakeJob, tmp_path: Path, metric: str, value: float, said: str | None
) -> None:
    job = make_job(reports={"bits-per-byte": "bits/byte"})
    text = OWN_LOOP.replace("VALUE", f'float("{value}")')
    done = launch(script(tmp_path, text, METRIC=metric), job)
    if said:
        assert done.returncode == 1
        assert said in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    (reported,) = result(job).reported
    assert (reported.metric, reported.value) == (metric, value)


@pytest.mark.parametrize("trainer", ["plain", "composer"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_validation_loss_is_the_same_at_every_size(
    make_job: MakeJob, trainer: str, world_size: int
) -> None:
    """Seven sequences fill neither the batches nor the ranks."""
    pytest.importorskip("composer")
    validation = Validation(data="test", every=4, sequences=7)
    made = make_job(trainer=trainer, world_size=world_size, validation=validation)
    job = made.model_copy(update={"validation_data": made.data})
    done = launch(TRAINING, job)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(result(job).validation)
    assert list(found) == [4, STEPS]
    expected = _alone(make_job)
    assert found == pytest.approx(expected, rel=1e-5)


def _alone(make_job: MakeJob) -> dict[int, float]:
    if not ALONE:
        validation = Validation(data="test", every=4, sequences=7)
        job = make_job(trainer="plain", microbatch=1, validation=validation)
        job = job.model_copy(update={"validation_data": job.data})
        assert launch(TRAINING, job).returncode == 0
        ALONE.update(result(job).validation)
        # It falls, as the training loss does.
        assert ALONE[STEPS] < ALONE[4]
    return ALONE


ALONE: dict[int, float] = {}


ENGINES = """
from twinrun.train import building, data_parallel, ranks

def start(job):
    ranks.join(job, alone=True)

def build(job, device):
    model = building.build_model(job, device)
    return Mine(job, model, data_parallel.fused_loss(model))

class Mine(data_parallel.DdpReplica):
    parallelism = "mine"
"""


def test_an_engine_of_the_recipe_trains_its_layouts(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(ENGINES)
    path = script(tmp_path, OWN_ENGINE)
    mine = make_job(sharding="none").model_copy(update={"layout": Layout(framework="mine")})
    done = launch(path, mine)
    assert done.returncode == 0, done.stderr[-2000:]
    usual = make_job(sharding="none").model_copy(update={"layout": Layout(framework="torch")})
    assert launch(TRAINING, usual).returncode == 0
    assert [step.loss for step in result(mine).steps] == [step.loss for step in result(usual).steps]
    assert result(mine).parallelism == "mine"
    nobody = launch(TRAINING, mine)
    assert "no module trains this layout" in nobody.stderr
