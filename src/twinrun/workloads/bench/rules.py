"""What a case must have: every call, timed as often as planned, and as right as is allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from twinrun.protocol.bench import BenchResult, Call, Implementation, largest_error, name_of
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables
from twinrun.workloads.workload import Finding, MeasuredPoint, held


def rules(
    tables: BenchTables, part: BenchPlan, point: MeasuredPoint[BenchPoint, BenchResult]
) -> Iterator[Finding]:
    """Yield where a case is not the planned one, or a result is further from right than is allowed."""
    calls, repeats = point.result.calls, part.bench.repeats
    seed = part.bench.seed
    yield from held("the seed", point.result.seed, point.result.seed if seed is None else seed)
    twice = [name for name, count in Counter(one.name for one in calls).items() if count > 1]
    yield from held("calls of one name", twice, [])
    if not calls:
        yield Finding(what="calls", found="none", allowed="those of the case")
    for call in calls:
        yield from held(f"the name of {call.name}", name_of(part.labels, call.labels), call.name)
        for one in (call.ours, *call.baselines):
            yield from held(f"timed calls of {call.name} by {one.name}", len(one.milliseconds), repeats)
        yield from _right(call, call.ours, tables.allowed_error(call.labels))
        # Errors of a baseline concern only the claims that are held against it.
        for one in call.baselines:
            yield from _right(call, one, tables.allowed_error(call.labels), baseline=True)


def _right(
    call: Call, one: Implementation, allowed: float | None, *, baseline: bool = False
) -> Iterator[Finding]:
    """Yield an error that is larger than the recipe allows, or that it does not say how large it may be."""
    tensor, error = largest_error(one.errors)
    number = f"{call.name}@{one.name}" if baseline else ""
    what = f"the error of {tensor} of {call.name} by {one.name}"
    if allowed is None:
        said = "within `allowed_errors` of recipe.toml, which says nothing of it"
        yield Finding(kind="correctness", number=number, what=what, found=error, allowed=said)
    elif not error <= allowed:
        yield Finding(kind="correctness", number=number, what=what, found=error, allowed=f"up to {allowed:g}")
