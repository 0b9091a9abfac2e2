"""Whether a run is the published configuration: every setting counts, but for those declared neutral.

A setting is held against published.toml and, where the publication is silent, against recipe.toml at its
paper scale. What may differ all the same stands with a reason in metrics.toml, for all claims in a metric, or
in a row `neutral` of published.toml, for claims of one recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim, ClaimSide, RecordClaim
from twinrun.manifests.metrics import Metric, reason_for
from twinrun.manifests.published import RULE, Accepted, PublishedClaims
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.configuration import differences_of_point
from twinrun.planning.plan import Plan
from twinrun.results.record import Record
from twinrun.workloads.settings import ABSENT, Difference, Fingerprint, Value
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
    side: ClaimSide | None = None,
) -> Configuration:
    """Hold the settings of points, each for itself, against what a claim is about.

    Args:
        points: those that the claim is judged at; none means all that were planned.
        here: the claim is judged away from the published run, as it is or as its restatement says.
        value: which of the values of a claim between records the record is of, for example its model.
        side: which side of such a claim it is of.
    """
    names = {point.id for point in points}
    planned = [point for point in record.plan.points if point.id in names or not names]
    return configuration_of_plan(
        record.plan, planned, claim, recipe=recipe, metrics=metrics, here=here, value=value, side=side
    )


def configuration_of_plan(
    plan: Plan,
    points: Sequence[Point],
    claim: Claim | RecordClaim,
    *,
    recipe: LoadedRecipe,
    metrics: Mapping[str, Metric],
    here: bool = False,
    value: str | None = None,
    side: ClaimSide | None = None,
) -> Configuration:
    """Hold the settings of planned points, each for itself, as `configuration_of` does those of a record."""
    stated = published_of(claim, recipe.published, value=value, side=side)
    neutral = neutral_for(claim, recipe.published, metrics, here=here)
    found: dict[str, Difference] = {}
    silent: dict[str, None] = {}
    for point in points:
        apart, unstated = differences_of_point(
            recipe,
            plan.part,
            point,
            stated=stated,
            name=_name(claim, point),
            about=partial(_is_about, claim),
        )
        found = {one.field: one for one in apart} | found
        silent |= dict.fromkeys(unstated)
    reasons = {name: reason_for(neutral, name) for name in found}
    return Configuration(
        differences=tuple(one for name, one in found.items() if reasons[name] is None),
        neutral=tuple(
            NeutralDifference(field=name, found=one.found, published=one.published, because=because)
            for name, one in found.items()
            if (because := reasons[name]) is not None
        ),
        silent=tuple(silent),
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
    over, under = (_settings(*one) for one in (a, b))
    neutral = neutral_for(claim, published, metrics, here=False)
    sides = (
        (name, over.get(name, ABSENT), under.get(name, ABSENT)) for name in dict.fromkeys((*over, *under))
    )
    own = {name for side in (claim.over, claim.under) for name in side.settings}
    differ = (one for one in sides if one[1] != one[2] and one[0] not in own)
    return tuple(one for one in differ if reason_for(neutral, one[0]) is None)


def neutral_for(
    claim: Claim | RecordClaim, published: PublishedClaims, metrics: Mapping[str, Metric], *, here: bool
) -> dict[str, str]:
    """Return what is declared neutral for a claim, fields or groups of them, each with its reason."""
    metric = claim.here.metric if here and claim.here else claim.metric
    freed = dict.fromkeys(claim.here.free, claim.here.because) if here and claim.here else {}
    return {**freed, **metrics[metric].neutral, **published.neutral_of(claim.id, here=here)}


def published_of(
    claim: Claim | RecordClaim,
    published: PublishedClaims,
    *,
    value: str | None = None,
    side: ClaimSide | None = None,
) -> dict[str, Accepted]:
    """Return the fields that the publication gives of what a claim is about; lists are read by `rows`."""
    if isinstance(claim, Claim):
        return published.fingerprint_of(claim)
    own = {claim.setting: value} if claim.setting and value is not None else {}
    return {**published.fingerprint, **(side.settings if side else {}), **own}


def lacks(record: Record, point: PointRecord, settings: Mapping[str, Value]) -> bool:
    """Say whether a point has another value than `settings` in one of their fields."""
    own = _settings(record, point)
    return any(own.get(name, ABSENT) != value for name, value in settings.items())


def _name(claim: Claim | RecordClaim, point: Point) -> str:
    """Return the point that the publication means where a run has this one."""
    named = claim.between or ((claim.point,) if claim.point else ())
    return named[0] if named and point.id not in named else point.id


def _settings(record: Record, point: PointRecord) -> Fingerprint:
    planned = record.plan.points_by_id[point.id]
    return record.workload.settings.of(record.plan.part, planned)


def _is_about(claim: Claim | RecordClaim, field: str) -> bool:
    """Say whether a setting is asked at all: a score is not about other tasks than its own."""
    if not (isinstance(claim, Claim) and claim.kind == "score"):
        return True
    if field.startswith(RULE):
        return field.removeprefix(RULE) in claim.rules
    return not field.startswith("task.") or field.split(".")[1] in claim.rules
