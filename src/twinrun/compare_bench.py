"""Two benchmark records side by side: what differs, and how much faster one is at each measurement."""

from __future__ import annotations

from twinrun.circumstances import Difference, bench_circumstances, differences
from twinrun.errors import InputError
from twinrun.manifest import Frozen
from twinrun.record import BenchRecord, CaseRecord, MeasurementRecord, Spread


class TimePair(Frozen):
    """One measurement in both records; `ratio` is how many times as fast B is as A."""

    case: str
    measurement: str
    a: Spread
    b: Spread
    ratio: float
    within_spread: bool
    """Whether the extremes of the timed calls overlap."""


class BenchComparison(Frozen):
    """Two records of one benchmark."""

    recipe: str
    run_a: str
    run_b: str
    sha256_a: str
    sha256_b: str
    summary: str
    pairs: tuple[TimePair, ...]
    differences: tuple[Difference, ...]
    """Largest likely effect on speed first."""


def compare_benches(a: BenchRecord, b: BenchRecord) -> BenchComparison:
    """Put two records of one benchmark side by side.

    Raises:
        InputError: another recipe, or nothing that both have timed.
    """
    if a.plan.recipe != b.plan.recipe:
        raise InputError(
            "the records are of different recipes",
            found=f"{a.plan.recipe} and {b.plan.recipe}",
            allowed="the same in both records",
        )
    pairs = tuple(pair for case in a.points for pair in _pairs(case, b.point(case.id)))
    if not pairs:
        raise InputError(
            "no measurement was timed in both records",
            place=a.run,
            found=f"cases {_names(a)} and {_names(b)}",
            hint="a run at scale smoke checks and does not time",
        )
    return BenchComparison(
        recipe=a.plan.recipe,
        run_a=a.run,
        run_b=b.run,
        sha256_a=a.digest(),
        sha256_b=b.digest(),
        summary=_summary(pairs),
        pairs=pairs,
        differences=differences(bench_circumstances(a), bench_circumstances(b)),
    )


def _pairs(case: CaseRecord, other: CaseRecord | None) -> list[TimePair]:
    if other is None or case.settings != other.settings:
        return []
    both = [(one, other.measurement(one.id)) for one in case.measurements]
    return [pair for one, same in both if same and (pair := _pair(case.id, one, same))]


def _pair(case: str, one: MeasurementRecord, other: MeasurementRecord) -> TimePair | None:
    a, b = one.ours.milliseconds, other.ours.milliseconds
    if a is None or b is None:
        return None
    return TimePair(
        case=case,
        measurement=one.id,
        a=a,
        b=b,
        ratio=a.median / b.median,
        within_spread=a.low <= b.high and b.low <= a.high,
    )


def _summary(pairs: tuple[TimePair, ...]) -> str:
    ratios = sorted(pair.ratio for pair in pairs)
    apart = sum(not pair.within_spread for pair in pairs)
    return (
        f"B is {ratios[0]:.2f} to {ratios[-1]:.2f} times as fast as A over {len(pairs)} measurements,"
        f" {apart} of which differ by more than their spread"
    )


def _names(record: BenchRecord) -> str:
    return ", ".join(point.id for point in record.points)
