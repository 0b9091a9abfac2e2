"""What every rank of a training runs, unless its recipe has a script: `python -m twinrun.train.training`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial

from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, worker
from twinrun.train.models import Build, bring


def main(*, model: Build | None = None, engine: str | None = None) -> None:
    """Train the point whose job the command line names; the last line of a recipe's script.

    Args:
        model: makes the recipe's own model, `build(shape, *, training)`, in place of the shape's family. Its
            parameters are counted before the first step, and a difference from the manifest ends the run.
        engine: module beside the script that trains layouts of the recipe's `[engine]`. It has `start(job)`,
            which joins the ranks, and `build(job, device)`, which returns a `twinrun.train.loop.StepEngine`;
            it is imported where such a layout runs.
    """
    if model is not None:
        bring(model)
    worker.main(partial(train, engine=engine), load=partial(load, engine=engine))


def train(job: TrainingJob, *, engine: str | None = None) -> TrainingResult:
    """Train the job's point by Composer, or in PyTorch alone; only the framework that is used is imported.

    Args:
        engine: the recipe's module that trains layouts of its own framework.

    Raises:
        InputError: the layout has a framework and the recipe no module for it.
        RunError: the model has another number of parameters than the manifest says.
    """
    trainer = load(job, engine=engine)
    worker.check_parameters(job)
    return trainer(job)


def load(job: TrainingJob, *, engine: str | None = None) -> Callable[[TrainingJob], TrainingResult]:
    """Import what trains `job`, and return it; jobs with the same `imports` share what is imported."""
    # Before the model is built, or a framework imported, which imports Triton.
    if job.training.attention == attention.TRITON and not job.accelerator:
        attention.interpret_triton()
    if job.training.trainer == "composer" and job.layout is None:
        handler = signal.getsignal(signal.SIGTERM)
        from twinrun.train import composer_loop

        # The import takes it, to unwind, which waits for collectives that never end.
        signal.signal(signal.SIGTERM, handler)
        return composer_loop.train
    from twinrun.train import loop

    return partial(loop.train, engine=engine)


if __name__ == "__main__":
    main()
