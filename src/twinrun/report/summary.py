"""What stands for a record, what its points have in common, and which record stands for a subject."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.bench import EAGER
from twinrun.protocol.measurements import Measurement
from twinrun.report.words import SIGNS
from twinrun.results.judged import Judged, hardware
from twinrun.results.verdicts import Verdict
from twinrun.workloads.tables_and_charts import Table, text, word_columns
from twinrun.workloads.workload import MeasuredPoint


def result(record: Judged, metrics: Mapping[str, Metric]) -> tuple[str, str]:
    """Return the number that stands for a record, and what it is a number of.

    It is of the largest points, and a range where they have several measurements of the metric.
    """
    largest = [point for point in record.points if point.devices == _devices(record)]
    for name in record.workload.headline:
        found = [one for point in largest for one in standing_for(point, name)]
        if found:
            return spread_over([one.median for one in found], metrics[name]), _counted(
                found, largest, metrics[name]
            )
    return "nothing", "no point was measured"


def standing_for(point: MeasuredPoint, metric: str) -> list[Measurement]:
    """Return the measurements of a metric that stand for a point: what beats eager torch alone is none."""
    found = [one for one in point.measurements if one.metric == metric]
    return [one for one in found if one.labels.get("baseline") != EAGER]


def spread_over(medians: Sequence[float], metric: Metric) -> str:
    """Return a value, or the lowest and the highest of several, a dash for none."""
    if not medians:
        return "-"
    ends = dict.fromkeys(shown_value(value, metric) for value in (min(medians), max(medians)))
    return " to ".join(ends)


def _counted(found: Sequence[Measurement], points: Sequence[MeasuredPoint], metric: Metric) -> str:
    unit = "" if metric.unit == RATIO else f" in {metric.unit}"
    where = points[0].id if len(points) == 1 else plural(len(points), "point")
    several = f"{plural(len(found), 'measurement')} of " if len(found) > 1 else ""
    return f"{metric.title}{unit}, {several}{where}"


def shown_value(value: float, metric: Metric) -> str:
    """Return a value without its unit; a share of one is in percent."""
    if metric.unit == RATIO and "%" in metric.units:
        return percent(value)
    return f"{value:.2f}" if metric.unit == RATIO else number(value)


def claims_of(
    verdicts: Sequence[Verdict], published: PublishedClaims
) -> list[tuple[Verdict, Claim | RecordClaim | None]]:
    """Pair each verdict with its claim, None where the recipe dropped it since; what failed comes first."""
    claims = published.restated
    ordered = sorted(verdicts, key=lambda one: list(SIGNS).index(one.final))
    return [(verdict, claims.get(verdict.claim)) for verdict in ordered]


def facts_of(points: Sequence[MeasuredPoint]) -> list[tuple[str, str]]:
    """Return by name what was found at the points; where they differ, of which point it is."""
    names = dict.fromkeys(name for point in points for name in point.facts)
    return [
        (name, _common((point.id, point.facts.get(name, "unknown")) for point in points)) for name in names
    ]


def _common(found: Iterable[tuple[str, str]]) -> str:
    values = dict(found)
    distinct = dict.fromkeys(values.values())
    return (
        next(iter(distinct))
        if len(distinct) == 1
        else "; ".join(f"{name}: {one}" for name, one in values.items())
    )


def placement_table(points: Sequence[MeasuredPoint]) -> Table:
    """Return where each point ran, and what did not fit before."""
    columns = ("Point", "Nodes", "Devices", "Hosts", "Did not fit into memory")
    rows = tuple(
        tuple(
            text(one)
            for one in (
                point.id,
                str(point.nodes),
                str(point.devices),
                ", ".join(point.hosts) or "not recorded",
                ", ".join(point.attempts) or "-",
            )
        )
        for point in points
    )
    return Table(
        title="Where each point ran.",
        columns=word_columns(*columns),
        rows=rows,
    )


def software(record: Judged) -> str:
    """Return which PyTorch ran, which a stack's name does not say where its lock was not installed."""
    torch = record.record.libraries.get("torch")
    return f"PyTorch {torch}" if torch else "no PyTorch"


def label(record: Judged) -> str:
    """Return what tells a record from others of its hardware and subject."""
    return f"{record.created[:16].replace('T', ' ')}, run {record.run}"


# A stack's name: toolkit with its version, and PyTorch.
_STACK = re.compile(r"[a-z]+(?P<toolkit>\d[\d.]*)-torch(?P<torch>\d+\.\d+)")
# A release of PyTorch, and the toolkit that it was built for.
_TORCH = re.compile(r"(?P<torch>\d+\.\d+)\.\w+(\+[a-z]+(?P<toolkit>\d[\d.]*))?")


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
    for record in records:
        groups.setdefault((hardware(record), record.description.subject), []).append(record)
    found = [(group, _subject(*names, group)) for names, group in groups.items()]
    found.sort(key=lambda one: (-_devices(one[0][0]), -judged(one[1].shown), one[1].hardware))
    return [subject for _, subject in found]


def selected(records: Sequence[Judged]) -> list[Judged]:
    """Return the record that stands for each hardware and subject, where one says what ran."""
    return [one.shown for one in ranked(records) if one.shown]


def unnamed(record: Judged) -> str:
    """Return why a record does not say what ran: which commit, and which PyTorch; empty where it does."""
    if record.record.revision.commit is None:
        return "the run has no commit"
    if record.record.revision.changes_sha256 is not None:
        return "the commit of the run had changes"
    torch = record.record.libraries.get("torch")
    if torch is None or _named_after(record, torch):
        return ""
    return f"PyTorch {torch} ran under the name {record.plan.stack}"


def _named_after(record: Judged, torch: str) -> bool:
    stack, ran = _STACK.fullmatch(record.plan.stack), _TORCH.fullmatch(torch)
    if stack is None or ran is None:
        # The name of the stack has no version: its lock has.
        return "torch" not in record.environment.lock_differences
    toolkits = [found["toolkit"].replace(".", "") for found in (stack, ran) if found["toolkit"]]
    return stack["torch"] == ran["torch"] and toolkits[-1].startswith(toolkits[0])


def _subject(machine: str, subject: str, group: Sequence[Judged]) -> SubjectRecords:
    newest = sorted(group, key=lambda one: one.created, reverse=True)
    named = [record for record in newest if not unnamed(record)]
    # A record of an older version measured something else, and one of fewer points only a part.
    shown = max(named, key=lambda one: (one.plan.recipe_version, len(one.points)), default=None)
    others = tuple(one for one in newest if one is not shown)
    return SubjectRecords(machine, subject, shown, others, "" if shown else unnamed(newest[0]))


def _devices(record: Judged) -> int:
    return max((point.devices for point in record.points), default=0)


def judged(record: Judged | None) -> int:
    """Return how many claims about a record were decided."""
    verdicts = record.verdicts if record else ()
    return sum(verdict.final not in ("not-comparable", "config-mismatch") for verdict in verdicts)
