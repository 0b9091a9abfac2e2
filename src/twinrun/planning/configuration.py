"""Where a plan is not the published configuration: each setting of its points, held against two manifests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from twinrun.manifests.published import Accepted, accepted_rows
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.plan import Plan
from twinrun.workloads import load_workload
from twinrun.workloads.settings import Difference, Fingerprint, differences
from twinrun.workloads.workload import Point


def differences_of_points(
    recipe: LoadedRecipe,
    plan: Plan,
    points: Sequence[tuple[str, Point]],
    *,
    stated: Mapping[str, Accepted],
    about: Callable[[str], bool] = lambda _: True,
) -> list[tuple[Difference, ...]]:
    """Hold every setting of points against the publication and, where that is silent, against recipe.toml.

    Args:
        points: each with the name of the one that the publication means.
        stated: fields that the publication gives; of lists, the nearest row counts.
        about: which of the other settings are asked at all.
    """
    settings, older = load_workload(recipe.workload).settings, plan.recipe_version < recipe.recipe.version
    different: dict[object, tuple[Fingerprint, Fingerprint]] = {}
    for name, point in points:
        own = settings.of(plan.part, point)
        written = settings.of(*settings.as_written(recipe.tables, plan.part, point, name))
        # Points of a sweep have the same settings, where they differ in their number of nodes alone.
        different[*own.items(), *written.items()] = own, written
    found = []
    for own, written in different.values():
        asked = {field: value for field, value in own.items() if field in stated or about(field)}
        expected = {field: value for field, value in written.items() if about(field)}
        rows = (differences(asked, row, written=expected, older=older) for row in accepted_rows(stated))
        found.append(min(rows, key=_distance))
    return found


def differences_of_plan(recipe: LoadedRecipe, plan: Plan) -> tuple[Difference, ...]:
    """Return where the point that is nearest to the publication is not as published."""
    points = [(point.id, point) for point in plan.points]
    found = differences_of_points(recipe, plan, points, stated=recipe.published.fingerprint)
    return min(found, key=len, default=())


def _distance(apart: Sequence[Difference]) -> tuple[bool, int]:
    """Return how far a row is: one of another model is farther than one that differs in anything else."""
    return any(one.field == "parameters" for one in apart), len(apart)
