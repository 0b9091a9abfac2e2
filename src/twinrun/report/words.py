"""Outcomes and claimed values in words, the same on every surface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from twinrun.foundation.text import number, percent, plural
from twinrun.results.judged import Judged, hardware
from twinrun.results.verdicts import (
    FAILURES,
    HOLDS,
    QUESTIONS,
    ConditionName,
    Outcome,
    Verdict,
    measured_here,
    published_here,
)

Tone = Literal["good", "bad", "neutral"]

# Outcomes in the order of interest to a reader. The sign repeats what the colour says.
SIGNS: dict[Outcome, str] = {
    "failed": "!",
    "not-reproduced": "✗",
    "fails-here": "✗",
    "reproduced": "✓",
    "exceeds": "▲",
    "holds-here": "✓",
    "config-mismatch": "≠",
    "not-comparable": "○",
}
# How one claim, and how several, of an outcome are counted in a sentence.
COUNTED: dict[Outcome, tuple[str, str]] = {
    "holds-here": ("holds here", "hold here"),
    "fails-here": ("fails here", "fail here"),
    "not-reproduced": ("not reproduced", "not reproduced"),
    "failed": ("failed", "failed"),
    "config-mismatch": ("of another configuration", "of another configuration"),
    "not-comparable": ("cannot be asked here", "cannot be asked here"),
}
# Needs of a claim that was not judged, and of several, by the condition that is not met.
UNASKED = COUNTED["not-comparable"]
NEEDS: dict[ConditionName, tuple[str, str]] = {
    "hardware": ("needs the published hardware", "need the published hardware"),
    "written": ("is not written yet", "are not written yet"),
    "subject": ("is of another model", "are of another model"),
    "account": ("needs a whole record", "need a whole record"),
    "points": ("needs points that did not run", "need points that did not run"),
    "configuration": ("is of another configuration", "are of another configuration"),
    "order": ("needs one order of the data", "need one order of the data"),
    "measured": ("needs a number that was not measured", "need numbers that were not measured"),
    "training": ("needs more training", "need more training"),
    "correctness": ("has a wrong result", "have wrong results"),
    "bounds": ("has an impossible number", "have impossible numbers"),
    "samples": ("is undecided", "are undecided"),
}


def outcome(verdict: Verdict) -> str:
    """Return the outcome with its sign, in one or two words."""
    return f"{SIGNS[verdict.final]} {_spoken(verdict.final)}"


def shown_conditions(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return each condition of the outcome that counts: its sign, its question and what was seen."""
    found = verdict.here.conditions if verdict.here else verdict.conditions
    return [(SIGNS["reproduced" if one.met else "failed"], QUESTIONS[one.name], one.seen) for one in found]


def quantity(value: float, unit: str, per: str) -> str:
    """Return a value with its unit and what it counts."""
    if unit == "ratio":
        return f"{value:.3f}"
    return f"{number(value)} {unit}{'' if per == 'run' else f' per {per}'}"


def published_value(verdict: Verdict) -> str:
    """Return what the publication said when the verdict was given."""
    # 0 says that curves or numbers are equal.
    return quantity(verdict.published, verdict.unit, verdict.per) if verdict.published else "equal"


def published_neutral(verdict: Verdict) -> str:
    """Return the published value in the neutral metric of the restatement, empty where none was judged."""
    return published_here(verdict.neutral) if verdict.neutral else ""


def measured_value(verdict: Verdict) -> str:
    """Return what the run says, in the neutral metric where the claim was restated; a dash for nothing."""
    if verdict.neutral and verdict.neutral.measured is not None:
        return measured_here(verdict.neutral)
    if verdict.measured is None:
        return "-"
    if verdict.published:
        return quantity(verdict.measured, verdict.unit, verdict.per)
    return f"{verdict.measured:.2g} apart" if verdict.measured else "equal"


def headline(record: Judged) -> str:
    """Say in one sentence what became of the claims on which hardware, and whether it ran small."""
    place = " ".join([hardware(record), *_small(record)])
    if not record.verdicts and (found := _reached(record)):
        return f"On {place}: {record.description.subject} reaches {found}. No claim is about one run alone."
    return _smoke(place, record) if record.plan.scale == "smoke" else sentence(place, record.verdicts)


def _reached(record: Judged) -> str:
    """Return the metric that stands for a record, at its largest point; empty where it has none."""
    point = max(record.points, key=lambda one: one.devices)
    for metric in record.workload.headline:
        for one in point.measurements:
            if one.metric == metric:
                share = metric == "model-flops-share"
                value = percent(one.median) if share else f"{number(one.median)} {one.unit}"
                return f"{value} of the dense peak at {point.id}" if share else f"{value} at {point.id}"
    return ""


def _smoke(place: str, record: Judged) -> str:
    """Say what a smoke run shows: that the code does what claims say of it, and nothing of a publication."""
    held = sum(one.final == "holds-here" for one in record.verdicts)
    rest = [one for one in record.verdicts if one.final not in ("holds-here", *FAILURES)]
    parts = [*_checked(record)]
    parts += [f"{plural(held, 'check')} of the code {'holds' if held == 1 else 'hold'}"] if held else []
    parts += [
        *_failed(record.verdicts),
        *_waiting(rest, NEEDS | {"hardware": ("claim needs a GPU", "claims need a GPU")}),
    ]
    return f"Smoke run on {place}: {', '.join(parts) or 'nothing was judged'}."


