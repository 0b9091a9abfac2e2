"""What trackers are given of a run, read back with their own readers."""

from __future__ import annotations

import json
import os
import socket
import sys
from io import BytesIO
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.export.runs import record_with_power, write_run
from tests.records import LOSSES, ROOT, TRAINING
from twinrun.export.tracked_run import TrackedRun, tracked_run
from twinrun.export.trackers import choose_trackers
from twinrun.foundation.errors import InputError
from twinrun.parity.readers import log_entries
from twinrun.results.reading import FinishedRun

# What every tracker shows of each step.
STEPPED = ("loss", "step-time", "tokens-per-second", "model-flops", "model-flops-share", "power")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), record_with_power())


@pytest.fixture(scope="module")
def run(run_folder: Path) -> TrackedRun:
    return tracked_run(
        FinishedRun(record=record_with_power(), folder=run_folder, file=run_folder / "record.json")
    )


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_series_are_those_of_the_record(run: TrackedRun) -> None:
    record = record_with_power()
    for point, recorded in zip(run.points, record.points, strict=True):
        series = {one.name: dict(one.values) for one in point.series}
        assert set(STEPPED) <= set(series)
        assert tuple(series["loss"].values()) == LOSSES
        for name in STEPPED[1:]:
            median = recorded.measurement(name)
            assert median
            assert list(series[name].values()) == pytest.approx([median.median] * len(series[name])), name
        assert len(series["step-time"]) == point.steps == len(LOSSES)
        assert point.numbers == {f"record/{one.id}": one.median for one in recorded.measurements}
        training, shape = record.plan.part.training, record.plan.part.shape
        assert point.parameters["training.model"] == training.model
        assert point.parameters["training.global_batch"] == str(training.global_batch)
        assert point.parameters["model.width"] == str(shape.width)
        assert point.parameters["point"] == point.id
    # One point after the other, and none before the one ahead of it has ended.
    assert run.points[0].ended[-1] <= run.points[1].ended[0]


@pytest.mark.needs("tensorboard")
def test_tensorboard_reads_every_series(run: TrackedRun, tmp_path: Path, no_network: None) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.tag_types import TENSORS
    from tensorboard.plugins.hparams import metadata

    write = choose_trackers("tensorboard")["tensorboard"]
    assert write(tmp_path, run) == f"tensorboard --logdir {tmp_path}"
    for point in run.points:
        events = EventAccumulator(str(tmp_path / point.id), size_guidance={TENSORS: 0}).Reload()
        for one in point.series:
            found = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(one.name)]
            assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in one.values]
            assert events.SummaryMetadata(one.name).summary_description == one.unit
        for name, value in point.numbers.items():
            (event,) = events.Tensors(name)
            assert event.tensor_proto.float_val[0] == pytest.approx(value, rel=1e-6)
        begun = events.SummaryMetadata(metadata.SESSION_START_INFO_TAG).plugin_data.content
        parameters = metadata.parse_session_start_info_plugin_data(begun).hparams
        assert {*parameters} == {*point.parameters}
        assert parameters["training.model"].string_value == point.parameters["training.model"]
        assert parameters["training.global_batch"].number_value == 1536


@pytest.mark.needs("mlflow")
def test_mlflow_reads_every_series(
    run: TrackedRun, run_folder: Path, tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    write = choose_trackers("mlflow")["mlflow"]
    before = dict(os.environ)
    write(tmp_path / "store", run)
    assert dict(os.environ) == before
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((tmp_path / "store").as_uri())
    experiment = client.get_experiment_by_name(TRAINING)
    assert experiment
    found = {one.data.params["point"]: one for one in client.search_runs([experiment.experiment_id])}
    assert {*found} == {one.id for one in run.points}
    for point in run.points:
        one = found[point.id]
        assert one.info.status == "FINISHED"
        assert one.data.params == point.parameters
        for series in point.series:
            history = client.get_metric_history(one.info.run_id, series.name)
            assert [(metric.step, metric.value) for metric in history] == list(series.values)
        assert point.numbers.items() <= one.data.metrics.items()
        assert one.data.tags["run"] == run.run
        kept = Path(client.download_artifacts(one.info.run_id, "record.json"))
        assert kept.read_bytes() == (run_folder / "record.json").read_bytes()


@pytest.mark.needs("wandb")
def test_the_offline_folder_of_wandb_has_every_series(run: TrackedRun, tmp_path: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record as Line

    write = choose_trackers("wandb")["wandb"]
    write(tmp_path, run)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == len(run.points)
    assert min(file.stat().st_size for file in files) > 10_000
    for file in files:
        rows: dict[int, dict[str, float]] = {}
        parameters: dict[str, str] = {}
        for data in log_entries(BytesIO(file.read_bytes())):
            line = Line.FromString(data)
            parameters |= {one.key: json.loads(one.value_json) for one in line.run.config.update}
            values = {
                ".".join(one.nested_key) or one.key: json.loads(one.value_json) for one in line.history.item
            }
            rows |= {values["_step"]: values} if values else {}
        (point,) = (one for one in run.points if one.id == parameters["point"])
        assert point.parameters.items() <= parameters.items()
        for series in point.series:
            assert [(step, rows[step][series.name]) for step, _ in series.values] == list(series.values)


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    done = invoke(ROOT, "run", "recipes/no-such-recipe", "--track", name, "--out", str(tmp_path))
    install = "pip install wandb" if name == "wandb" else 'pip install "twinrun[track]"'
    assert done.returncode == 2
    assert "--track: this tracker is not installed" in done.stderr
    assert f"found: {name}" in done.stderr
    assert f"hint: {install}" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused() -> None:
    with pytest.raises(InputError, match="unknown tracker") as raised:
        choose_trackers("tensorbord")
    assert raised.value.allowed == ["mlflow", "tensorboard", "wandb"]
    assert raised.value.hint == "did you mean `tensorboard`?"
