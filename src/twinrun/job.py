"""Resolving a request into a plan: the whole run as data, before anything happens."""

from __future__ import annotations

from typing import Any

from twinrun.benchmark import Bench
from twinrun.errors import InputError, closest
from twinrun.files import canonical_json, sha256_of_bytes
from twinrun.fingerprint import Difference, Fingerprint, differences, fingerprint, nearest
from twinrun.hardware import Gpu
from twinrun.manifest import Frozen, validate
from twinrun.recipe import BenchScale, LoadedBench, LoadedRecipe, Scale
from twinrun.settings import assign, parse_settings
from twinrun.sizing import Budget, Case, Point, counts, points, world_size
from twinrun.stack import LoadedStack
from twinrun.training import DataSource, ModelShape, Training


class AnyPlan(Frozen):
    """What decides what any run does and means."""

    recipe: str
    recipe_version: int
    script: str
    scale: str
    vendor: str
    gpu: str | None
    """Row of images/gpus.toml the points are meant for; null on a CPU."""
    stack: str
    lock_sha256: str
    image: str
    engine: str
    launcher: str

    def sha256(self) -> str:
        """Return the digest that says whether two runs do the same."""
        return sha256_of_bytes(canonical_json(self.model_dump(mode="json")).encode())


class Plan(AnyPlan):
    """Everything that decides what a training sweep does and means."""

    shape: ModelShape
    training: Training
    data: DataSource
    points: tuple[Point, ...]
    fingerprint: Fingerprint
    differences: tuple[Difference, ...]
    """Where the run is not the published configuration."""


class BenchPlan(AnyPlan):
    """Everything that decides what a benchmark does and means."""

    bench: Bench
    points: tuple[Case, ...]
    fingerprint: Fingerprint
    """Of the case nearest to the published configuration."""
    differences: tuple[Difference, ...]
    """Where that case is not the published configuration."""


def resolve_bench(
    *,
    loaded: LoadedBench,
    scale: str,
    settings: tuple[str, ...],
    stack: LoadedStack,
    gpu: Gpu | None,
    engine: str,
    launcher: str,
) -> BenchPlan:
    """Turn choices into the plan of a benchmark; pure. Takes and raises what `resolve` does."""
    recipe, chosen = loaded.recipe, loaded.recipe.scales[scale]
    overrides = parse_settings(settings)
    names = _chosen_cases(loaded, chosen, overrides.pop("cases", None))
    bench = _bench(loaded, chosen, overrides)
    points = tuple(
        Case(id=name, nodes=1, devices_per_node=1, settings=bench.options | recipe.cases[name])
        for name in names
    )
    marks, found = nearest((point.settings for point in points), loaded.published.fingerprint)
    return BenchPlan(
        recipe=recipe.name,
        recipe_version=recipe.version,
        script=loaded.script(),
        scale=scale,
        vendor=stack.stack.vendor,
        gpu=gpu.id if gpu else None,
        stack=stack.stack.name,
        lock_sha256=stack.lock_sha256,
        image=stack.image(),
        engine=engine,
        launcher=launcher,
        bench=bench,
        points=points,
        fingerprint=marks,
        differences=found,
    )


def resolve(
    *,
    loaded: LoadedRecipe,
    scale: str,
    settings: tuple[str, ...],
    stack: LoadedStack,
    gpu: Gpu | None,
    device_memory_bytes: int | None,
    devices: int,
    engine: str,
    launcher: str,
) -> Plan:
    """Turn choices into a plan; pure.

    Args:
        settings: `key=value` texts that override fields of the recipe's training table.
        gpu: the GPU model of the points, None for a CPU or a GPU that images/gpus.toml lacks.
        device_memory_bytes: memory of one device, None on a CPU.
        devices: GPUs of this machine, 0 on a CPU.

    Raises:
        InputError: a setting that does not exist or does not fit.
        MachineError: the model does not fit into the devices.
    """
    recipe, chosen = loaded.recipe, loaded.recipe.scales[scale]
    overrides = parse_settings(settings)
    sizes = counts(chosen.sweep, requested=overrides.pop("devices", None), devices=devices)
    training = _training(loaded, chosen, overrides)
    if chosen.models and "model" not in overrides:
        training = _largest_that_fits(loaded, chosen, training, sizes[-1], device_memory_bytes)
    shape = recipe.models[training.model]
    budget = Budget(shape=shape, training=training, device_memory_bytes=device_memory_bytes)
    marks = fingerprint(shape, training)
    return Plan(
        recipe=recipe.name,
        recipe_version=recipe.version,
        script=loaded.script(training.trainer),
        scale=scale,
        vendor=stack.stack.vendor,
        gpu=gpu.id if gpu else None,
        stack=stack.stack.name,
        lock_sha256=stack.lock_sha256,
        image=stack.image(),
        engine=engine,
        launcher=launcher,
        shape=shape,
        training=training,
        data=recipe.data[training.data],
        points=points(chosen.sweep, sizes, budget),
        fingerprint=marks,
        differences=differences(marks, loaded.published.fingerprint),
    )


def _bench(loaded: LoadedBench, scale: BenchScale, overrides: dict[str, Any]) -> Bench:
    """Lay the scale's fields, then the user's, over the published table."""
    manifest = f"{loaded.folder}/recipe.toml"
    table = loaded.recipe.bench.model_dump(mode="json")
    for key, value in scale.set.items():
        assign(table, key, value, place=f"{manifest}:set.{key}")
    validate(table, Bench, place=manifest)
    for key, value in overrides.items():
        assign(table, key, value, place=f"--set {key}")
    return validate(table, Bench, place="--set")


def _chosen_cases(loaded: LoadedBench, scale: BenchScale, asked: Any) -> tuple[str, ...]:
    if asked is None:
        return scale.cases
    names = asked if isinstance(asked, list) else str(asked).split(",")
    for name in names:
        _known("cases", str(name), loaded.recipe.cases)
    return tuple(dict.fromkeys(map(str, names)))


def _training(loaded: LoadedRecipe, scale: Scale, overrides: dict[str, Any]) -> Training:
    """Lay the scale's fields, then the user's, over the published training table."""
    manifest = f"{loaded.folder}/recipe.toml"
    table = loaded.recipe.training.model_dump(mode="json")
    for key, value in scale.set.items():
        assign(table, key, value, place=f"{manifest}:set.{key}")
    validate(table, Training, place=manifest)
    for key, value in overrides.items():
        assign(table, key, value, place=f"--set {key}")
    training = validate(table, Training, place="--set")
    _known("model", training.model, loaded.recipe.models)
    _known("data", training.data, loaded.recipe.data)
    if training.warmup_steps >= training.steps:
        raise InputError(
            "no step would be timed",
            place="--set warmup_steps",
            found=f"{training.warmup_steps} of {training.steps} steps",
            allowed="fewer warm-up steps than steps",
        )
    return training


def _known(key: str, name: str, table: dict[str, Any]) -> None:
    if name not in table:
        raise InputError(
            "no such name", place=f"--set {key}", found=name, allowed=list(table), hint=closest(name, table)
        )


def _largest_that_fits(
    loaded: LoadedRecipe, scale: Scale, training: Training, size: int, device_memory_bytes: int | None
) -> Training:
    candidates = [training.model_copy(update={"model": name}) for name in scale.models]
    for candidate in candidates:
        shape = loaded.recipe.models[candidate.model]
        budget = Budget(shape=shape, training=candidate, device_memory_bytes=device_memory_bytes)
        if budget.fits(world_size(scale.sweep, size)):
            return candidate
    return candidates[-1]
