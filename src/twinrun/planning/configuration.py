"""Where a plan is not the published configuration: each setting of its points, held against two manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.plan import Plan
from twinrun.workloads import load_workload
from twinrun.workloads.settings import Difference, Fingerprint, accepted_rows, differences
from twinrun.workloads.workload import Point


class PointDifferences(NamedTuple):
    """Where one point is not as published, and which of its settings no publication gives."""

    differences: tuple[Difference, ...]
    silent: tuple[str, ...]


def differences_of_point(
    recipe: LoadedRecipe,
    part: Any,
    point: Point,
    *,
    stated: Mapping[str, Accepted],
    name: str | None = None,
    about: Callable[[str], bool] = lambda _: True,
    older: bool = False,
) -> PointDifferences:
    """Hold every setting of a point against the publication and, where that is silent, against recipe.toml.

    Args:
        part: what the workload says of the plan.
        stated: fields that the publication gives; of lists, the nearest row counts.
        name: the point that the publication means; the same where not given.
        about: which of the other settings are asked at all.
        older: the plan is of an older version of the recipe.
    """
    return _apart(*_settings(recipe, part, point, name), stated, about, older)


def differences_of_plan(recipe: LoadedRecipe, plan: Plan) -> tuple[Difference, ...]:
    """Return where the point that is nearest to the publication is not as published."""
    settings = [_settings(recipe, plan.part, point) for point in plan.points]
    older = plan.recipe_version < recipe.recipe.version
    # Points of a sweep have the same settings, where they differ in their number of nodes alone.
    different = {(*own.items(), *written.items()): (own, written) for own, written in settings}
    stated = recipe.published.fingerprint
    found = (_apart(own, written, stated, older=older).differences for own, written in different.values())
    return min(found, key=len, default=())


def _settings(
    recipe: LoadedRecipe, part: Any, point: Point, name: str | None = None
) -> tuple[Fingerprint, Fingerprint]:
    """Return the settings of a point, and those that recipe.toml has for it."""
    settings = load_workload(recipe.workload).settings
    written = settings.as_written(recipe.tables, part, point, name or point.id)
    return settings.of(part, point), settings.of(*written)


def _apart(
    own: Fingerprint,
    written: Fingerprint,
    stated: Mapping[str, Accepted],
    about: Callable[[str], bool] = lambda _: True,
    older: bool = False,
) -> PointDifferences:
    asked = {field: value for field, value in own.items() if field in stated or about(field)}
    expected = {field: value for field, value in written.items() if about(field)}
    rows = accepted_rows(stated)
    apart = min((differences(asked, row, written=expected, older=older) for row in rows), key=_distance)
    return PointDifferences(apart, tuple(field for field in expected if field not in stated))


def _distance(apart: Sequence[Difference]) -> tuple[bool, int]:
    """Return how far a row is: one of another model is farther than one that differs in anything else."""
    return any(one.field == "parameters" for one in apart), len(apart)
