"""What differs between two measured points, and what each difference is likely to do."""

from __future__ import annotations

from fnmatch import fnmatchcase

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plain
from twinrun.manifests.metrics import Metric
from twinrun.results.judged import Judged, gpus_of
from twinrun.workloads.settings import Factor, Fingerprint, Grade, factor
from twinrun.workloads.workload import MeasuredPoint

ABSENT = "absent"
# In the order of likely effect on speed; those of the workload stand between.
HARDWARE = (
    factor("GPU model", "large", "small", "peak arithmetic and memory bandwidth; sums in another order"),
    factor("processor", "large", "small", "without a GPU the processor does the arithmetic"),
    factor("devices", "large", "small", "less work for each device, more communication"),
    factor("nodes", "large", "small", "communication leaves the node"),
    factor("recipe version", "some", "large", "a version is raised by every change that may move a number"),
)
SOFTWARE = (
    factor("library torch", "some", "small", "kernels, compiler and their choice"),
    factor("library triton", "some", "small", "code of the compiled kernels"),
    factor("stack", "some", "small", "toolkit, framework and compiler together"),
    factor("image", "some", "small", "other packages, or other kernels, than the lock says"),
    factor("library collectives", "some", "none", "algorithms and protocols of the collectives"),
    factor("library *", "small", "small", "another version"),
    factor("driver", "some", "none", "clocks, power limits and launch overhead"),
    factor("lock*", "small", "small", "other versions of packages"),
    factor("installed *", "small", "small", "a package that is not the locked one"),
    factor("engine", "small", "none", "a container may limit shared memory, devices or cores"),
    factor("launcher", "small", "none", "placement of ranks"),
    factor("scheduler", "small", "none", "who else uses the nodes"),
    factor("variable *", "small", "small", "steers the framework, its kernels or the collectives"),
    factor("python", "small", "none", "overhead on the host; it also is the text of the built-in corpus"),
    factor("processors*", "small", "none", "feeds the devices"),
    factor("commit", "small", "small", "the project's own code"),
    factor("uncommitted changes", "small", "small", "the project's own code"),
    factor("*", "none", "none", "not known to matter"),
)


class SettingChange(Frozen):
    """Something in which two records differ."""

    name: str
    a: str
    b: str
    speed: Grade
    numerics: Grade
    because: str


def conditions(record: Judged, point: MeasuredPoint) -> dict[str, str]:
    """Return by name what may change the numbers of `point`."""
    plan, node, environment = record.plan, record.node, record.environment
    common = {
        "GPU model": gpus_of(record) if record.devices else None,
        "processor": None if record.devices else node.cpu,
        "devices": point.devices,
        "nodes": point.nodes,
        "recipe version": plan.recipe_version,
        "stack": plan.stack,
        "image": environment.image_digest,
        "lock": plan.lock_sha256,
        "engine": plan.engine,
        "launcher": plan.launcher,
        "scheduler": plan.scheduler,
        "driver": node.driver,
        "python": record.record.libraries.get("python"),
        "processors": node.cores,
        "kernel": node.kernel,
        "host": record.record.allocation.nodes[0],
        "commit": record.record.revision.commit,
        "uncommitted changes": record.record.revision.changes_sha256,
    }
    groups = {
        "library ": {name: value for name, value in record.record.libraries.items() if name != "python"},
        "installed ": environment.lock_differences,
        "changed file ": environment.changed_files,
        "variable ": environment.variables,
    }
    found = {name: str(value) for name, value in common.items() if value is not None}
    found |= record.terms(point).settings
    return found | {prefix + name: value for prefix, group in groups.items() for name, value in group.items()}


def changed(a: dict[str, str], b: dict[str, str], factors: tuple[Factor, ...]) -> tuple[SettingChange, ...]:
    """List the names that are not the same in both, largest likely effect first.

    Args:
        factors: those of the workload.
    """
    every = (*HARDWARE, *factors, *SOFTWARE)

    def rank(name: str) -> int:
        return next(place for place, one in enumerate(every) if fnmatchcase(name, one.pattern))

    names = sorted((name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)), key=rank)
    return tuple(
        SettingChange(
            name=name,
            a=a.get(name, ABSENT),
            b=b.get(name, ABSENT),
            **every[rank(name)].model_dump(exclude={"pattern"}),
        )
        for name in names
    )


def marks_of(record: Judged, point: MeasuredPoint) -> Fingerprint:
    """Return the fingerprint of a point: its own where each point is a case, else that of the run."""
    described = record.description
    case = described.points[point.id].case
    return dict(described.fingerprint or {} if case is None else case)


def fields_apart(metric: Metric, a: Fingerprint, b: Fingerprint) -> tuple[str, ...]:
    """Return the fields that a metric depends on and in which two fingerprints differ, with both sides."""
    fields = [field for field in dict.fromkeys((*a, *b)) if metric.decides(field)]
    sides = ((field, a.get(field, ABSENT), b.get(field, ABSENT)) for field in fields)
    return tuple(f"{field} {plain(one)} and {plain(other)}" for field, one, other in sides if one != other)
