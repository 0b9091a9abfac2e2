"""Outcomes, values and records in words, the same on every surface, and which record stands for a subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from twinrun.foundation.signatures import UNSIGNED
from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.protocol.bench import EAGER
from twinrun.protocol.measurements import Measurement
from twinrun.results.judged import Judged, hardware, most_devices
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
from twinrun.workloads.tables_and_charts import Table, word_table
from twinrun.workloads.workload import MeasuredPoint

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
# What is said of one claim that was not judged, by the condition that is not met.
NEEDS: dict[ConditionName | None, str] = {
    None: "cannot be asked here",
    "hardware": "needs the published hardware",
    "written": "is not written yet",
    "subject": "is of another model",
    "account": "needs a whole record",
    "points": "needs points that did not run",
    "configuration": "is of another configuration",
    "order": "needs one order of the data",
    "measured": "needs a number that was not measured",
    "training": "needs more training",
    "correctness": "has a wrong result",
    "bounds": "has an impossible number",
    "samples": "is undecided",
}
# Verbs of one claim, and of several.
_VERBS = {"needs": "need", "is": "are", "has": "have", "holds": "hold", "exceeds": "exceed"}


def outcome(verdict: Verdict) -> str:
    """Return the outcome with its sign, in one or two words; of one that exceeds, how many times."""
    factor = (verdict.here or verdict).factor
    times = f", {factor:.3g} times" if verdict.final == "exceeds" and factor else ""
    return f"{SIGNS[verdict.final]} {verdict.final.replace('-', ' ')}{times}"


def doubted(verdict: Verdict) -> list[str]:
    """Return the doubts that stand beside an outcome, with their numbers."""
    every = (*verdict.doubts, *(verdict.here.doubts if verdict.here else ()))
    return [f"Doubt {number}: {one}." for number, one in enumerate(dict.fromkeys(every), 1)]


def vouched(record: Judged) -> str:
    """Return who vouches for a record: nobody, or one signer."""
    return record.signer if record.signer == UNSIGNED else f"{record.signer}, one signer"


def shown_conditions(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Return each condition of the outcome that counts: its sign, its question and what was seen."""
    found = verdict.here.conditions if verdict.here else verdict.conditions
    return [(SIGNS["reproduced" if one.met else "failed"], QUESTIONS[one.name], one.seen) for one in found]


def quantity(value: float, unit: str, per: str) -> str:
    """Return a value with its unit and what it counts."""
    if unit == RATIO:
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
    found = verdict.here if verdict.here and verdict.measured is None else verdict
    if found.measured is None:
        return "-"
    if found.published:
        return quantity(found.measured, found.unit, found.per)
    return f"{found.measured:.2g} apart" if found.measured else "equal"


def headline(record: Judged) -> str:
    """Say in one sentence what became of the claims on which hardware, and whether it ran small."""
    place = " ".join([hardware(record), *_small(record)])
    if not record.verdicts and record.points:
        value, of = result(record, record.project.metrics)
        reached = f"{record.description.subject} reaches {value} ({of})"
        return f"On {place}: {reached}. No claim is about one run alone."
    return _smoke(place, record) if record.plan.scale == "smoke" else sentence(place, record.verdicts)


def _smoke(place: str, record: Judged) -> str:
    """Say what a smoke run shows: that the code does what claims say of it, and nothing of a publication."""
    held = sum(one.final == "holds-here" for one in record.verdicts)
    rest = [one for one in record.verdicts if one.final not in ("holds-here", *FAILURES)]
    parts = [*_checked(record)]
    parts += [f"{plural(held, 'check')} of the code {'holds' if held == 1 else 'hold'}"] if held else []
    waiting = (one.replace("the published hardware", "a GPU") for one in _waiting(rest, "claim"))
    return f"Smoke run on {place}: {', '.join([*parts, *_failed(record.verdicts), *waiting]) or 'no claim'}."


def _checked(record: Judged) -> Iterator[str]:
    """Yield how many checks passed, which failed, and how many results are as right as is allowed."""
    checks = [one for point in record.points for one in point.checks]
    # A check may have an outcome for each device: it passes where all of them do.
    if names := {one.id for one in checks}:
        passed = len(names - {one.id for one in checks if one.outcome != "pass"})
        yield f"{passed} of {plural(len(names), 'check')} {'passes' if passed == 1 else 'pass'}"
        if failed := dict.fromkeys(one.id for one in checks if one.outcome == "fail"):
            yield f"{', '.join(failed)} {'fails' if len(failed) == 1 else 'fail'}"
    # Ours alone: an implementation beside it is somebody else's.
    every = (one for point in record.points for one in point.measurements)
    results = sum(one.metric == "error" and "@" not in one.id for one in every)
    wrong = sum(one.kind == "correctness" and not one.number for one in record.refusals)
    if results or wrong:
        results = max(results, wrong)
        yield f"{results - wrong} of {plural(results, 'result')} within the allowed error"


