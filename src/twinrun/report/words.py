"""Outcomes and claimed values in words, the same on every surface."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from twinrun.foundation.text import GIB, number, percent, plural
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import FAILURES, Outcome, Verdict, measured_here, published_here

# As judges write them into a reason, before what makes a restatement weaker.
_DEPARTURES = re.compile(r" Run: (?P<fields>.*?)\.(?= Weaker than published: |$)", re.DOTALL)
Tone = Literal["good", "bad", "neutral"]

# Outcomes in the order of interest to a reader. The sign repeats what the colour says.
SIGNS: dict[Outcome, str] = {
    "failed": "!",
    "not-reproduced": "✗",
    "fails-here": "✗",
    "reproduced": "✓",
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


def outcome(verdict: Verdict) -> str:
    """Return the outcome with its sign, in one or two words."""
    return f"{SIGNS[verdict.final]} {_spoken(verdict.final)}"


def reason(verdict: Verdict) -> str:
    """Return why a verdict is what it is, without the fields in which the run differs."""
    return "".join(_parts_of(verdict)[::2])


def departures(verdict: Verdict) -> str:
    """Return the fields in which the run differs from the published one, empty where none is named."""
    return _parts_of(verdict)[1]


def _parts_of(verdict: Verdict) -> tuple[str, str, str]:
    found = _DEPARTURES.search(verdict.why)
    if found is None:
        return verdict.why, "", ""
    return verdict.why[: found.start()], found["fields"], verdict.why[found.end() :]


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


def headline(record: Record) -> str:
    """Say in one sentence what became of the claims on which hardware, and whether it ran small."""
    place = " ".join([hardware(record), *_small(record)])
    if not record.verdicts and (found := _reached(record)):
        return f"On {place}: {record.description.subject} reaches {found}. No claim is about one run alone."
    return _smoke(place, record) if record.plan.scale == "smoke" else sentence(place, record.verdicts)


def _reached(record: Record) -> str:
    """Return the metric that stands for a record, at its largest point; empty where it has none."""
    point = max(record.points, key=lambda one: one.devices)
    for metric in record.workload.headline:
        for one in point.measurements:
            if one.metric == metric:
                share = metric == "model-flops-share"
                value = percent(one.median) if share else f"{number(one.median)} {one.unit}"
                return f"{value} of the dense peak at {point.id}" if share else f"{value} at {point.id}"
    return ""


def _smoke(place: str, record: Record) -> str:
    """Say what a smoke run shows: that the code does what claims say of it, and nothing of a publication."""
    counts = Counter(verdict.final for verdict in record.verdicts)
    held, failed = counts["holds-here"], sum(counts[name] for name in FAILURES)
    checks = f"{plural(held, 'check')} of the code {'holds' if held == 1 else 'hold'}"
    broken = [f"{plural(failed, 'check')} {'fails' if failed == 1 else 'fail'}"] if failed else []
    waiting = len(record.verdicts) - held - failed
    rest = [f"{plural(waiting, 'claim')} {'needs' if waiting == 1 else 'need'} a GPU"] if waiting else []
    return f"Smoke run on {place}: {', '.join([checks, *broken, *rest])}."


def _small(record: Record) -> Iterator[str]:
    """Yield in what a run is smaller than the published one, which a verdict does not say."""
    for one in record.plan.differences:
        accepted = one.published if isinstance(one.published, tuple) else (one.published,)
        sizes = [size for size in accepted if isinstance(size, int)]
        if one.field == "parameters" and isinstance(one.found, int) and sizes and one.found < min(sizes):
            found, published = (f"{number(count / 1e6)} M" for count in (one.found, min(sizes)))
            yield f"with {found} of {published} parameters"


def claims_in_words(verdicts: Sequence[Verdict]) -> str:
    """Count the claims that were judged, and name those that failed."""
    counts = Counter(verdict.final for verdict in verdicts)
    here = "holds here" if counts["holds-here"] == 1 else "hold here"
    held = [(counts["reproduced"], "reproduced"), (counts["holds-here"], here)]
    failed = [one for one in verdicts if one.final in FAILURES]
    parts = [f"{count} {name}" for count, name in held if count]
    parts += [f"{SIGNS[one.final]} `{one.claim}` {_spoken(one.final)}" for one in failed]
    return ", ".join(parts) or "none judged"


def headline_of_all(records: Sequence[Record], between: Sequence[Verdict]) -> str:
    """Say in one sentence what became of the claims between `records`."""
    *first, last = dict.fromkeys(map(hardware, records))
    return sentence(" and ".join([", ".join(first), last] if first else [last]), between)


def sentence(place: str, verdicts: Sequence[Verdict]) -> str:
    """Count the claims that reproduced as published, those that hold here, and the rest."""
    if not verdicts:
        return f"On {place}: no claim was judged."
    counts = Counter(verdict.final for verdict in verdicts)
    rest = [
        f"{counts[name]} {one if counts[name] == 1 else several}"
        for name, (one, several) in COUNTED.items()
        if counts[name]
    ]
    whole = f"{counts['reproduced']} of {plural(len(verdicts), 'claim')} reproduced as published"
    return f"On {place}: {', '.join([whole, *rest])}."


def tone(record: Record) -> Tone:
    """Return the colour of the headline."""
    outcomes = {verdict.final for verdict in record.verdicts}
    if outcomes & set(FAILURES):
        return "bad"
    shown = record.plan.scale != "smoke" and outcomes & {"reproduced", "holds-here"}
    return "good" if shown else "neutral"


def heading(title: str) -> str:
    """Return the title of a column on one line."""
    return title.replace("-\n", "").replace("\n", " ")


def gib(count: int) -> str:
    """Return bytes in GiB."""
    return f"{count / GIB:.1f} GiB"


def _spoken(name: Outcome) -> str:
    return name.replace("-", " ")
