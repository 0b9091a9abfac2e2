"""What is predicted of a point before it runs, in the form that plans and records keep."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.predict.prediction import Prediction


class PointPrediction(Frozen):
    """Memory and time of one attempt at a point, predicted before it ran; never a verdict."""

    attempt: Annotated[int, Field(ge=0)]
    """Which of the point's attempts this is of, counted from 0."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """Bytes of a device at their most."""
    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time of a step; null where it cannot be said."""
    low: Annotated[float, Field(gt=0)] | None = None
    """Nine times of ten the time is longer than this and shorter than `high`."""
    high: Annotated[float, Field(gt=0)] | None = None
    unknown: str | None = None
    """Why the time cannot be said, and which measurement would tell."""
    software: str
    """Generation of software that the prediction is for: a table of the calibration."""
    calibration: int
    """Version of the calibration."""

    @property
    def covers(self) -> tuple[float, float] | None:
        """The interval of the time."""
        return None if self.low is None or self.high is None else (self.low, self.high)


def kept(found: Prediction, *, attempt: int, calibration: int) -> PointPrediction:
    """Return a prediction as plans keep it, without its parts."""
    seconds, interval = found.time.seconds if found.time else None, found.seconds_interval
    low, high = interval or (None, None)
    return PointPrediction(
        attempt=attempt,
        memory_bytes=found.memory.bytes,
        seconds=seconds,
        low=low,
        high=high,
        unknown=found.unknown,
        software=found.software.id,
        calibration=calibration,
    )
