"""The configuration that a claim is about, and how a run stands to it: what counts, and what is neutral."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim, ClaimSide, RecordClaim
from twinrun.manifests.metrics import reason_for
from twinrun.manifests.published import RULE, Accepted
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.configuration import differences_of_points
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.workloads.settings import ABSENT, Difference, Fingerprint, Value
from twinrun.workloads.workload import Point


class NeutralDifference(Frozen):
    """A setting in which a run differs, and why that does not change what a claim says."""

    field: str
    found: Value
    published: Accepted
    because: str


class Apart(NamedTuple):
    """How a run stands to the configuration that a claim is about."""

    differences: tuple[Difference, ...]
    """What differs and counts."""
    neutral: tuple[NeutralDifference, ...] = ()
    """What differs and is declared neutral."""

    @property
    def words(self) -> str:
        """What differs and counts, in words; empty where nothing does."""
        return "; ".join(map(str, self.differences))

    @property
    def every(self) -> list[Difference | NeutralDifference]:
        """What differs, whether it counts or is neutral."""
        return [*self.differences, *self.neutral]


def apart_from(
    claim: Claim | RecordClaim,
    recipe: LoadedRecipe,
    plan: Plan,
    points: Sequence[Point],
    project: Project,
    *,
    meant: str = "",
    here: bool = False,
    setting: str | None = None,
    side: ClaimSide | None = None,
    known: dict[object, dict[str, Difference]] | None = None,
) -> Apart:
    """Hold the settings of planned points, each for itself, against what a claim is about.

    Args:
        meant: the point that the publication means by those of a run that have other names.
        here: the claim is judged away from the published run, as it is or as its restatement says.
        setting: which of the values of a claim between records the plan is of, for example its model.
        side: which side of such a claim it is of.
        known: what was found of the plan before, which is asked once for claims of one configuration.
    """
    stated: Mapping[str, Accepted]
    if isinstance(claim, Claim):
        stated = recipe.published.fingerprint_of(claim)
    else:
        own = {claim.setting: setting} if claim.setting and setting is not None else {}
        stated = {**recipe.published.fingerprint, **(side.settings if side else {}), **own}
    named = claim.between or ((claim.point,) if claim.point else ())
    under = [(point.id if point.id in named or not meant else meant, point) for point in points]
    key = (*((name, point.id) for name, point in under), *stated.items(), claim.kind == "score")
    if known is None or (found := known.get(key)) is None:
        about = partial(_is_about, claim)
        apart = differences_of_points(recipe, plan, under, stated=stated, about=about)
        found = {one.field: one for of_point in reversed(apart) for one in of_point}
        if known is not None:
            known[key] = found
    neutral = neutral_for(claim, recipe, project, here=here)
    reasons = {name: reason_for(neutral, name) for name in found}
    return Apart(
        differences=tuple(one for name, one in found.items() if reasons[name] is None),
        neutral=tuple(
            NeutralDifference(field=name, found=one.found, published=one.published, because=because)
            for name, one in found.items()
            if (because := reasons[name]) is not None
        ),
    )


def sides_apart(
    over: Fingerprint, under: Fingerprint, claim: RecordClaim, recipe: LoadedRecipe, project: Project
) -> list[tuple[str, Value, Value]]:
    """Return the settings in which the two sides of a claim differ, but for those declared neutral."""
    neutral = neutral_for(claim, recipe, project, here=False)
    own = {name for side in (claim.over, claim.under) for name in side.settings}
    names = [name for name in dict.fromkeys((*over, *under)) if name not in own]
    sides = [(name, over.get(name, ABSENT), under.get(name, ABSENT)) for name in names]
    return [one for one in sides if one[1] != one[2] and reason_for(neutral, one[0]) is None]


def neutral_for(
    claim: Claim | RecordClaim, recipe: LoadedRecipe, project: Project, *, here: bool
) -> dict[str, str]:
    """Return what is declared neutral for a claim, fields or groups of them, each with its reason."""
    metric = claim.here.metric if here and claim.here else claim.metric
    freed = dict.fromkeys(claim.here.free, claim.here.because) if here and claim.here else {}
    return {**freed, **project.metrics[metric].neutral, **recipe.published.neutral_of(claim.id, here=here)}


def _is_about(claim: Claim | RecordClaim, field: str) -> bool:
    """Say whether a setting is asked at all: a score is not about other tasks than its own."""
    if not (isinstance(claim, Claim) and claim.kind == "score"):
        return True
    if field.startswith(RULE):
        return field.removeprefix(RULE) in claim.rules
    return not field.startswith("task.") or field.split(".")[1] in claim.rules
