"""What the file of a record may hold at all: text, and numbers that can be computed with."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.manifests.metrics import Metric
from twinrun.protocol.measurements import Measurement, Series
from twinrun.results.record import Record

# No quantity of a run comes near; products and quotients of a few such numbers are still finite.
LARGEST, SMALLEST = 1e30, 1e-30


def check_content(content: Any, place: str) -> None:
    """Refuse, with its key, text that is none and a number too large or too small to compute with."""
    for key, value in _leaves(content, ""):
        where = f"{place}:{key}"
        if isinstance(value, str) and not value.isprintable() and _has_surrogate(value):
            raise InputError("half a character is no text", place=_printable(where), found=ascii(value))
        # A number that is not finite is the models' to refuse.
        if isinstance(value, (int, float)) and LARGEST < abs(value) < float("inf"):
            raise InputError("too large a number", place=where, found=value, allowed=f"up to {LARGEST:g}")
        if isinstance(value, float) and 0 < abs(value) < SMALLEST:
            raise InputError("too small a number", place=where, found=value, allowed=f"0, or {SMALLEST:g} on")


def check_times_and_names(record: Record, place: str) -> None:
    """Refuse a date that is none, and two points of one name."""
    try:
        datetime.datetime.fromisoformat(record.created)
    except ValueError:
        raise InputError(
            "not a time", place=f"{place}:created", found=record.created, allowed="ISO 8601"
        ) from None
    if twice := [name for name, count in Counter(point.id for point in record.points).items() if count > 1]:
        raise InputError("two points of one name", place=f"{place}:points.{twice[0]}", found=twice[0])


def check_extent(number: Measurement | Series, metric: Metric, where: str) -> None:
    """Refuse a series without a value, and a measured time or rate of nothing or less."""
    if isinstance(number, Series):
        if not number.values:
            raise InputError("a series without a value", place=f"{where}.series.{number.id}", found="[]")
    elif metric.repeated and number.low <= 0:
        key = f"{where}.measurements.{number.id}.low"
        raise InputError(f"no {metric.title}", place=key, found=number.low, allowed="more than 0")


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each text and number with its key, keys themselves included."""
    if isinstance(value, dict):
        for name, one in value.items():
            inner = f"{key}.{name}" if key else str(name)
            yield inner, name
            yield from _leaves(one, inner)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{key}.{number}")
    elif not isinstance(value, bool):
        yield key, value


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
