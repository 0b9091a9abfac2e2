"""The trace of a training, which `invoke parity --trace` reads: digests by step and layer, in one file."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.protocol.digests import Tracer
from twinrun.protocol.training import TrainingJob
from twinrun.train.models import Model


def tracer_of(job: TrainingJob, model: Model) -> Tracer | None:
    """Return what traces the whole model of `job` before it is sharded; None where no trace is asked for.

    Raises:
        InputError: the parameters are cut, or the run may be resumed.
    """
    if not job.training.trace:
        return None
    framework = job.layout.framework if job.layout else "torch"
    for place, found, allowed in (
        ("framework", framework, "torch"),
        ("--checkpoint", "given" if job.checkpointing else "", ""),
    ):
        if found != allowed:
            raise InputError("cannot be traced", place=place, found=found, allowed=allowed or "none")
    name = f"control-{job.control}" if job.control else "run"
    order = (
        {key: (axes[0], axes[1]) for key, axes in model.numbering(job.control).items()}
        if job.control
        else None
    )
    return Tracer(model, Path(job.out) / f"{name}.trace", order=order)
