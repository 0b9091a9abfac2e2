"""Verdicts: the conditions of a claim, each with what was seen, and the outcome that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number
from twinrun.manifests.metrics import RATIO
from twinrun.protocol.measurements import Per

AsPublished = Literal["reproduced", "not-reproduced", "not-comparable", "config-mismatch", "failed"]
AsRestated = Literal["holds-here", "fails-here", "not-comparable", "config-mismatch", "failed"]
Outcome = Literal[
    "reproduced",
    "not-reproduced",
    "not-comparable",
    "config-mismatch",
    "failed",
    "holds-here",
    "fails-here",
]
# Outcomes with which a run ends with 1.
FAILURES: tuple[Outcome, ...] = ("not-reproduced", "fails-here", "failed")
# In the order in which the first that is not met decides.
ConditionName = Literal[
    "subject",
    "stable",
    "hardware",
    "account",
    "points",
    "configuration",
    "order",
    "measured",
    "training",
    "correctness",
    "bounds",
    "samples",
    "direction",
]
CONDITIONS: tuple[ConditionName, ...] = get_args(ConditionName)
# The question of each condition, for a reader.
QUESTIONS: dict[ConditionName, str] = {
    "subject": "the run is of what the claim is about",
    "stable": "training did not diverge",
    "hardware": "the hardware is named, and the one that is asked for",
    "account": "everything that was planned is there once",
    "points": "the points of the claim were run, on the hosts that they name",
    "configuration": "the configuration is the published one, but for what is neutral",
    "order": "the points worked through the same batches in the same order",
    "measured": "the number of the claim was measured",
    "training": "the curves are of training",
    "correctness": "what was computed is within its allowance",
    "bounds": "no number is more than the hardware can do",
    "samples": "the samples decide",
    "direction": "the number is no worse than the published one by more than the tolerance",
}


class Condition(Frozen):
    """One condition of a verdict."""

    name: ConditionName
    met: bool
    seen: str
    """The value or the reason that answers it."""


class RestatementVerdict(Frozen):
    """The verdict on a claim's restatement, where the claim could not be judged as published."""

    statement: str
    outcome: AsRestated
    reason: str
    published: float
    measured: float | None
    """The value at the point that is worst for the claim."""
    metric: str
    """Row of recipes/metrics.toml."""
    title: str
    """Title of the metric."""
    unit: str
    note: str = ""
    """The words beside the measured value, such as `few steps: 5 of 20`."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the outcome, in the order in which they decide; empty in records of older rules."""
    points: tuple[str, ...] = ()
    """Points of the run that it is about."""
    departures: tuple[str, ...] = ()
    """Circumstances and fields in which the run differs from the published one."""


class Verdict(Frozen):
    """The verdict on one claim as published and, where that cannot be asked, as restated."""

    claim: str
    statement: str
    outcome: AsPublished
    """The outcome as published."""
    reason: str
    published: float
    measured: float | None
    unit: str
    per: Per
    note: str = ""
    """The words beside the measured value, such as `few steps: 5 of 20`."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of the outcome as published; empty in records of older rules."""
    points: tuple[str, ...] = ()
    """Points of the run that it is about as published."""
    here: RestatementVerdict | None = None
    """The verdict here, on the restatement or on the claim itself; null on the published run."""

    @property
    def neutral(self) -> RestatementVerdict | None:
        """The verdict on another statement than the published one; None where that itself was judged here."""
        return self.here if self.here and self.here.statement != self.statement else None

    @property
    def final(self) -> Outcome:
        """The outcome that counts: as restated where the restatement could be judged, else as published."""
        judged = self.here is not None and self.here.outcome != "not-comparable"
        return self.here.outcome if judged and self.here else self.outcome

    @property
    def why(self) -> str:
        """The reason of the outcome that counts."""
        return self.here.reason if self.here else self.reason

    @property
    def departures(self) -> tuple[str, ...]:
        """Circumstances and fields in which the run differs from the published one."""
        return self.here.departures if self.here else ()

    @property
    def judged_at(self) -> tuple[str, ...]:
        """Points of the run that the outcome that counts is about."""
        return self.here.points if self.here else self.points

    @property
    def obstacle(self) -> Condition | None:
        """The condition that decided, None where all are met; `samples` means that the claim is undecided."""
        found = self.here.conditions if self.here else self.conditions
        return next((one for one in found if not one.met), None)


class NotAskedError(Exception):
    """A condition of a claim is not met on these records; the message says why."""

    def __init__(self, reason: str, *, condition: ConditionName = "measured") -> None:
        """Take what was seen, and the condition that it does not meet."""
        super().__init__(reason)
        self.condition: ConditionName = condition


def as_published(conditions: Sequence[Condition]) -> AsPublished:
    """Return the outcome of a claim on the published run."""
    unmet = _first_unmet(conditions)
    if unmet is None:
        return "reproduced"
    outcomes: dict[ConditionName, AsPublished] = {
        "direction": "not-reproduced",
        "stable": "failed",
        "configuration": "config-mismatch",
        "order": "config-mismatch",
    }
    return outcomes.get(unmet.name, "not-comparable")


def as_restated(conditions: Sequence[Condition]) -> AsRestated:
    """Return the outcome of a claim anywhere else."""
    unmet = _first_unmet(conditions)
    if unmet is None:
        return "holds-here"
    outcomes: dict[ConditionName, AsRestated] = {
        "direction": "fails-here",
        "stable": "failed",
        "order": "config-mismatch",
    }
    return outcomes.get(unmet.name, "not-comparable")


def _first_unmet(conditions: Sequence[Condition]) -> Condition | None:
    """Return the condition that decides; None, and so a verdict that holds, where every one is met.

    Nothing else leads to `reproduced` and `holds-here`, and a condition that nobody asked is a fault.
    """
    ordered = sorted(conditions, key=lambda one: CONDITIONS.index(one.name))
    for one in ordered:
        if not one.met:
            return one
    if tuple(one.name for one in ordered) != CONDITIONS:
        raise AssertionError(
            f"conditions {', '.join(CONDITIONS)}, asked {', '.join(c.name for c in ordered)}"
        )
    return None


def published_here(found: RestatementVerdict) -> str:
    """Return the published value in the neutral metric."""
    return _in_words(found.published, found)


def measured_here(found: RestatementVerdict) -> str:
    """Return what the run says in the neutral metric, a dash where it says nothing."""
    if found.measured is None:
        return "-"
    return _in_words(found.measured, found) + (f" ({found.note})" if found.note else "")


def _in_words(value: float, found: RestatementVerdict) -> str:
    if found.unit == "%":
        return f"{value:.1f} % {found.title}"
    return f"{value:.2f} {found.title}" if found.unit == RATIO else f"{number(value)} {found.unit}"
