"""Experiment trackers: a finished run in files that a tracker opens; nothing is sent anywhere."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twinrun.export.tracked_run import NUMBER_PREFIX, TrackedPoint, TrackedRun, variables_set
from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.files import copy_regular
from twinrun.foundation.redaction import demand_clean

OPTION = "--track"
# Most that one call of MLflow takes.
METRICS, PARAMETERS, PARAMETER_CHARACTERS = 1000, 100, 6000
# Its store has a file for each name, so that `a` and `a/b` cannot both be.
NOT_IN_NAMES = re.compile(r"[^\w\-. :]")


def write_mlflow(folder: Path, run: TrackedRun) -> str:
    """Write a file store: an experiment for the recipe, and a run for each point with record and report.

    Raises:
        InputError: one of them is a link, or has a credential in it.
    """
    # From 3.7 on the file store has to be asked for. What is used is reported to nobody.
    variables = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with variables_set(variables), tempfile.TemporaryDirectory() as copies:
        from mlflow import MlflowClient

        for file in run.files:
            copy_regular(file, copy := Path(copies) / file.name)
            demand_clean(copy.read_text(encoding="utf-8", errors="replace"), str(file))
        client = MlflowClient(folder.absolute().as_uri())
        experiment = client.create_experiment(run.recipe)
        for point in run.points:
            _write_mlflow_run(client, experiment, run, point, copies)
    return f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {folder}"


def _write_mlflow_run(client: Any, experiment: str, run: TrackedRun, point: TrackedPoint, files: str) -> None:
    from mlflow.entities import Metric, Param

    tags = {"run": run.run, "mlflow.note.content": run.summary}
    tags |= {_named(f"verdict.{claim}"): verdict for claim, verdict in run.verdicts.items()}
    began, ended = (round(seconds * 1000) for seconds in (point.began, point.time_of(point.steps)))
    made = client.create_run(experiment, start_time=began, run_name=f"{run.run} {point.id}", tags=tags)
    number = made.info.run_id
    parameters = [Param(_named(name), one[:PARAMETER_CHARACTERS]) for name, one in point.parameters.items()]
    metrics = [
        Metric(_named(series.name), value, round(point.time_of(step) * 1000), step)
        for series in point.series
        for step, value in series.values
    ]
    metrics += [Metric(_named(name), value, ended, point.steps) for name, value in point.numbers.items()]
    for start in range(0, len(parameters), PARAMETERS):
        client.log_batch(number, params=parameters[start : start + PARAMETERS])
    for start in range(0, len(metrics), METRICS):
        client.log_batch(number, metrics=metrics[start : start + METRICS])
    client.log_artifacts(number, files)
    client.set_terminated(number, "FINISHED", end_time=ended)


def _named(name: str) -> str:
    """Return a name that MLflow takes."""
    prefix = NUMBER_PREFIX if name.startswith(NUMBER_PREFIX) else ""
    return prefix + NOT_IN_NAMES.sub("_", name.removeprefix(prefix))


def write_tensorboard(folder: Path, run: TrackedRun) -> str:
    """Write one event file for each point, in a folder of its own."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for point in run.points:
        writer = EventFileWriter(str(folder / point.id))
        for event in _events(run, point):
            writer.add_event(event)
        writer.close()
    return f"tensorboard --logdir {folder}"


def _events(run: TrackedRun, point: TrackedPoint) -> Iterator[Any]:
    """Yield the parameters for the HParams page, what was found in words, and every number."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    def summary(tag: str, tensor: Any, metadata: Any) -> Any:
        return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])

    trial = f"{run.run}/{point.id}"
    parameters = {name: _typed(value) for name, value in point.parameters.items()}
    begins = hparams_pb(parameters, trial_id=trial, start_time_secs=point.began)
    yield Event(wall_time=point.began, step=0, summary=begins)
    said = "\n".join([run.summary, "", *(f"- {claim}: {found}" for claim, found in run.verdicts.items())])
    words = TensorProto(dtype=DT_STRING, string_val=[said.encode()])
    kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    yield Event(wall_time=point.began, step=0, summary=summary("run", words, kind))
    numbers = [(one.name, step, value, one.unit) for one in point.series for step, value in one.values]
    numbers += [(name, point.steps, value, "") for name, value in point.numbers.items()]
    for name, step, value, unit in numbers:
        tensor = TensorProto(dtype=DT_FLOAT, float_val=[value])
        metadata = create_summary_metadata(display_name=name, description=unit)
        yield Event(wall_time=point.time_of(step), step=step, summary=summary(name, tensor, metadata))


def _typed(text: str) -> float | str:
    """Return a number where the text is one, so that the page sorts by it."""
    try:
        return float(text)
    except ValueError:
        return text


def write_wandb(folder: Path, run: TrackedRun) -> str:
    """Write the offline folder of Weights & Biases, with a run for each point."""
    # Faults of the library are reported to nobody.
    with variables_set({"WANDB_ERROR_REPORTING": "false"}):
        import wandb

        # No console, code, machine or errors: the record has what there is to say.
        off: dict[str, Any] = dict.fromkeys(("disable_code", "disable_git"), True)
        off |= dict.fromkeys(("x_disable_meta", "x_disable_stats"), True)
        quiet = wandb.Settings(console="off", silent=True, **off)
        folder.mkdir(parents=True, exist_ok=True)
        for point in run.points:
            rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
            for series in point.series:
                for step, value in series.values:
                    rows[step][series.name] = value
            about: dict[str, Any] = {"project": run.recipe, "group": run.run, "notes": run.summary}
            about |= {"config": point.parameters}
            place: dict[str, Any] = {"dir": str(folder), "mode": "offline", "settings": quiet}
            with wandb.init(name=f"{run.run} {point.id}", **about, **place) as made:
                for step, values in sorted(rows.items()):
                    made.log({**values, "_timestamp": point.time_of(step)}, step=step)
                verdicts = {f"verdict/{name}": said for name, said in run.verdicts.items()}
                made.summary.update(point.numbers | verdicts)
        # A run ends before the process that writes its file has written all of it.
        wandb.teardown()
    return f"wandb sync {folder / 'wandb'}/offline-run-*"


Writer = Callable[[Path, TrackedRun], str]
"""Writes a run below a new folder and returns the command that shows it."""
TRACKERS: dict[str, Writer] = {"mlflow": write_mlflow, "tensorboard": write_tensorboard, "wandb": write_wandb}


def choose_trackers(text: str) -> dict[str, Writer]:
    """Return what writes for the trackers that `text` names, separated by commas; raises InputError."""
    names = dict.fromkeys(name.strip() for name in text.split(",")) if text else {}
    installed = [one for one in TRACKERS if find_spec(one)]
    for name in names:
        require_known(name, TRACKERS, "unknown tracker", place=OPTION)
        if name not in installed:
            said, hint = "this tracker is not installed", 'pip install "twinrun[track]"'
            hint = "pip install wandb" if name == "wandb" else hint
            raise InputError(said, place=OPTION, found=name, allowed=installed, hint=hint)
    return {name: TRACKERS[name] for name in names}
