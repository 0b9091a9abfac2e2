"""TensorBoard: an event file for each point, with its parameters and numbers for the HParams page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinrun.export.tracked_run import TrackedPoint, TrackedRun

PACKAGE = "tensorboard"
INSTALL = 'pip install "twinrun[track]"'


def write(folder: Path, run: TrackedRun) -> str:
    """Write one event file for each point, in a folder of its own."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for point in run.points:
        writer = EventFileWriter(str(folder / point.id))
        for event in _events(run, point):
            writer.add_event(event)
        writer.close()
    return f"tensorboard --logdir {folder}"


def _events(run: TrackedRun, point: TrackedPoint) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event

    began, last = point.began, point.time_of(point.steps)
    yield Event(wall_time=began, step=0, summary=_parameters(run, point))
    yield Event(wall_time=began, step=0, summary=_text("run", _markdown(run)))
    for series in point.series:
        for step, value in series.values:
            summary = _scalar(series.name, value, unit=series.unit)
            yield Event(wall_time=point.time_of(step), step=step, summary=summary)
    for name, value in point.numbers.items():
        yield Event(wall_time=last, step=point.steps, summary=_scalar(name, value))
    yield Event(wall_time=last, step=point.steps, summary=_ended(last))


def _scalar(name: str, value: float, *, unit: str = "") -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_FLOAT
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    metadata = create_summary_metadata(display_name=name, description=unit)
    tensor = TensorProto(dtype=DT_FLOAT, float_val=[value])
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def _parameters(run: TrackedRun, point: TrackedPoint) -> Any:
    """Return the summary with which the HParams page begins a session."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    parameters = {name: _typed(text) for name, text in point.parameters.items()}
    return hparams_pb(parameters, trial_id=f"{run.run}/{point.id}", start_time_secs=point.began)


def _ended(seconds: float) -> Any:
    """Return the summary with which a session of the HParams page ends."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    # TensorBoard's own function for it needs TensorFlow.
    end = HParamsPluginData(session_end_info=SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=seconds))
    value = Summary.Value(
        tag=metadata.SESSION_END_INFO_TAG,
        metadata=metadata.create_summary_metadata(end),
        tensor=metadata.NULL_TENSOR,
    )
    return Summary(value=[value])


def _text(name: str, text: str) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
    return Summary(value=[Summary.Value(tag=name, metadata=metadata, tensor=tensor)])


def _markdown(run: TrackedRun) -> str:
    verdicts = "\n".join(f"| {claim} | {verdict} |" for claim, verdict in run.verdicts.items())
    table = f"| claim | verdict |\n| --- | --- |\n{verdicts}\n" if verdicts else ""
    return f"{run.summary}\n\nRun {run.run} of {run.recipe}.\n\n{table}"


def _typed(text: str) -> float | str:
    """Return a number where the text is one, so that the page sorts by it."""
    try:
        return float(text)
    except ValueError:
        return text
