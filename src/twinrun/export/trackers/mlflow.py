"""MLflow: a file store with an experiment for the recipe and a run for each point."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from twinrun.export.tracked_run import NUMBER_PREFIX, TrackedPoint, TrackedRun, variables_set
from twinrun.foundation.files import copy_regular
from twinrun.foundation.redaction import demand_clean

PACKAGE = "mlflow"
INSTALL = 'pip install "twinrun[track]"'
# From 3.7 on the file store has to be asked for. What is used is reported to nobody.
VARIABLES = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
# Most that one call takes.
METRICS, PARAMETERS = 1000, 100
PARAMETER_CHARACTERS = 6000
# The store has a file for each name, so that `a` and `a/b` cannot both be.
NOT_IN_NAMES = re.compile(r"[^\w\-. :]")


def write(folder: Path, run: TrackedRun) -> str:
    """Write one MLflow run for each point, with record and report as its artifacts.

    Raises:
        InputError: one of them is a link, or has a credential in it.
    """
    with variables_set(VARIABLES), tempfile.TemporaryDirectory() as copies:
        from mlflow import MlflowClient

        for file in run.files:
            copy_regular(file, copy := Path(copies) / file.name)
            demand_clean(copy.read_text(encoding="utf-8", errors="replace"), str(file))
        client = MlflowClient(folder.absolute().as_uri())
        experiment = client.create_experiment(run.recipe)
        for point in run.points:
            _write_point(client, experiment, run, point, Path(copies))
    return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"


def _write_point(client: Any, experiment: str, run: TrackedRun, point: TrackedPoint, artifacts: Path) -> None:
    from mlflow.entities import Param

    tags = {"run": run.run, "mlflow.note.content": run.summary}
    tags |= {_name(f"verdict.{claim}"): verdict for claim, verdict in run.verdicts.items()}
    made = client.create_run(
        experiment, start_time=_milliseconds(point.began), run_name=f"{run.run} {point.id}", tags=tags
    )
    number = made.info.run_id
    parameters = (
        Param(_name(name), value[:PARAMETER_CHARACTERS]) for name, value in point.parameters.items()
    )
    while some := list(islice(parameters, PARAMETERS)):
        client.log_batch(number, params=some)
    metrics = _metrics(point)
    while some := list(islice(metrics, METRICS)):
        client.log_batch(number, metrics=some)
    client.log_artifacts(number, str(artifacts))
    client.set_terminated(number, "FINISHED", end_time=_milliseconds(point.time_of(point.steps)))


def _metrics(point: TrackedPoint) -> Iterator[Any]:
    from mlflow.entities import Metric

    for series in point.series:
        for step, value in series.values:
            yield Metric(_name(series.name), value, _milliseconds(point.time_of(step)), step)
    for name, value in point.numbers.items():
        yield Metric(_name(name), value, _milliseconds(point.time_of(point.steps)), point.steps)


def _name(name: str) -> str:
    """Return a name that MLflow takes."""
    prefix = NUMBER_PREFIX if name.startswith(NUMBER_PREFIX) else ""
    return prefix + NOT_IN_NAMES.sub("_", name.removeprefix(prefix))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)
