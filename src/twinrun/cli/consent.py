"""What a user is asked or warned of before a run that a processor would need long for, or cannot hold."""

from __future__ import annotations

import sys

from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError
from twinrun.foundation.text import duration
from twinrun.runs.preconditions import demand_memory
from twinrun.runs.selection import Selection

# Without a question.
LONG_SECONDS = 900.0


def ask(selection: Selection, *, yes: bool) -> None:
    """Ask whether a run that takes long on a processor is to start.

    Args:
        yes: the answer was given as an option.

    Raises:
        InputError: there is no terminal to ask on.
        RunInterruptedError: the answer is no.
    """
    seconds = _long(selection)
    if yes or seconds is None:
        return
    text = f"about {duration(seconds)} on a processor, estimated"
    if not sys.stdin.isatty():
        raise InputError(
            "a run of this length is started only after a question, and there is no terminal to ask on",
            place="invoke run",
            found=text,
            allowed=f"up to {duration(LONG_SECONDS)} without a question",
            hint="--yes starts it; `--scale smoke` as the recipe has it takes about a minute",
        )
    sys.stderr.write(f"this takes {text}; start it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunInterruptedError("not started", hint="--yes starts it without a question")


def warn(selection: Selection) -> None:
    """Print what stands against a plan that is only printed."""
    if (seconds := _long(selection)) is not None:
        print(
            f"warning   about {duration(seconds)} on a processor: the run starts only with --yes",
            file=sys.stderr,
        )
    try:
        if selection.site is None:
            demand_memory(selection)
    except MachineError as error:
        print(
            f"warning   {error.place} would be refused here: {error.found}; {error.allowed}", file=sys.stderr
        )


def _long(selection: Selection) -> float | None:
    """Return the estimated seconds on a processor, None for a run that starts without a question."""
    seconds = sum(point.seconds or 0.0 for point in selection.plan.points)
    return None if selection.plan.gpu or selection.accelerator or seconds <= LONG_SECONDS else seconds