def _checked(record: Judged) -> Iterator[str]:
    """Yield how many checks passed, which failed, and how many results are as right as is allowed."""
    checks = [one for point in record.points for one in point.checks]
    if checks:
        passed = sum(one.outcome == "pass" for one in checks)
        yield f"{passed} of {plural(len(checks), 'check')} {'passes' if passed == 1 else 'pass'}"
        if failed := dict.fromkeys(one.id for one in checks if one.outcome == "fail"):
            yield f"{', '.join(failed)} {'fails' if len(failed) == 1 else 'fail'}"
    # Ours alone: an implementation beside it is somebody else's.
    errors = [
        f"{point.id} {one.id}"
        for point in record.points
        for one in point.measurements
        if one.metric == "error" and "@" not in one.id
    ]
    wrong = [one for one in record.refusals if one.kind == "correctness" and not one.number]
    if errors or wrong:
        results = max(len(errors), len(wrong))
        yield f"{results - len(wrong)} of {plural(results, 'result')} within the allowed error"


def _failed(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield each claim that failed by its name."""
    return (f"`{one.claim}` {_spoken(one.final)}" for one in verdicts if one.final in FAILURES)


def _waiting(verdicts: Sequence[Verdict], needs: Mapping[ConditionName, tuple[str, str]]) -> Iterator[str]:
    """Yield how many claims were not judged, and what they need, by the condition that is not met."""
    names = Counter(one.obstacle.name if one.obstacle else None for one in verdicts)
    for name, count in names.items():
        one, several = needs.get(name, UNASKED) if name else UNASKED
        yield f"{count} {one if count == 1 else several}"


def _small(record: Judged) -> Iterator[str]:
    """Yield in what a run is smaller than the published one, which a verdict does not say."""
    for one in record.differences:
        accepted = one.published if isinstance(one.published, tuple) else (one.published,)
        sizes = [size for size in accepted if isinstance(size, int)]
        if one.field == "parameters" and isinstance(one.found, int) and sizes and one.found < min(sizes):
            found, published = (f"{number(count / 1e6)} M" for count in (one.found, min(sizes)))
            yield f"with {found} of {published} parameters"


def claims_in_words(verdicts: Sequence[Verdict]) -> str:
    """Count the claims that were judged, and name those that failed."""
    counts = Counter(verdict.final for verdict in verdicts)
    held = [(counts["reproduced"], "reproduced"), (counts["exceeds"], "above the published value")]
    held.append((counts["holds-here"], COUNTED["holds-here"][counts["holds-here"] != 1]))
    failed = [one for one in verdicts if one.final in FAILURES]
    parts = [f"{count} {name}" for count, name in held if count]
    parts += [f"{SIGNS[one.final]} `{one.claim}` {_spoken(one.final)}" for one in failed]
    return ", ".join(parts) or "none judged"


def headline_of_all(records: Sequence[Judged], verdicts: Sequence[Verdict]) -> str:
    """Say in one sentence what became of claims about `records`, of one alone and between them."""
    *first, last = dict.fromkeys(map(hardware, records))
    return sentence(" and ".join([", ".join(first), last] if first else [last]), verdicts)


def sentence(place: str, verdicts: Sequence[Verdict]) -> str:
    """Count the claims that reproduced as published, those that hold here, and the rest."""
    if not verdicts:
        return f"On {place}: no claim was judged."
    counts = Counter(verdict.final for verdict in verdicts)
    parts = [f"{counts['reproduced']} of {plural(len(verdicts), 'claim')} reproduced as published"]
    if above := counts["exceeds"]:
        parts.append(f"{above} above the published value")
    if held := counts["holds-here"]:
        parts.append(f"{held} {COUNTED['holds-here'][held != 1]}")
    if other := counts["config-mismatch"]:
        parts.append(f"{other} {COUNTED['config-mismatch'][0]}")
    waiting = [one for one in verdicts if one.final == "not-comparable"]
    return f"On {place}: {', '.join([*parts, *_failed(verdicts), *_waiting(waiting, NEEDS)])}."


def tone(record: Judged) -> Tone:
    """Return the colour of the headline."""
    found = tone_of(record.verdicts)
    return "neutral" if found == "good" and record.plan.scale == "smoke" else found


def tone_of(verdicts: Sequence[Verdict]) -> Tone:
    """Return the colour of claims: that of a failure where there is one."""
    outcomes = {verdict.final for verdict in verdicts}
    if outcomes & set(FAILURES):
        return "bad"
    return "good" if outcomes & set(HOLDS) else "neutral"


def worst_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with those that failed first, else in their order."""
    return sorted(verdicts, key=lambda one: one.final not in FAILURES)


def heading(title: str) -> str:
    """Return the title of a column on one line."""
    return title.replace("-\n", "").replace("\n", " ")


def _spoken(name: Outcome) -> str:
    return name.replace("-", " ")
