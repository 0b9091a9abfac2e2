"""What a case must have: every call that it asks for, timed as often as planned, with its error.

A call's numbers are named after it, as `numbers.py` says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from twinrun.protocol.bench import name_of
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.account import NOT_COLLECTED, TEXT, Allowed, facts_held, held, series_held, shown
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables
from twinrun.workloads.bench.numbers import work_of
from twinrun.workloads.bench.work import amounts_of, same
from twinrun.workloads.workload import Account, Gap, Point, PointRecord

_CALL = "[^/@]+"
MEASURED = {
    "time": re.compile(rf"{_CALL}(@.+)?"),
    "error": re.compile(rf"{_CALL}/error(@.+)?"),
    "kept-memory": re.compile(rf"{_CALL}/kept-memory(@.+)?"),
    "memory-saving": re.compile(rf"{_CALL}/memory-saving@.+"),
    "link-traffic": re.compile(rf"{_CALL}/link-traffic"),
    "peak-memory": re.compile("peak-memory"),
    "peak-rate": re.compile("peak-rate@.+"),
}
# Formulas of what the busiest link carries, by the algorithm of a collective.
LINK_FORMULAS = {"ring": "link-bytes/ring", "naive": "link-bytes/root"}
# Digits of an error in words.
WRITTEN = 0.006
ROUNDED = 1e-9


def as_planned(part: BenchPlan, planned: Point[BenchPoint], point: PointRecord[BenchPoint]) -> Iterator[Gap]:
    """Yield where a case is not the planned one."""
    yield from held("id", point.id.partition("@")[0], planned.part.case, "a point is named after its case")
    yield from held("attempts", point.attempts, ())
    yield from series_held(point, {})
    calls = calls_of(point)
    yield from _asked(part, planned, calls)
    if point.measurement("peak-memory") is None:
        yield Gap(path="measurements.peak-memory", found="absent", allowed="measured", hint=NOT_COLLECTED)
    facts: dict[str, Allowed] = {"seed": _seed(part), "device name": TEXT}
    for one in point.measurements:
        if "call" not in one.labels and one.metric not in ("peak-rate", "peak-memory"):
            yield Gap(path=f"measurements.{one.id}.labels.call", found="absent", allowed="the call's name")
        if one.metric == "peak-memory":
            yield from held(f"measurements.{one.id}.labels", one.labels, {})
        if one.metric in ("peak-rate", "peak-memory", "kept-memory"):
            yield from held(f"measurements.{one.id}.count", one.count, 1)
        if one.metric == "peak-rate":
            resource = one.id.partition("@")[2]
            facts[f"peak rate of {resource}"] = TEXT
            yield from held(f"measurements.{one.id}.labels.resource", one.labels, {"resource": resource})
    for name, labels in calls.items():
        yield from _call(part, point, name, labels)
        facts |= _facts_of(point, name)
    yield from facts_held(point, facts, optional=_optional(point, calls))


def _seed(part: BenchPlan) -> Allowed:
    return int if part.bench.seed is None else (part.bench.seed,)


def calls_of(point: PointRecord) -> dict[str, dict[str, str]]:
    """Return the labels of our implementation of each call, by the call's name."""
    names = [name.removesuffix(" title") for name in point.facts if name.endswith(" title")]
    named = {one.labels.get("call", ""): one for one in reversed(point.measurements) if "call" in one.labels}
    return {name: _labels(named[name]) if name in named else {} for name in dict.fromkeys([*names, *named])}


def _labels(one: Measurement) -> dict[str, str]:
    return {name: value for name, value in one.labels.items() if name not in ("call", "implementation")}


