"""What every rank of a training runs, unless its recipe has a script: `python -m twinrun.train.training`."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import COMPOSER, TrainingJob, TrainingResult
from twinrun.train import rank

Loop = Callable[[TrainingJob], TrainingResult]


def main(*, loop: Loop | None = None, **brought: Any) -> None:
    """Train the point whose job the command line names; the last line of a recipe's script.

    Args:
        loop: the recipe's own loop, in place of the others.
        brought: what `train` takes of a script: `model`, `engine`, `beside`.
    """
    rank.run(partial(_with_controls, loop or partial(train, **brought)), TrainingJob)


def _with_controls(loop: Loop, job: TrainingJob) -> TrainingResult:
    result = loop(job)
    controls = []
    for number in range(1, job.training.controls + 1):
        # The run before holds models and loaders in cycles.
        gc.collect()
        control = loop(job.model_copy(update={"control": number, "checkpointing": None}))
        controls.append(tuple(step.loss for step in control.steps))
    return result.model_copy(update={"controls": tuple(controls)})


def train(
    job: TrainingJob,
    *,
    model: Callable[..., Any] | None = None,
    engine: str | None = None,
    beside: str | None = None,
) -> TrainingResult:
    """Train the job's point by Composer, or in PyTorch alone; only the framework that is used is imported.

    Args:
        model: makes the recipe's own model, `build(shape, *, training)`, in place of the shape's family. Its
            parameters are counted before the first step, and a difference from the manifest ends the run.
        engine: module beside the script that trains layouts of the recipe's `[engine]`. It has `start(job)`,
            which joins the ranks, and `build(job, device)`, which returns a `twinrun.train.loop.Engine`;
            it is imported where such a layout runs.
        beside: module beside the script whose `watch(job, device)` counts something of layouts, see
            `twinrun.train.loop.train`.

    Raises:
        InputError: the layout has a framework and the recipe no module for it.
        RunError: the model has another number of parameters than the manifest says.
    """
    if job.training.attention == "triton" and not job.accelerator:
        # Triton reads it when it is imported, which frameworks and models do.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from twinrun.train import building, loop, models

    if model is not None:
        models.bring(model)
    building.demand_parameters(job)
    counted = importlib.import_module(beside) if beside else None
    return loop.train(job, _framework(job, engine), beside=counted)


def _framework(job: TrainingJob, engine: str | None) -> Any:
    """Return the module that starts ranks and builds engines."""
    if job.layout is not None and job.layout.framework != "torch":
        if engine is None:
            place, framework = f"layouts.{job.point}.framework", job.layout.framework
            allowed = "torch, or the framework of an [engine] that the recipe's script brings"
            raise InputError("no module trains this layout", place=place, found=framework, allowed=allowed)
        return importlib.import_module(engine)
    handler = signal.getsignal(signal.SIGTERM)
    composed = job.training.trainer == COMPOSER and job.layout is None
    found = importlib.import_module(f"twinrun.train.{'composer_loop' if composed else 'data_parallel'}")
    # Composer takes the signal when it is imported, to unwind, which waits for collectives that never end.
    signal.signal(signal.SIGTERM, handler)
    return found


if __name__ == "__main__":
    main()
