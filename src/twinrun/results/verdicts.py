"""Verdicts, and the steps that lead to one, whether a claim is about one record or between several.

Who judges a claim finds a value in the records and hands it over, or refuses with a `NotAskedError`. Only
this module compares measured with published and gives the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number
from twinrun.manifests.claims import Claim, RecordClaim, placeholders_of
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.manifests.restatements import Restatement
from twinrun.protocol.measurements import Measurement, Per
from twinrun.workloads.workload import PointRecord

AsPublished = Literal["reproduced", "not-reproduced", "not-comparable", "config-mismatch", "failed"]
AsRestated = Literal["holds-here", "fails-here", "not-comparable", "failed"]
Outcome = Literal[
    "reproduced",
    "not-reproduced",
    "not-comparable",
    "config-mismatch",
    "failed",
    "holds-here",
    "fails-here",
]
# Outcomes of a claim that cannot be judged as published; `failed` where the training did.
Unasked = Literal["not-comparable", "config-mismatch", "failed"]
# Outcomes with which a run ends with 1.
FAILURES: tuple[Outcome, ...] = ("not-reproduced", "fails-here", "failed")


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
    """What belongs beside the measured value, such as `few steps: 5 of 20`."""


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
    """What belongs beside the measured value, such as `few steps: 5 of 20`."""
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


class NotAskedError(Exception):
    """A claim, or its restatement, cannot be judged on these records; the message says why."""

    def __init__(
        self,
        reason: str,
        *,
        outcome: Unasked = "not-comparable",
        measured: float | None = None,
    ) -> None:
        """Take the reason, and the value where one was found all the same."""
        super().__init__(reason)
        self.outcome: Unasked = outcome
        self.measured = measured


class FoundValue(NamedTuple):
    """A value that records give, where it was found, and the measurements behind it."""

    value: float
    place: str
    behind: tuple[tuple[PointRecord, Measurement], ...] = ()
    note: str = ""


class Assessment(NamedTuple):
    """What the records say about a claim as published."""

    value: float | None
    """The measured value or distance; None where it is no number."""
    holds: bool
    reason: str
    note: str = ""
    """What belongs beside the value, such as that it rests on few steps."""


class Margin(NamedTuple):
    """How a value stands to the published one."""

    change: float
    """Relative change from the published value; the distance itself where a distance of 0 was published."""
    holds: bool
    """Whether the value is worse by no more than the tolerance."""

    @property
    def side(self) -> str:
        """On which side of the published value it lies."""
        return "above" if self.change >= 0 else "below"


def margin(
    value: float, published: float, *, better: Literal["higher", "lower", "equal"], tolerance: float
) -> Margin:
    """Compare a value with the published one in its direction of goodness."""
    change = value / published - 1 if published else value
    worse = {"higher": -change, "lower": change, "equal": abs(change)}[better]
    return Margin(change, worse <= tolerance)


def judge_claim(
    claim: Claim | RecordClaim,
    as_published: Callable[[], Assessment],
    as_restated: Callable[[Restatement], RestatementVerdict],
) -> Verdict:
    """Judge a claim as published and, where that cannot be asked, as restated; not one that nobody wrote."""
    if unwritten := list(placeholders_of(claim.model_dump(), f"claim.{claim.id}")):
        return _published(claim, partial(_refuse_unwritten, unwritten))
    verdict = _published(claim, as_published)
    if claim.here is None or verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    return verdict.model_copy(update={"here": as_restated(claim.here)})


def _refuse_unwritten(keys: Sequence[str]) -> Assessment:
    raise NotAskedError(f"no publication says it: still a placeholder is published.toml:{', '.join(keys)}")


def _published(claim: Claim | RecordClaim, as_published: Callable[[], Assessment]) -> Verdict:
    outcome: AsPublished
    measured: float | None
    try:
        measured, holds, reason, note = as_published()
        outcome = "reproduced" if holds else "not-reproduced"
    except NotAskedError as refusal:
        measured, outcome, reason, note = refusal.measured, refusal.outcome, str(refusal), ""
    if measured is not None and not math.isfinite(measured):
        measured = None
    return Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=outcome,
        reason=reason,
        published=claim.value,
        measured=measured,
        unit=claim.unit,
        per=claim.per,
        note=note,
    )


def judge_restatement(
    here: Restatement, found: FoundValue | NotAskedError, metric: Metric, *, run: str
) -> RestatementVerdict:
    """Judge what records give for the restatement of a claim about one record.

    Args:
        found: the value in the metric's canonical unit, or why there is none.
        run: what differs from the published run.
    """
    unit = "%" if "%" in metric.units else metric.unit
    published = metric.canonical(here.value, here.unit or metric.unit)
    verdict = _restated(here, metric.in_unit(published, unit), title=metric.title, unit=unit)
    if isinstance(found, NotAskedError):
        return _refused(verdict, found, run)
    verdict = verdict.model_copy(update={"measured": metric.in_unit(found.value, unit), "note": found.note})
    value, reference = f"{measured_here(verdict)} at {found.place}", published_here(verdict)
    stands = margin(found.value, published, better=here.direction(metric), tolerance=here.tolerance)
    return _held(verdict, here, stands, metric, words=(value, reference), run=run)


def judge_restated_ratio(
    here: Restatement, found: FoundValue | NotAskedError, metric: Metric, *, run: str
) -> RestatementVerdict:
    """Judge what records give for the restatement of a claim between records: a ratio of two sides."""
    verdict = _restated(here, here.value, title=f"of the other side's {metric.title}", unit=RATIO)
    if isinstance(found, NotAskedError):
        return _refused(verdict, found, run)
    verdict = verdict.model_copy(update={"measured": found.value})
    value, reference = f"{found.value:.3f}, {found.place}", f"{here.value:g}"
    stands = margin(found.value, here.value, better=metric.better, tolerance=here.tolerance)
    return _held(verdict, here, stands, metric, words=(value, reference), run=run)


def _restated(here: Restatement, published: float, *, title: str, unit: str) -> RestatementVerdict:
    return RestatementVerdict(
        statement=here.statement,
        outcome="not-comparable",
        reason="",
        published=published,
        measured=None,
        metric=here.metric,
        title=title,
        unit=unit,
    )


def _refused(verdict: RestatementVerdict, refusal: NotAskedError, run: str) -> RestatementVerdict:
    reason = f"Not asked, because {refusal}." + (f" Run: {run}." if run else "")
    outcome: AsRestated = "failed" if refusal.outcome == "failed" else "not-comparable"
    return verdict.model_copy(update={"reason": reason, "outcome": outcome})


def _held(
    verdict: RestatementVerdict,
    here: Restatement,
    stands: Margin,
    metric: Metric,
    *,
    words: tuple[str, str],
    run: str,
) -> RestatementVerdict:
    value, reference = words
    side = here.direction(metric)
    allowed = (
        f"{here.tolerance:.1%} apart" if side == "equal" else f"{side} is better, {here.tolerance:.1%} worse"
    )
    reason = (
        f"Here {value}; published {reference} = {here.derivation}, {here.basis}."
        f" {abs(stands.change):.1%} {stands.side}; {allowed} is allowed because {here.because}. Run: {run}."
    )
    weaker = f" Weaker than published: {here.weaker}." if here.weaker else ""
    outcome: AsRestated = "holds-here" if stands.holds else "fails-here"
    return verdict.model_copy(update={"outcome": outcome, "reason": reason + weaker})


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
