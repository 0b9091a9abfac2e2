"""Weights & Biases: its offline folder, with a run for each point; nothing is sent anywhere."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from twinrun.export.tracked_run import TrackedPoint, TrackedRun, variables_set

PACKAGE = "wandb"
INSTALL = "pip install wandb"
# Faults of the library are reported to nobody.
VARIABLES = {"WANDB_ERROR_REPORTING": "false"}


def write(folder: Path, run: TrackedRun) -> str:
    """Write one offline run for each point."""
    import wandb

    with variables_set(VARIABLES):
        for point in run.points:
            _write_point(folder, run, point)
        # A run ends before the process that writes its file has written all of it.
        wandb.teardown()
    return f"wandb sync {folder / 'wandb'}/offline-run-*"


def _write_point(folder: Path, run: TrackedRun, point: TrackedPoint) -> None:
    import wandb

    # No console, code, machine or errors: the record has what there is to say.
    quiet = wandb.Settings(
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        silent=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    with wandb.init(
        project=run.recipe,
        group=run.run,
        name=f"{run.run} {point.id}",
        notes=run.summary,
        config=point.parameters,
        dir=str(folder),
        mode="offline",
        settings=quiet,
    ) as made:
        rows: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for series in point.series:
            for step, value in series.values:
                rows[step][series.name] = value
        for step, values in sorted(rows.items()):
            made.log({**values, "_timestamp": point.time_of(step)}, step=step)
        made.summary.update(
            {**point.numbers, **{f"verdict/{name}": text for name, text in run.verdicts.items()}}
        )
