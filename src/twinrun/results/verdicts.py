"""Verdicts: the conditions of a claim, each with what was seen, and the outcome that follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number
from twinrun.manifests.metrics import RATIO
from twinrun.protocol.measurements import Per

Outcome = Literal[
    "reproduced",
    "exceeds",
    "not-reproduced",
    "not-comparable",
    "config-mismatch",
    "failed",
    "holds-here",
    "fails-here",
]
# Outcomes with which a run ends with 1.
FAILURES: tuple[Outcome, ...] = ("not-reproduced", "fails-here", "failed")
# Outcomes of a claim that holds.
HOLDS: tuple[Outcome, ...] = ("reproduced", "exceeds", "holds-here")
# The question of each condition, for a reader, in the order in which the first that is not met decides.
QUESTIONS = {
    "written": "somebody has written the claim",
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
CONDITIONS = tuple(QUESTIONS)
ConditionName = Annotated[str, Field(pattern=f"^({'|'.join(CONDITIONS)})$")]


class Condition(Frozen):
    """One condition of a verdict."""

    name: ConditionName
    met: bool
    seen: str
    """The value or the reason that answers it."""


class Verdict(Frozen):
    """The verdict on one statement: a claim as published, or inside that what became of it anywhere else."""

    claim: str
    statement: str
    outcome: Outcome
    reason: str
    published: float
    measured: float | None
    """The value at the point that is worst for the claim."""
    metric: str
    """Row of recipes/metrics.toml."""
    title: str
    """Title of the metric."""
    unit: str
    per: Per
    note: str = ""
    """The words beside the measured value, such as `few steps: 5 of 20`."""
    factor: float | None = None
    """Measured over published, where it exceeds that by more than the tolerance."""
    conditions: tuple[Condition, ...] = ()
    """In the order in which they decide."""
    points: tuple[str, ...] = ()
    """Points of the run that it is about."""
    departures: tuple[str, ...] = ()
    """Circumstances and fields in which the run differs from the published one."""
    doubts: tuple[str, ...] = ()
    """What stands beside it in words, and takes `reproduced` away."""
    here: Verdict | None = None
    """The verdict anywhere else, on the restatement or on the claim itself; null on the published run."""

    @property
    def neutral(self) -> Verdict | None:
        """The verdict on another statement than the published one; None where that itself was judged here."""
        return self.here if self.here and self.here.statement != self.statement else None

    @property
    def final(self) -> Outcome:
        """The outcome that counts: as restated where the restatement could be judged, else as published."""
        return self.here.outcome if self.here and self.here.outcome != "not-comparable" else self.outcome

    @property
    def why(self) -> str:
        """The reason of the outcome that counts."""
        return self.here.reason if self.here else self.reason

    def shown(self) -> dict[str, object]:
        """Return the verdict as commands print it in JSON, with the outcome that counts and its reason."""
        return self.model_dump(mode="json") | {"final": self.final, "why": self.why}

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


def outcome_of(
    conditions: Sequence[Condition], *, published: bool, exceeds: bool = False, doubts: Sequence[str] = ()
) -> Outcome:
    """Return the outcome of a statement: it holds where every condition is met, and nothing else does it.

    Args:
        published: asked of the published run; else of any other.
        exceeds: the value is better than the published one by more than the tolerance.
        doubts: what takes `reproduced` away.
    """
    unmet = next((one.name for one in conditions if not one.met), None)
    if unmet is None:
        assert tuple(one.name for one in conditions) == CONDITIONS
        if not published or doubts:
            return "holds-here"
        return "exceeds" if exceeds else "reproduced"
    if unmet == "direction":
        return "not-reproduced" if published else "fails-here"
    if unmet == "order" or (unmet == "configuration" and published):
        return "config-mismatch"
    return "failed" if unmet == "stable" else "not-comparable"


def published_here(found: Verdict) -> str:
    """Return the published value in the neutral metric."""
    return _in_words(found.published, found)


def measured_here(found: Verdict) -> str:
    """Return what the run says in the neutral metric, a dash where it says nothing."""
    note = f" ({found.note})" if found.note else ""
    return "-" if found.measured is None else _in_words(found.measured, found) + note


def _in_words(value: float, found: Verdict) -> str:
    if found.unit == "%":
        return f"{value:.1f} % {found.title}"
    return f"{value:.2f} {found.title}" if found.unit == RATIO else f"{number(value)} {found.unit}"
