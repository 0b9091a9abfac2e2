"""How many times each fault is tried, and from which seed: tests take it from here, and the docs show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Trials:
    """One class of faults; a single failure fails the tests."""

    fault: str
    promise: str
    change: int
    """Trials of every change."""
    nightly: int
    """Trials of every night, from the next seed."""
    seed: int | None
    """None where every case is tried."""


def bound(trials: int) -> float:
    """Return the rate of failures that trials without any exclude with 95 % confidence."""
    return float(1 - 0.05 ** (1 / trials))


SAME = "every loss and every final weight as without it"
KILLED_RANK = Trials(
    fault="kill -9 of a random rank before a random step", promise=SAME, change=2, nightly=200, seed=20
)
KILLED_LAUNCHER = Trials(
    fault="kill -9 of the launcher at a random moment", promise=SAME, change=1, nightly=40, seed=22
)
TOLD_RANK = Trials(
    fault="SIGTERM to a random rank in a random step", promise=SAME, change=2, nightly=20, seed=23
)
DAMAGED_CHECKPOINT = Trials(
    fault="a flipped bit, cut end, zeroed block, swapped or missing file of a checkpoint",
    promise="named before it is used",
    change=40,
    nightly=1000,
    seed=20,
)
DAMAGED_DATA = Trials(
    fault="the same of prepared data, fresh or cached; all but a missing file also while a run reads it",
    promise="named before a step is made of it",
    change=40,
    nightly=600,
    seed=24,
)
FULL_DISK = Trials(
    fault="a disk that is full after a number of bytes of a save",
    promise="the checkpoint before is whole",
    change=4,
    nightly=40,
    seed=26,
)
HICCUPS = Trials(
    fault="an error of the file system, or a short read, in a save, a load or a verification of a checkpoint",
    promise="goes on, or stops with exit 5; nothing is put aside or lost",
    change=60,
    nightly=500,
    seed=27,
)
CHANGED_SOURCES = Trials(
    fault="code, a native library or a package changed before, during or between the points, undone or not",
    promise="the record names it, or what ran is what its commit has",
    change=12,
    nightly=200,
    seed=28,
)
PICKLES = Trials(
    fault="a pickle in place of each file that a run loads",
    promise="not executed",
    change=20,
    nightly=60,
    seed=None,
)
INSIDE_SAVES = Trials(
    fault="kill -9 of each rank at a system call of its saves",
    promise="the newest published checkpoint is whole; then as without it",
    change=4,
    nightly=70,
    seed=None,
)
ALL = (
    KILLED_RANK,
    KILLED_LAUNCHER,
    TOLD_RANK,
    INSIDE_SAVES,
    DAMAGED_CHECKPOINT,
    DAMAGED_DATA,
    FULL_DISK,
    HICCUPS,
    CHANGED_SOURCES,
    PICKLES,
)