def _asked(
    part: BenchPlan, planned: Point[BenchPoint], calls: Mapping[str, Mapping[str, str]]
) -> Iterator[Gap]:
    """Yield values of labels that the case asks for and no call has, and those that it did not ask for."""
    lists = {
        label.name: [str(value) for value in values]
        for label in part.labels
        if isinstance(values := planned.part.settings.get(f"{label.name}s"), tuple)
    }
    firm = [name for name in lists if name not in ("mode", "compression", "phase", "algorithm")]
    for wanted in product(*(lists[name] for name in firm)):
        asked = dict(zip(firm, wanted, strict=True))
        if not any(asked.items() <= labels.items() for labels in calls.values()):
            yield Gap(path="measurements", found="no call", allowed=f"one of {' '.join(wanted)}")
    for name, listed in lists.items():
        for value in listed:
            if not any(labels.get(name) == value for labels in calls.values()) and name in firm:
                yield Gap(path="measurements", found="no call", allowed=f"one of {name} {value}")
    defaults = {label.name: label.default for label in part.labels}
    for call, labels in calls.items():
        for name, value in labels.items():
            if name in lists and value not in (*lists[name], defaults.get(name)):
                yield Gap(
                    path=f"measurements.{call}.labels.{name}", found=value, allowed=" or ".join(lists[name])
                )


def _call(part: BenchPlan, point: PointRecord, name: str, labels: Mapping[str, str]) -> Iterator[Gap]:
    """Yield what one call lacks."""
    if labels:
        yield from held(f"measurements.{name}.labels", name, name_of(part.labels, labels))
    names = _implementations(point, name)
    ours = point.measurement(f"{name}/error")
    own = ours.labels.get("implementation") if ours else None
    if own is None:
        yield Gap(path=f"measurements.{name}/error", found="absent", allowed="measured", hint=NOT_COLLECTED)
    for implementation in names:
        suffix = "" if implementation == own else f"@{implementation}"
        yield from _timed(part, point, f"{name}{suffix}")
        yield from _error(point, name, implementation, suffix)
    for one in point.measurements:
        if one.labels.get("call") != name:
            continue
        called, _, suffix = one.id.partition("@")
        yield from held(f"measurements.{one.id}.id", called.partition("/")[0], name)
        # A ratio is named after the baseline, and is a number of ours.
        who = own if one.metric in ("speedup", "memory-saving") else suffix or own
        yield from held(f"measurements.{one.id}.labels", one.labels.get("implementation"), who)
        rest = {key: value for key, value in _labels(one).items() if key not in ("baseline", "resource")}
        yield from held(f"measurements.{one.id}.labels", rest, dict(labels))
    yield from _saved(point, name, own)
    yield from _worked(point, name, labels)
    yield from _carried(point, name, labels)


def _implementations(point: PointRecord, call: str) -> list[str]:
    """Return who computed a call, as its facts say."""
    prefix = f"{call} errors of "
    said = [name.removeprefix(prefix) for name in point.facts if name.startswith(prefix)]
    labelled = [one.labels for one in point.measurements if one.labels.get("call") == call]
    return list(
        dict.fromkeys([*said, *(one["implementation"] for one in labelled if "implementation" in one)])
    )


def _timed(part: BenchPlan, point: PointRecord, name: str) -> Iterator[Gap]:
    found, repeats = point.measurement(name), part.bench.repeats
    if found is None and repeats:
        yield Gap(path=f"measurements.{name}", found="absent", allowed=f"{repeats} samples")
    elif found is not None:
        yield from held(f"measurements.{name}.count", found.count, repeats)


def _error(point: PointRecord, name: str, implementation: str, suffix: str) -> Iterator[Gap]:
    """Hold the error of an implementation against those of its tensors, which the facts have in words."""
    text = str(point.facts.get(f"{name} errors of {implementation}", ""))
    found, words = point.measurement(f"{name}/error{suffix}"), _largest(text)
    path = f"measurements.{name}/error{suffix}"
    if words is None:
        yield Gap(path=f"facts.{name} errors of {implementation}", found=text, allowed="tensors and errors")
    elif found is None and math.isfinite(words):
        yield Gap(path=path, found="absent", allowed=f"{words:g}, as its tensors say", hint=NOT_COLLECTED)
    elif found is not None:
        yield from held(f"{path}.count", found.count, 1)
        if not math.isclose(found.median, words, rel_tol=WRITTEN):
            yield Gap(path=path, found=f"{found.median:g}", allowed=f"{words:g}, as its tensors say")


