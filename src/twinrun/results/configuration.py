"""The configuration that a claim is about, and how a run stands to it: what counts, and what is neutral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from twinrun.manifests.claims import Claim, ClaimSide, RecordClaim
from twinrun.manifests.metrics import reason_for
from twinrun.manifests.published import RULE, Accepted
from twinrun.planning.configuration import differences_of_points
from twinrun.results.judged import Judged
from twinrun.workloads.settings import ABSENT, Difference, Fingerprint, Value
from twinrun.workloads.workload import Point


class Apart(NamedTuple):
    """How a run stands to the configuration that a claim is about."""

    differences: tuple[Difference, ...]
    """What differs and counts."""
    neutral: tuple[Difference, ...] = ()
    """What differs and is declared neutral."""

    @property
    def words(self) -> str:
        """What differs and counts, in words; empty where nothing does."""
        return "; ".join(map(str, self.differences))

    @property
    def every(self) -> list[Difference]:
        """What differs, whether it counts or is neutral."""
        return [*self.differences, *self.neutral]


def apart_from(
    claim: Claim | RecordClaim,
    record: Judged,
    points: Sequence[Point],
    *,
    meant: str = "",
    here: bool = False,
    setting: str = "",
    side: ClaimSide | None = None,
) -> Apart:
    """Hold the settings of planned points, each for itself, against what a claim is about.

    Args:
        meant: the point that the publication means by those of a run that have other names.
        here: the claim is judged away from the published run, as it is or as its restatement says.
        setting: which of the values of a claim between records the plan is of, for example its model.
        side: which side of such a claim it is of.
    """
    published = record.recipe.published
    stated: Mapping[str, Accepted]
    if isinstance(claim, Claim):
        stated = published.fingerprint_of(claim)
    else:
        own = {claim.setting: setting} if claim.setting and setting else {}
        stated = {**published.fingerprint, **(side.settings if side else {}), **own}
    named = claim.between or ((claim.point,) if claim.point else ())
    under = [(point.id if point.id in named or not meant else meant, point) for point in points]
    key = (*((name, point.id) for name, point in under), *stated.items(), claim.kind == "score")
    # Asked once for claims of one configuration, however many there are.
    if (found := record.known.get(key)) is None:
        about = partial(_is_about, claim)
        apart = differences_of_points(record.recipe, record.plan, under, stated=stated, about=about)
        found = record.known[key] = {one.field: one for of_point in reversed(apart) for one in of_point}
    neutral = neutral_for(claim, record, here=here)
    decided = {name: reason_for(neutral, name) is None for name in found}
    return Apart(
        differences=tuple(one for name, one in found.items() if decided[name]),
        neutral=tuple(one for name, one in found.items() if not decided[name]),
    )


def sides_apart(
    over: Fingerprint, under: Fingerprint, claim: RecordClaim, record: Judged
) -> list[tuple[str, Value, Value]]:
    """Return the settings in which the two sides of a claim differ, but for those declared neutral."""
    neutral = neutral_for(claim, record, here=False)
    own = {name for side in (claim.over, claim.under) for name in side.settings}
    names = [name for name in dict.fromkeys((*over, *under)) if name not in own]
    sides = [(name, over.get(name, ABSENT), under.get(name, ABSENT)) for name in names]
    return [one for one in sides if one[1] != one[2] and reason_for(neutral, one[0]) is None]


def neutral_for(claim: Claim | RecordClaim, record: Judged, *, here: bool) -> dict[str, str]:
    """Return what is declared neutral for a claim, fields or groups of them, each with its reason."""
    restated = claim.here if here else None
    freed = dict.fromkeys(restated.free, restated.because) if restated else {}
    metric = record.project.metrics[(restated or claim).metric]
    return {**freed, **metric.neutral, **record.recipe.published.neutral_of(claim.id, here=here)}


def _is_about(claim: Claim | RecordClaim, field: str) -> bool:
    """Say whether a setting is asked at all: a score is not about other tasks than its own."""
    if not (isinstance(claim, Claim) and claim.kind == "score"):
        return True
    if field.startswith(RULE):
        return field.removeprefix(RULE) in claim.rules
    return not field.startswith("task.") or field.split(".")[1] in claim.rules
