"""Whether a run is the published configuration: every setting counts, but for those declared neutral.

A setting is held against published.toml and, where the publication is silent, against recipe.toml at its
paper scale. What may differ all the same stands with a reason in metrics.toml, for all claims in a metric, or
in a row `neutral` of published.toml, for claims of one recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import Metric, reason_for
from twinrun.manifests.published import Accepted, PublishedClaims
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.results.record import Record
from twinrun.workloads import load_workload
from twinrun.workloads.settings import ABSENT, Difference, Fingerprint, Value, differences, rows
from twinrun.workloads.workload import Point, PointRecord


class NeutralDifference(Frozen):
    """A setting in which a run differs, and why that does not change what a claim says."""

    field: str
    found: Value
    published: Accepted
    because: str


class Configuration(Frozen):
    """How a run stands to the configuration that a claim is about."""

    differences: tuple[Difference, ...]
    """What differs and counts."""
    neutral: tuple[NeutralDifference, ...] = ()
    """What differs and is declared neutral."""
    silent: tuple[str, ...] = ()
    """Settings that the publication does not give: they are held against recipe.toml alone."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs that counts."""
        return not self.differences

    @property
    def words(self) -> str:
        """What differs and counts, in words; empty where nothing does."""
        return "; ".join(map(str, self.differences))


def configuration_of(
    record: Record,
    points: Sequence[PointRecord],
    claim: Claim | RecordClaim,
    *,
    recipe: LoadedRecipe,
    metrics: Mapping[str, Metric],
    here: bool = False,
    value: str | None = None,
) -> Configuration:
    """Hold the settings of points, each for itself, against what a claim is about.

    Args:
        points: those that the claim is judged at; none means all that were planned.
        here: the claim is judged away from the published run, as it is or as its restatement says.
        value: which of the values of a claim between records the record is of, for example its model.
    """
    planned = _planned(record, points)
    neutral = neutral_for(claim, recipe.published, metrics, here=here)
    found: dict[str, Difference] = {}
    stated = published_of(claim, recipe.published, value=value)
    written: Fingerprint = {}
    for point in planned:
        written = _written(recipe, record, point, _name(claim, point))
        own = _found(record, point)
        apart = min((differences(own, row, written=written) for row in rows(stated)), key=len)
        for one in apart:
            found.setdefault(one.field, one)
    reasons = {name: reason_for(neutral, name) for name in found}
    return Configuration(
        differences=tuple(one for name, one in found.items() if reasons[name] is None),
        neutral=tuple(
            NeutralDifference(field=name, found=one.found, published=one.published, because=because)
            for name, one in found.items()
            if (because := reasons[name]) is not None
        ),
        silent=tuple(name for name in written if name not in stated),
    )


def apart(
    a: tuple[Record, PointRecord],
    b: tuple[Record, PointRecord],
    claim: RecordClaim,
    *,
    published: PublishedClaims,
    metrics: Mapping[str, Metric],
) -> tuple[tuple[str, Value, Value], ...]:
    """Return the settings in which the two sides of a claim differ, but for those declared neutral."""
    (over, under) = (_found(record, _planned(record, [point])[0]) for record, point in (a, b))
    neutral = neutral_for(claim, published, metrics, here=False)
    sides = (
        (name, over.get(name, ABSENT), under.get(name, ABSENT)) for name in dict.fromkeys((*over, *under))
    )
    return tuple(one for one in sides if one[1] != one[2] and reason_for(neutral, one[0]) is None)


def neutral_for(
    claim: Claim | RecordClaim, published: PublishedClaims, metrics: Mapping[str, Metric], *, here: bool
) -> dict[str, str]:
    """Return what is declared neutral for a claim, fields or groups of them, each with its reason."""
    metric = claim.here.metric if here and claim.here else claim.metric
    freed = dict.fromkeys(claim.here.free, claim.here.because) if here and claim.here else {}
    return {**metrics[metric].neutral, **freed, **published.neutral_of(claim.id, here=here)}


def published_of(
    claim: Claim | RecordClaim, published: PublishedClaims, *, value: str | None = None
) -> dict[str, Accepted]:
    """Return the fields that the publication gives of what a claim is about; lists are read by `rows`."""
    if isinstance(claim, Claim):
        return published.fingerprint_of(claim)
    own = {claim.setting: value} if claim.setting and value is not None else {}
    return {**published.fingerprint, **own}


def _planned(record: Record, points: Sequence[PointRecord]) -> list[Point]:
    asked = {point.id for point in points} or {point.id for point in record.plan.points}
    return [point for point in record.plan.points if point.id in asked]


def _name(claim: Claim | RecordClaim, point: Point) -> str:
    """Return the point that the publication means where a run has this one."""
    named = claim.between or ((claim.point,) if claim.point else ())
    return named[0] if named and point.id not in named else point.id


def _found(record: Record, point: Point) -> Fingerprint:
    return record.workload.settings(record.plan.part, point)


def _written(recipe: LoadedRecipe, record: Record, point: Point, name: str) -> Fingerprint:
    workload = load_workload(recipe.workload)
    part, placed = workload.as_written(recipe.tables, record.plan.part, point, name)
    return workload.settings(part, placed)