def _largest(text: str) -> float | None:
    """Return the largest of errors in words; None where they are none."""
    if not text:
        return None
    values = [one.rpartition(" ")[2] for one in text.split(", ")]
    try:
        return max(math.inf if one == "finite" else float(one) for one in values)
    except ValueError:
        return None


def _saved(point: PointRecord, name: str, own: str | None) -> Iterator[Gap]:
    """Hold savings of memory against the memory that was kept."""
    mine = point.measurement(f"{name}/kept-memory")
    for one in point.measurements:
        if one.metric != "memory-saving" or one.labels.get("call") != name:
            continue
        path, baseline = f"measurements.{one.id}", one.id.partition("@")[2]
        theirs = point.measurement(f"{name}/kept-memory@{baseline}")
        yield from held(f"{path}.labels", one.labels.get("baseline"), baseline)
        yield from held(f"{path}.labels", one.labels.get("implementation"), own)
        if mine is None or theirs is None or not mine.median:
            yield Gap(path=path, found="there", allowed="absent: no memory was counted that it follows from")
        else:
            yield from _close(path, one, theirs.median / mine.median)
    for baseline in _kept_of(point, name) if mine and mine.median else ():
        if point.measurement(f"{name}/memory-saving@{baseline}") is None:
            yield Gap(path=f"measurements.{name}/memory-saving@{baseline}", found="absent", allowed="there")


def _kept_of(point: PointRecord, name: str) -> list[str]:
    """Return the baselines whose kept memory was counted."""
    prefix = f"{name}/kept-memory@"
    return [one.id.removeprefix(prefix) for one in point.measurements if one.id.startswith(prefix)]


def _worked(point: PointRecord, name: str, labels: Mapping[str, str]) -> Iterator[Gap]:
    """Hold the work of a call against that of its case."""
    formula, found = point.facts.get(f"{name} work formula"), work_of(point, name)
    if formula is None:
        for resource in found:
            yield Gap(path=f"facts.{name} work {resource}", found="there", allowed="with its formula")
        return
    amounts = amounts_of(str(formula), point.part.settings, labels)
    if amounts is None:
        yield Gap(path=f"facts.{name} work formula", found=shown(formula), allowed="a formula of the project")
        return
    yield from held(f"facts.{name} work", sorted(found), sorted(amounts))
    for resource, value in amounts.items():
        if resource in found and not same(found[resource], value):
            path = f"facts.{name} work {resource}"
            yield Gap(path=path, found=f"{found[resource]:g}", allowed=f"{value:g} by {formula}")


def _carried(point: PointRecord, name: str, labels: Mapping[str, str]) -> Iterator[Gap]:
    """Hold what links carried against the bytes of the buffer, and the share against both."""
    ranks, size = point.devices, point.part.settings.get("bytes")
    counted, expected = (point.facts.get(f"{name} link bytes{end}") for end in ("", " expected"))
    found = point.measurement(f"{name}/link-traffic")
    if (found is None) != (counted is None):
        yield Gap(
            path=f"measurements.{name}/link-traffic",
            found="absent" if found is None else "there",
            allowed="there where its bytes are",
            hint=NOT_COLLECTED,
        )
    if found and isinstance(counted, (int, float)) and isinstance(expected, (int, float)) and expected:
        yield from _close(f"measurements.{found.id}", found, counted / expected)
    if not isinstance(size, int) or isinstance(size, bool):
        return
    bus = 2 * (ranks - 1) / ranks * size
    formulas = {"link-bytes/ring": bus, "link-bytes/root": float((ranks - 1) * size)}
    formula = point.facts.get(f"{name} link formula")
    if formula is not None and (own := LINK_FORMULAS.get(labels.get("algorithm", ""))):
        yield from held(f"facts.{name} link formula", formula, own)
    for fact, value in (("bus bytes", bus), ("link bytes expected", formulas.get(str(formula)))):
        written = point.facts.get(f"{name} {fact}")
        if fact == "bus bytes" and written is None:
            yield Gap(path=f"facts.{name} {fact}", found="absent", allowed=f"{value:g}", hint=NOT_COLLECTED)
        if written is not None and value is not None and not same(written, value):
            yield Gap(path=f"facts.{name} {fact}", found=str(written), allowed=f"{value:g} by its formula")


