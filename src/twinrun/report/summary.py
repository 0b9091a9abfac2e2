"""What stands for a record, and which record stands for a subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.protocol.bench import EAGER
from twinrun.protocol.measurements import Measurement
from twinrun.results.judged import Judged, hardware, most_devices
from twinrun.workloads.tables_and_charts import Table, word_table
from twinrun.workloads.workload import MeasuredPoint


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
