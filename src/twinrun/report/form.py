"""Submissions: what is sent in with a record of hardware that a recipe has no record of."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.results.judged import gpus_of
from twinrun.results.reading import FinishedRun
from twinrun.results.submission import FILE, write_submission

# What no probe says.
QUESTIONS = (
    "Power limit and cooling of the card, as far as they are not the factory's",
    "What else ran on the machine meanwhile",
    "Partitioning or virtualisation of the device",
    "May the record be published under the project's licence, with your name or without",
)


def offer(run: FinishedRun) -> str:
    """Keep what can be sent in of a GPU that the recipe has no record of.

    Returns:
        What to do with it, why there is nothing, or no text for a GPU that is known and for a processor.
    """
    record, gpu = run.record, run.record.gpu
    committed = (file.name for file in record.project.results(record.recipe))
    # Files of committed records are named by their GPU.
    is_known = gpu is not None and any(name.startswith(f"{gpu.id}x") for name in committed)
    if not record.devices or is_known:
        return ""
    try:
        file = send(run, run.folder / FILE)
    except InputError as reason:
        return f"The results have no such GPU yet, and cannot take this run: {reason.message}\n"
    lines = [
        f"The results have no {gpus_of(record)} yet. To send this run in, attach {file}: it is",
        "the record without names of hosts and folders. The project takes it by",
        "",
        f"    invoke report recipes/{record.plan.recipe} --add {FILE}",
        "",
        "Please answer beside it:",
        *(f"- {question}" for question in QUESTIONS),
    ]
    return "\n".join(lines) + "\n"


def send(run: FinishedRun, out: Path) -> Path:
    """Write the submission of a run to `out` and return it; raises InputError where no results take it."""
    write_submission(out, run.record, run.file)
    return out
