"""What stands for a record, and what its points have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from twinrun.foundation.text import number, percent, plain, plural
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.bench import EAGER
from twinrun.protocol.measurements import Fact, Measurement
from twinrun.results.record import Record
from twinrun.results.verdicts import Verdict
from twinrun.workloads.tables_and_charts import Column, Table, text
from twinrun.workloads.workload import PointRecord


def result(record: Record, metrics: Mapping[str, Metric]) -> tuple[str, str]:
    """Return the number that stands for a record, and what it is a number of.

    It is of the largest points, and a range where they have several measurements of the metric.
    """
    most = max((point.devices for point in record.points), default=0)
    largest = [point for point in record.points if point.devices == most]
    for name in record.workload.headline:
        found = [one for point in largest for one in standing_for(point, name)]
        if found:
            return spread_over([one.median for one in found], metrics[name]), _counted(
                found, largest, metrics[name]
            )
    return "nothing", "no point was measured"


def standing_for(point: PointRecord, metric: str) -> list[Measurement]:
    """Return the measurements of a metric that stand for a point: what beats eager torch alone is none."""
    found = [one for one in point.measurements if one.metric == metric]
    return [one for one in found if one.labels.get("baseline") != EAGER]


def spread_over(medians: Sequence[float], metric: Metric) -> str:
    """Return a value, or the lowest and the highest of several, a dash for none."""
    if not medians:
        return "-"
    ends = dict.fromkeys(size(value, metric) for value in (min(medians), max(medians)))
    return " to ".join(ends)


def _counted(found: Sequence[Measurement], points: Sequence[PointRecord], metric: Metric) -> str:
    unit = "" if metric.unit == RATIO else f" in {metric.unit}"
    where = points[0].id if len(points) == 1 else plural(len(points), "point")
    several = f"{plural(len(found), 'measurement')} of " if len(found) > 1 else ""
    return f"{metric.title}{unit}, {several}{where}"


def size(value: float, metric: Metric) -> str:
    """Return a value without its unit; a share of one is in percent."""
    if metric.unit == RATIO and "%" in metric.units:
        return percent(value)
    return f"{value:.2f}" if metric.unit == RATIO else number(value)


def claims_of(
    verdicts: Sequence[Verdict], published: PublishedClaims
) -> list[tuple[Verdict, Claim | RecordClaim | None]]:
    """Pair each verdict with its claim, None where the recipe has dropped the claim since."""
    claims: dict[str, Claim | RecordClaim] = {claim.id: claim for claim in published.claim}
    claims |= {claim.id: claim for claim in published.between_records}
    return [(verdict, claims.get(verdict.claim)) for verdict in verdicts]


def facts(points: Sequence[PointRecord]) -> list[tuple[str, str]]:
    """Return by name what was found at the points; where they differ, of which point it is."""
    names = dict.fromkeys(name for point in points for name in point.facts)
    return [(name, _common((point.id, _fact(point.facts.get(name))) for point in points)) for name in names]


def _common(found: Iterable[tuple[str, str]]) -> str:
    values = dict(found)
    distinct = dict.fromkeys(values.values())
    return (
        next(iter(distinct))
        if len(distinct) == 1
        else "; ".join(f"{name}: {one}" for name, one in values.items())
    )


def _fact(value: Fact) -> str:
    if value is None:
        return "unknown"
    return number(value) if isinstance(value, float) else plain(value)


def placements(points: Sequence[PointRecord]) -> Table:
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
        columns=tuple(Column(title=one, numeric=False) for one in columns),
        rows=rows,
    )


def software(record: Record) -> str:
    """Return what ran, which a stack's name does not say where its lock was not installed."""
    torch = record.environment.libraries.get("torch")
    kept = "as locked" if record.environment.as_locked else "not the lock's"
    return f"PyTorch {torch} ({kept})" if torch else "no PyTorch"


def label(record: Record) -> str:
    """Return what tells a record from others of its hardware and subject."""
    return f"{record.created[:16].replace('T', ' ')}, run {record.run}"
