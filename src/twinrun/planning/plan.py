"""The whole run as data, before anything happens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, Self

from pydantic import Field, ValidationInfo, field_validator

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.workloads import load_workload
from twinrun.workloads.sweep import over_nodes
from twinrun.workloads.workload import Choice, PlanDescription, PlanPart, PlanRequest, Point, PointPart


class Plan(Frozen, Generic[PlanPart, PointPart]):
    """Everything that decides what a run does and means."""

    recipe: str
    recipe_version: int
    workload: str
    script: str
    """What every rank runs: a file of the recipe, relative to the root, or a module of twinrun."""
    scale: str
    vendor: str
    gpu: str | None
    """Row of images/gpus.toml the points are meant for; null on a CPU."""
    stack: str
    lock_sha256: str
    image: str
    engine: str
    launcher: str
    scheduler: str
    part: PlanPart = Field(json_schema_extra={"type": "object"})
    """What the workload says of the run."""
    points: tuple[Point[PointPart], ...]

    @field_validator("part")
    @classmethod
    def _typed_part(cls, part: Any, read: ValidationInfo) -> Any:
        """Read what a file says as the type of its workload."""
        name = read.data.get("workload")
        return load_workload(name).read_plan(part) if name else part

    @field_validator("points")
    @classmethod
    def _typed_points(cls, points: tuple[Point, ...], read: ValidationInfo) -> tuple[Point, ...]:
        name = read.data.get("workload")
        return load_workload(name).read_points(points) if name else points

    @cached_property
    def description(self) -> PlanDescription:
        """What follows from the plan, computed once."""
        return load_workload(self.workload).describe(self.part, self.points)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values, which is described anew."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("description", None)
        return copied

    def sha256(self) -> str:
        """Return the digest that says whether two runs do the same, whatever was estimated of them."""
        content = self.model_dump(mode="json", exclude={"points": {"__all__": {"seconds", "predicted"}}})
        return sha256_of_bytes(canonical_json(content).encode())


def resolve(
    request: PlanRequest, *, engine: str, launcher: str, scheduler: str
) -> tuple[Plan, tuple[Choice, ...]]:
    """Turn choices into a plan, and say what the workload chose; pure.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: the devices cannot hold it.
    """
    recipe, stack, gpu = request.recipe, request.stack, request.hardware.gpu
    workload = load_workload(recipe.workload)
    planned = workload.plan(request)
    # A path of this machine says nothing elsewhere.
    own = recipe.recipe.script and f"{recipe.recipe.name}/{recipe.recipe.script}"
    script = own if recipe.elsewhere else recipe.recipe.script and recipe.file(recipe.recipe.script)
    assert script or workload.module, "a recipe without a script is refused when it is loaded"
    plan = Plan(
        recipe=recipe.recipe.name,
        recipe_version=recipe.recipe.version,
        workload=recipe.workload,
        script=script or workload.module or "",
        scale=request.scale,
        vendor=stack.stack.vendor,
        gpu=gpu.id if gpu else None,
        stack=stack.stack.name,
        lock_sha256=stack.lock_sha256,
        image=stack.image(),
        engine=engine,
        launcher=launcher,
        scheduler=scheduler,
        part=planned.part,
        points=tuple(over_nodes(point, request.node_devices) for point in planned.points),
    )
    return plan, planned.choices