def _close(path: str, found: Measurement, value: float) -> Iterator[Gap]:
    if found.count != 1 or not math.isclose(found.median, value, rel_tol=ROUNDED):
        yield Gap(path=path, found=f"{found.median:g}", allowed=f"{value:g}, from what it follows from")


def _facts_of(point: PointRecord, name: str) -> dict[str, Allowed]:
    """Return the facts that a call must have."""
    found: dict[str, Allowed] = {f"{name} title": TEXT, f"{name} allowed error": float}
    for implementation in _implementations(point, name):
        found[f"version of {implementation}"] = TEXT
        found[f"{name} errors of {implementation}"] = TEXT
    if point.measurement(f"{name}/link-traffic"):
        found[f"{name} link bytes"] = float
        found[f"{name} link bytes expected"] = float
        found[f"{name} link formula"] = re.compile("link-bytes/(ring|root)")
    return found


def _optional(point: PointRecord, calls: Mapping[str, object]) -> dict[str, Allowed]:
    """Return the facts that a call may have."""
    rules: dict[str, Allowed] = {" work formula": TEXT, " bus bytes": float}
    found = {f"{name}{end}": rule for name in calls for end, rule in rules.items()}
    for fact in point.facts:
        for name in calls:
            if fact.startswith(f"{name} work ") and not fact.endswith(" formula"):
                found[fact] = float
            elif fact.startswith(f"{name} without "):
                found[fact] = TEXT
    return found


def of_recipe(tables: BenchTables, part: BenchPlan, points: Sequence[Point[BenchPoint]]) -> Iterator[Gap]:
    """Yield where labels, options or settings of cases are not those of the recipe and of the plan."""
    yield from _labels_of_recipe(tables, part)
    options = part.bench.options
    if foreign := sorted(options.keys() - tables.bench.options.keys()):
        yield Gap(path="plan.part.bench.options", found=shown(foreign), allowed="options of the recipe")
    for name, value in options.items():
        kind = type(tables.bench.options.get(name, value))
        if type(value) is not kind:
            yield Gap(path=f"plan.part.bench.options.{name}", found=shown(value), allowed=kind.__name__)
    for point in points:
        path, case = f"plan.points.{point.id}.part", tables.cases.get(point.part.case)
        if case is None:
            yield Gap(path=f"{path}.case", found=point.part.case, allowed=shown(sorted(tables.cases)))
            continue
        settings = point.part.settings
        yield from held(f"{path}.settings", sorted(settings), sorted({**options, **case}))
        for name, value in settings.items():
            # Options of --set stand in the plan's options, and holds at every case.
            allowed = [of[name] for of in (case, options) if name in of]
            if allowed and not any(same_value(value, one) for one in allowed):
                yield Gap(path=f"{path}.settings.{name}", found=shown(value), allowed=shown(allowed))


def _labels_of_recipe(tables: BenchTables, part: BenchPlan) -> Iterator[Gap]:
    """Yield labels that are not the recipe's, which gains values and never loses one that was measured."""
    known = {one.name: one for one in tables.label}
    names = [one.name for one in part.labels]
    yield from held("plan.part.labels", names, [name for name in known if name in names])
    for one in part.labels:
        path, recipe = f"plan.part.labels.{one.name}", known.get(one.name)
        if recipe is None:
            continue
        yield from held(f"{path}.default", one.default, recipe.default)
        values = [value for value in recipe.values if value in one.values]
        yield from held(f"{path}.values", list(one.values), values)


def same_value(found: object, other: object) -> bool:
    """Say whether two settings are one; True is 1 in Python, and not the same setting."""
    return found == other and type(found) is type(other)


ACCOUNT = Account(
    of_recipe=of_recipe,
    measured=MEASURED,
    as_planned=as_planned,
    calls=calls_of,
    allowed_error=BenchTables.allowed_error,
)
