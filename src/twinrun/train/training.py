"""What every rank of a training runs, unless its recipe has a script: `python -m twinrun.train.training`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, worker


def with_engine(module: str) -> Callable[[TrainingJob], TrainingResult]:
    """Return `train` for a recipe whose layouts are trained by `module` beside its script.

    The module has two functions: `start(job)` joins the ranks, and `build(job, device)` returns a
    `twinrun.train.loop.StepEngine`. It is imported where a layout of its framework runs.
    """
    return partial(train, engine=module)


def train(job: TrainingJob, *, engine: str | None = None) -> TrainingResult:
    """Train the job's point by Composer, or in PyTorch alone; only the framework that is used is imported.

    Args:
        engine: the recipe's module that trains layouts of its own framework.

    Raises:
        InputError: the layout has a framework and the recipe no module for it.
    """
    if job.training.attention == attention.TRITON and not job.accelerator:
        attention.interpret_triton()
    if job.training.trainer == "composer" and job.layout is None:
        from twinrun.train import composer_loop

        return composer_loop.train(job)
    from twinrun.train import loop

    return loop.train(job, engine=engine)


if __name__ == "__main__":
    worker.main(train)
