"""What a complete record has: what each workload says must be there, and where a record lacks it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from twinrun.protocol.measurements import Fact, Numbers
from twinrun.workloads.workload import Gap

# A fact is one of some values, text of a form, or a number from 0 on of a type.
Allowed = tuple[Fact, ...] | re.Pattern[str] | type[int] | type[float]

# More than any count of a run: tokens, bytes, operations of a call.
LARGEST_COUNT = 1e18
# Of something: e3b0c442... is the digest of nothing.
HASH = re.compile("(?!e3b0c44298fc1c14)[0-9a-f]{64}")
TEXT = re.compile(r"\S.*", re.DOTALL)
NOT_COLLECTED = "it was not collected, or was taken out; run the recipe again"


def held(path: str, found: object, allowed: object, hint: str = "") -> Iterator[Gap]:
    """Yield a gap where something is not what follows from the plan."""
    if found != allowed:
        yield Gap(path=path, found=shown(found), allowed=shown(allowed), hint=hint)


def shown(value: object) -> str:
    """Return a value in a message."""
    if value is None:
        return "absent"
    if isinstance(value, str):
        return value or "empty"
    if isinstance(value, (set, frozenset, tuple, list)):
        return ", ".join(map(shown, value)) or "none"
    return str(value)


def facts_held(
    numbers: Numbers, required: Mapping[str, Allowed], *, optional: Mapping[str, Allowed] | None = None
) -> Iterator[Gap]:
    """Yield facts that are absent, not as allowed, or that no run writes."""
    optional = optional or {}
    for name, allowed in required.items():
        if name not in numbers.facts:
            yield Gap(path=f"facts.{name}", found="absent", allowed=_words(allowed), hint=NOT_COLLECTED)
    for name, value in numbers.facts.items():
        rule = required.get(name, optional.get(name))
        if rule is None:
            yield Gap(path=f"facts.{name}", found=shown(value), allowed="absent: no run writes such a fact")
        elif not _is(value, rule):
            yield Gap(path=f"facts.{name}", found=shown(value), allowed=_words(rule))


def _is(value: Fact, allowed: Allowed) -> bool:
    if isinstance(allowed, re.Pattern):
        return isinstance(value, str) and bool(allowed.fullmatch(value))
    # True is 1 in Python, and no number of a record.
    if isinstance(allowed, type):
        kinds = (int,) if allowed is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT
    return any(value == one and type(value) is type(one) for one in allowed)


def _words(allowed: Allowed) -> str:
    if isinstance(allowed, re.Pattern):
        return f"text of the form {allowed.pattern}"
    if isinstance(allowed, type):
        return "a whole number from 0 on" if allowed is int else "a number from 0 on"
    return " or ".join(shown(one) for one in allowed)


def measurements_held(numbers: Numbers, required: Mapping[str, int]) -> Iterator[Gap]:
    """Yield measurements that are absent, or that have another number of samples."""
    for name, count in required.items():
        found = numbers.measurement(name)
        if found is None:
            yield Gap(path=f"measurements.{name}", found="absent", allowed="measured", hint=NOT_COLLECTED)
        else:
            yield from held(f"measurements.{name}.count", found.count, count)


def series_held(numbers: Numbers, required: Mapping[str, int]) -> Iterator[Gap]:
    """Yield series that are absent, too many, in another order, or of another length."""
    found = [one.id for one in numbers.series]
    for name in (one for one in required if one not in found):
        yield Gap(path=f"series.{name}", found="absent", allowed="a value a step", hint=NOT_COLLECTED)
    for name in (one for one in found if one not in required):
        yield Gap(path=f"series.{name}", found="there", allowed="none of this name in the plan")
    if sorted(found) == sorted(required):
        yield from held("series", tuple(found), tuple(required))
    for one in numbers.series:
        if (length := required.get(one.id)) is not None and len(one.values) != length:
            yield Gap(
                path=f"series.{one.id}.values", found=f"{len(one.values)} steps", allowed=f"{length} steps"
            )


def at_point(point: str, found: Iterable[Gap]) -> Iterator[Gap]:
    """Yield gaps of a point with the whole path."""
    for one in found:
        yield Gap(
            point=point,
            path=f"points.{point}.{one.path}",
            found=one.found,
            allowed=one.allowed,
            hint=one.hint,
        )
