"""Outcomes and claimed values in words, the same on every surface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from twinrun.foundation.text import number, plain, plural
from twinrun.manifests.claims import Claim
from twinrun.results.record import Outcome, Record, Verdict
from twinrun.workloads.fingerprint import Difference

GIB = 1 << 30
Tone = Literal["good", "bad", "neutral"]

# In the order a reader wants to hear of them; the sign keeps the meaning out of the colour.
SIGNS: dict[Outcome, str] = {
    "failed": "!",
    "not-reproduced": "✗",
    "reproduced": "✓",
    "config-mismatch": "≠",
    "not-comparable": "○",
}


def outcome(verdict: Verdict) -> str:
    """Return the outcome with its sign, in one or two words."""
    return f"{SIGNS[verdict.outcome]} {_spoken(verdict.outcome)}"


def quantity(value: float, unit: str, per: str) -> str:
    """Return a value with its unit and what it counts."""
    if unit == "ratio":
        return f"{value:.3f}"
    return f"{number(value)} {unit}{'' if per == 'run' else f' per {per}'}"


def claimed_value(claim: Claim) -> str:
    """Return what the publication says."""
    return _claimed(claim.value, claim.unit, claim.per)


def published_value(verdict: Verdict) -> str:
    """Return what the publication said when the verdict was given."""
    return _claimed(verdict.published, verdict.unit, verdict.per)


def _claimed(value: float, unit: str, per: str) -> str:
    """Return the value of a claim; 0 says that curves or numbers are equal."""
    return quantity(value, unit, per) if value else "equal"


def measured_value(verdict: Verdict) -> str:
    """Return what the run says, a dash where it says nothing."""
    if verdict.measured is None:
        return "-"
    if verdict.published:
        return quantity(verdict.measured, verdict.unit, verdict.per)
    return f"{verdict.measured:.2g} apart" if verdict.measured else "equal"


def headline(record: Record) -> str:
    """Say in one sentence what became of the claims, and whether the run is the published experiment."""
    counts = Counter(verdict.outcome for verdict in record.verdicts)
    total = plural(len(record.verdicts), "claim")
    parts = [f"{counts[name]} {_spoken(name)}" for name in SIGNS if counts[name]]
    if not parts:
        return "No claim was judged."
    if record.plan.differences:
        first, *rest = parts
        count, what = first.split(" ", 1)
        claims = ", ".join([f"{count} of {total} {what}", *rest])
        return f"Not the published experiment ({_difference(record.plan.differences)}): {claims}."
    worst = next(name for name in SIGNS if counts[name])
    others = f"; {', '.join(parts[1:])}" if parts[1:] else ""
    return f"{_spoken(worst).capitalize()}: {counts[worst]} of {total}{others}."


def tone(record: Record) -> Tone:
    """Return the colour of the headline: only the published experiment reproduces a claim of it."""
    outcomes = {verdict.outcome for verdict in record.verdicts}
    if outcomes & {"failed", "not-reproduced"}:
        return "bad"
    return "good" if "reproduced" in outcomes and not record.plan.differences else "neutral"


def heading(title: str) -> str:
    """Return the title of a column on one line."""
    return title.replace("-\n", "").replace("\n", " ")


def gib(count: int) -> str:
    """Return bytes in GiB."""
    return f"{count / GIB:.1f} GiB"


def _difference(differences: Sequence[Difference]) -> str:
    first, more = differences[0], len(differences) - 1
    text = f"{first.field} {plain(first.found)}, published {plain(first.published)}"
    return f"{text}; {plural(more, 'more field')} differ{'s' if more == 1 else ''}" if more else text


def _spoken(name: Outcome) -> str:
    return name.replace("-", " ")
