"""Circumstances of a measured point by name, and what a change of each is likely to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from twinrun.manifest import Frozen
from twinrun.record import BenchRecord, PointRecord, Record

Grade = Literal["large", "some", "small", "none"]
ABSENT = "absent"


class Factor(Frozen):
    """A circumstance and what a change of it is likely to do."""

    pattern: str
    """Shell pattern over the names that `circumstances` gives."""
    speed: Grade
    numerics: Grade
    because: str


def _factor(pattern: str, speed: Grade, numerics: Grade, because: str) -> Factor:
    return Factor(pattern=pattern, speed=speed, numerics=numerics, because=because)


# In the order of likely effect on speed; the first pattern that matches a name grades it.
FACTORS = (
    _factor("GPU model", "large", "small", "peak arithmetic and memory bandwidth; sums in another order"),
    _factor("processor", "large", "small", "without a GPU the processor does the arithmetic"),
    _factor("devices", "large", "small", "less work for each device, more communication"),
    _factor("nodes", "large", "small", "communication leaves the node"),
    _factor("model", "large", "large", "arithmetic for each token, and the size of its matrices"),
    _factor("shape.*", "some", "large", "part of the model"),
    _factor("training.precision", "large", "some", "16 bits are several times faster and round more"),
    _factor("recipe version", "some", "large", "a version is raised by every change that may move a number"),
    _factor("training.global_batch", "some", "large", "work between optimizer steps; another optimisation"),
    _factor("training.activation_checkpointing", "large", "none", "a third more arithmetic"),
    _factor("training.attention", "large", "small", "the written-out formula keeps the whole matrix"),
    _factor("training.trainer", "large", "small", "another training loop around the same model"),
    _factor("training.compile", "large", "small", "compiled blocks fuse kernels"),
    _factor("training.sharding", "some", "small", "gathers of parameters in every step"),
    _factor("training.seed", "none", "large", "another initialisation and another order of the data"),
    _factor("training.optimizer.*", "none", "large", "another optimisation"),
    _factor("training.data", "none", "large", "other text"),
    _factor("training.microbatch", "some", "small", "size of one forward pass"),
    _factor("training.*", "small", "small", "length of the run and of its warm-up"),
    _factor("microbatch", "some", "small", "size of one forward pass"),
    _factor("attention backend", "some", "small", "another kernel for attention"),
    _factor("parallelism", "some", "small", "another exchange of gradients and parameters"),
    _factor("library torch", "some", "small", "kernels, compiler and their choice"),
    _factor("library triton", "some", "small", "code of the compiled kernels"),
    _factor("stack", "some", "small", "toolkit, framework and compiler together"),
    _factor("library collectives", "some", "none", "algorithms and protocols of the collectives"),
    _factor("library *", "small", "small", "another version"),
    _factor("kernels", "large", "some", "other code, or another code object"),
    _factor("bench.*", "some", "small", "what is timed, and how often"),
    _factor("ceiling *", "some", "none", "clocks, power limits, another memory"),
    _factor("driver", "some", "none", "clocks, power limits and launch overhead"),
    _factor("lock*", "small", "small", "other versions of packages"),
    _factor("installed *", "small", "small", "a package that is not the locked one"),
    _factor("engine", "small", "none", "a container may limit shared memory, devices or cores"),
    _factor("launcher", "small", "none", "placement of ranks"),
    _factor("variable *", "small", "small", "steers the framework, its kernels or the collectives"),
    _factor("data hash", "none", "large", "other tokens"),
    _factor("order hash", "none", "large", "other samples in a step"),
    _factor("data.*", "none", "large", "another source of tokens"),
    _factor("python", "small", "none", "overhead on the host; it also is the text of the built-in corpus"),
    _factor("processors*", "small", "none", "feeds the devices"),
    _factor("commit", "small", "small", "the project's own code"),
    _factor("uncommitted changes", "small", "small", "the project's own code"),
    _factor("*", "none", "none", "not known to matter"),
)


class Difference(Frozen):
    """A circumstance in which two records differ."""

    name: str
    a: str
    b: str
    speed: Grade
    numerics: Grade
    because: str


def circumstances(record: Record, point: PointRecord) -> dict[str, str]:
    """Return by name what may change the numbers of `point`."""
    plan = record.plan
    named = {
        "model": plan.training.model,
        "devices": point.devices,
        "nodes": point.nodes,
        "microbatch": point.microbatch,
        "attention backend": point.attention_backend,
        "parallelism": point.parallelism,
        "data hash": point.data_hash,
        "order hash": point.order_hash,
    }
    groups = {
        "shape.": flat(plan.shape),
        "training.": {name: value for name, value in flat(plan.training).items() if name != "model"},
        "data.": flat(plan.data),
    }
    return _texts(record, named, groups)


def bench_circumstances(record: BenchRecord) -> dict[str, str]:
    """Return by name what may change the times of a benchmark."""
    calls = [one.ours for case in record.points for one in case.measurements]
    kernels = dict.fromkeys(f"{call.implementation} {call.version}" for call in calls)
    named = {"kernels": ", ".join(kernels)}
    groups = {"bench.": flat(record.plan.bench), **_rates(record)}
    return _texts(record, named, groups)


def _rates(record: BenchRecord) -> dict[str, dict[str, str]]:
    # Three digits: the last ones of a measurement differ in every run.
    first = {one.id: f"{one.rate:.3g}/s" for one in record.points[0].ceilings} if record.points else {}
    return {"ceiling ": first}


def _texts(
    record: Record | BenchRecord, named: Mapping[str, object], groups: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return what a kind of record names, with what every record has."""
    plan, machine, environment = record.plan, record.machine, record.environment
    common = {
        "GPU model": record.gpu.name if record.gpu else _device_names(record),
        "processor": None if machine.devices else machine.cpu,
        **named,
        "recipe version": plan.recipe_version,
        "stack": plan.stack,
        "lock": plan.lock_sha256,
        "engine": plan.engine,
        "launcher": plan.launcher,
        "driver": machine.driver,
        "python": environment.python,
        "processors": machine.cpu_count,
        "kernel": machine.kernel,
        "host": machine.host,
        "commit": record.revision.commit,
        "uncommitted changes": record.revision.changes_sha256,
    }
    every = {
        **groups,
        "library ": {name: value for name, value in environment.libraries.items() if name != "python"},
        "installed ": environment.lock_differences,
        "variable ": environment.variables,
    }
    texts = {name: str(value) for name, value in common.items() if value is not None}
    return texts | {prefix + name: value for prefix, group in every.items() for name, value in group.items()}


def flat(model: Frozen) -> dict[str, str]:
    """Return the fields of `model` that are set as text, with dotted names for nested ones."""
    return dict(_leaves(model.model_dump(mode="json", exclude_none=True)))


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def differences(a: dict[str, str], b: dict[str, str]) -> tuple[Difference, ...]:
    """List the names that are not the same in both, largest likely effect first."""
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    ranked = sorted(names, key=lambda name: FACTORS.index(_factor_of(name)))
    return tuple(
        Difference(
            name=name,
            a=a.get(name, ABSENT),
            b=b.get(name, ABSENT),
            **_factor_of(name).model_dump(exclude={"pattern"}),
        )
        for name in ranked
    )


def _factor_of(name: str) -> Factor:
    return next(factor for factor in FACTORS if fnmatchcase(name, factor.pattern))


def _device_names(record: Record | BenchRecord) -> str | None:
    return ", ".join(dict.fromkeys(device.name for device in record.machine.devices)) or None