def _failed(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield each claim that failed by its name."""
    return (f"`{one.claim}` {one.final.replace('-', ' ')}" for one in verdicts if one.final in FAILURES)


def _waiting(verdicts: Sequence[Verdict], noun: str = "") -> Iterator[str]:
    """Yield how many claims were not judged, and what they need, by the condition that is not met."""
    counts = Counter[str]()
    for one in verdicts:
        other: ConditionName | None = "configuration" if one.final == "config-mismatch" else None
        counts[NEEDS.get(one.obstacle.name if one.obstacle else other, NEEDS[None])] += 1
    return (_of(count, said, noun) for said, count in counts.items())


def _of(count: int, said: str, noun: str = "") -> str:
    """Return a count with what is said of one claim, in the number that it needs."""
    verb, _, rest = said.partition(" ")
    counted = plural(count, noun) if noun else str(count)
    return f"{counted} {verb if count == 1 else _VERBS.get(verb, verb)} {rest}"


def _small(record: Judged) -> Iterator[str]:
    """Yield in what a run is smaller than the published one, which a verdict does not say."""
    for one in record.differences:
        accepted = one.published if isinstance(one.published, tuple) else (one.published,)
        sizes = [size for size in accepted if isinstance(size, int)]
        if one.field == "parameters" and isinstance(one.found, int) and sizes and one.found < min(sizes):
            found, published = (f"{number(count / 1e6)} M" for count in (one.found, min(sizes)))
            yield f"with {found} of {published} parameters"


def _held(verdicts: Sequence[Verdict]) -> Iterator[str]:
    counts = Counter(verdict.final for verdict in verdicts)
    if counts["exceeds"]:
        yield _of(counts["exceeds"], "exceeds the published value")
    if counts["holds-here"]:
        yield _of(counts["holds-here"], "holds here")


def claims_in_words(verdicts: Sequence[Verdict]) -> str:
    """Count the claims that were judged, and name those that failed."""
    reproduced = sum(one.final == "reproduced" for one in verdicts)
    parts = [*([f"{reproduced} reproduced"] if reproduced else []), *_held(verdicts), *_failed(verdicts)]
    return ", ".join(parts) or "none judged"


def headline_of_all(records: Sequence[Judged], verdicts: Sequence[Verdict]) -> str:
    """Say in one sentence what became of claims about `records`, of one alone and between them."""
    *first, last = dict.fromkeys(map(hardware, records))
    return sentence(" and ".join([", ".join(first), last] if first else [last]), verdicts)


def sentence(place: str, verdicts: Sequence[Verdict]) -> str:
    """Count the claims that reproduced as published, those that hold here, and the rest."""
    if not verdicts:
        return f"On {place}: no claim was judged."
    reproduced = sum(one.final == "reproduced" for one in verdicts)
    parts = [f"{reproduced} of {plural(len(verdicts), 'claim')} reproduced as published", *_held(verdicts)]
    waiting = [one for one in verdicts if one.final in ("config-mismatch", "not-comparable")]
    return f"On {place}: {', '.join([*parts, *_failed(verdicts), *_waiting(waiting)])}."


def tone_of(verdicts: Sequence[Verdict], *, smoke: bool = False) -> Tone:
    """Return the colour of claims: that of a failure where there is one."""
    outcomes = {verdict.final for verdict in verdicts}
    if outcomes & set(FAILURES):
        return "bad"
    return "good" if outcomes & set(HOLDS) and not smoke else "neutral"


def by_interest(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts with those that failed first, then those that hold."""
    return sorted(verdicts, key=lambda one: list(SIGNS).index(one.final))


def heading(title: str) -> str:
    """Return the title of a column on one line."""
    return title.replace("-\n", "").replace("\n", " ")


def result(record: Judged, metrics: Mapping[str, Metric]) -> tuple[str, str]:
    """Return the number that stands for a record, and what it is a number of.

    It is of the largest points, and a range where they have several measurements of the metric.
    """
    largest = [point for point in record.points if point.devices == most_devices(record)]
    for name in record.workload.headline:
        if found := [one for point in largest for one in standing_for(point, name)]:
            metric = metrics[name]
            several = f"{plural(len(found), 'measurement')} of " if len(found) > 1 else ""
            where = largest[0].id if len(largest) == 1 else plural(len(largest), "point")
            return spread_over([one.median for one in found], metric), f"{titled(metric)}, {several}{where}"
    return "nothing", "no point was measured"


def standing_for(point: MeasuredPoint, metric: str) -> list[Measurement]:
    """Return the measurements of a metric that stand for a point: what beats eager torch alone is none."""
    found = [one for one in point.measurements if one.metric == metric]
    return [one for one in found if one.labels.get("baseline") != EAGER]


def spread_over(medians: Sequence[float], metric: Metric) -> str:
    """Return a value without its unit, or the lowest and the highest of several; a share is in percent."""
    is_share = metric.unit == RATIO and "%" in metric.units
    shown = percent if is_share else "{:.2f}".format if metric.unit == RATIO else number
    return " to ".join(dict.fromkeys(shown(value) for value in (min(medians), max(medians))))


def titled(metric: Metric) -> str:
    """Return the title of a metric with its unit."""
    return metric.title if metric.unit in (RATIO, metric.title) else f"{metric.title} in {metric.unit}"


def facts_of(points: Sequence[MeasuredPoint]) -> list[tuple[str, str]]:
    """Return by name what was found at the points; where they differ, of which point it is."""
    found = []
    for name in dict.fromkeys(name for point in points for name in point.facts):
        values = {point.id: point.facts.get(name, "unknown") for point in points}
        same = len(set(values.values())) == 1
        said = (
            next(iter(values.values()))
            if same
            else "; ".join(f"{place}: {one}" for place, one in values.items())
        )
        found.append((name, said))
    return found


def placement_table(points: Sequence[MeasuredPoint]) -> Table:
    """Return where each point ran, and what did not fit before."""
    heads = ("Point", "Nodes", "Devices", "Hosts", "Did not fit into memory")
    rows = (
        (
            *(one.id, str(one.nodes), str(one.devices), ", ".join(one.sent.hosts)),
            ", ".join(one.sent.attempts) or "-",
        )
        for one in points
    )
    return word_table("Where each point ran.", heads, rows)


def software(record: Judged) -> str:
    """Return which PyTorch ran, which a stack's name does not say where its lock was not installed."""
    torch = record.record.libraries.get("torch")
    return f"PyTorch {torch}" if torch else "no PyTorch"


class SubjectRecords(NamedTuple):
    """The records of one hardware and subject."""

    hardware: str
    subject: str
    shown: Judged | None
    """The record that stands for them; None where none says what ran."""
    others: tuple[Judged, ...]
    """The other records, newest first."""
    lacking: str
    """Why none is shown: what the newest does not say."""


def ranked(records: Sequence[Judged]) -> list[SubjectRecords]:
    """Return the records of each hardware and subject: most devices first, then most claims judged."""
    groups: dict[tuple[str, str], list[Judged]] = {}
    for record in sorted(records, key=lambda one: one.created, reverse=True):
        groups.setdefault((hardware(record), record.description.subject), []).append(record)
    found = [(group, _subject(*names, group)) for names, group in groups.items()]
    found.sort(key=lambda one: (-most_devices(one[0][0]), -decided(one[1].shown), one[1].hardware))
    return [subject for _, subject in found]


def selected(records: Sequence[Judged]) -> list[Judged]:
    """Return the record that stands for each hardware and subject, where one says what ran."""
    return [one.shown for one in ranked(records) if one.shown]


def unnamed(record: Judged) -> str:
    """Return why a record does not say which commit and which PyTorch ran; empty where it does."""
    revision = record.record.revision
    if revision.commit is None:
        return "the run has no commit"
    if not revision.is_clean and revision.commit:
        return "the commit of the run had changes"
    other = record.environment.lock_differences.get("torch")
    return f"PyTorch {other}, under the name {record.plan.stack}" if other else ""


def _subject(machine: str, subject: str, newest: Sequence[Judged]) -> SubjectRecords:
    named = [record for record in newest if not unnamed(record)]
    # A record of an older version measured something else, and one of fewer points only a part.
    shown = max(named, key=lambda one: (one.plan.recipe_version, len(one.points)), default=None)
    others = tuple(one for one in newest if one is not shown)
    return SubjectRecords(machine, subject, shown, others, "" if shown else unnamed(newest[0]))


def decided(record: Judged | None) -> int:
    """Return how many claims about a record were decided."""
    verdicts = record.verdicts if record else ()
    return sum(verdict.final not in ("not-comparable", "config-mismatch") for verdict in verdicts)
