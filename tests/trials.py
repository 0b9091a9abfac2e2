"""How many times each fault is tried, and from which seed: tests take it from here, and the docs show it."""

from __future__ import annotations

from typing import NamedTuple


class Trials(NamedTuple):
    """One class of faults; a single failure fails the tests."""

    fault: str
    promise: str
    change: int
    """Trials of every change."""
    nightly: int
    """Trials of every night, from the next seed."""
    seed: int | None = None
    """None where every case is tried."""


def bound(trials: int) -> float:
    """Return the rate of failures that trials without any exclude with 95 % confidence."""
    return float(1 - 0.05 ** (1 / trials))


SAME = "every loss and every final weight as without it"
ALL = (
    KILLED_RANK := Trials("kill -9 of a random rank before a random step", SAME, 2, 200, 20),
    KILLED_LAUNCHER := Trials("kill -9 of the launcher at a random moment", SAME, 1, 40, 22),
    TOLD_RANK := Trials("SIGTERM to a random rank in a random step", SAME, 2, 20, 23),
    INSIDE_SAVES := Trials(
        "kill -9 of each rank at a system call of its saves",
        "the newest published checkpoint is whole; then as without it",
        4,
        70,
    ),
    DAMAGED_CHECKPOINT := Trials(
        "a flipped bit, cut end, zeroed block, swapped or missing file of a checkpoint",
        "named before it is used",
        40,
        1000,
        20,
    ),
    DAMAGED_DATA := Trials(
        "the same of prepared data, fresh or cached; all but a missing file also while a run reads it",
        "named before a step is made of it",
        40,
        600,
        24,
    ),
    FULL_DISK := Trials(
        "a disk that is full after a number of bytes of a save",
        "the checkpoint before is whole",
        4,
        40,
        26,
    ),
    HICCUPS := Trials(
        "an error of the file system, or a short read, in a save, a load or a verification of a checkpoint",
        "goes on, or stops with exit 5; nothing is put aside or lost",
        60,
        500,
        27,
    ),
    CHANGED_SOURCES := Trials(
        "code, a native library or a package changed before, during or between the points, undone or not",
        "the record names it, or what ran is what its commit has",
        12,
        200,
        28,
    ),
    PICKLES := Trials("a pickle in place of each file that a run loads", "not executed", 20, 60),
)
