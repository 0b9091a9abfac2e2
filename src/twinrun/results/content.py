"""What a record may hold at all: numbers to compute with, dates, points and series that are some."""

from __future__ import annotations

import datetime
from collections import Counter
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import leaves
from twinrun.manifests.metrics import Metric
from twinrun.protocol.measurements import Measurement, Series
from twinrun.results.record import Record

# No quantity of a run comes near; products and quotients of a few such numbers are still finite.
LARGEST, SMALLEST = 1e30, 1e-30


def check_content(content: Any, place: str) -> None:
    """Refuse, with its key, a number that is too large or too small to compute with."""
    for key, value in leaves(content):
        where = f"{place}:{key}"
        # A number that is not finite is the models' to refuse.
        if isinstance(value, (int, float)) and LARGEST < abs(value) < float("inf"):
            raise InputError("too large a number", place=where, found=value, allowed=f"up to {LARGEST:g}")
        if isinstance(value, float) and 0 < abs(value) < SMALLEST:
            raise InputError("too small a number", place=where, found=value, allowed=f"0, or {SMALLEST:g} on")


def check_times_and_names(record: Record, place: str) -> None:
    """Refuse a date that is none, a plan without a point, and two points of one name."""
    try:
        datetime.datetime.fromisoformat(record.created)
    except ValueError:
        raise InputError(
            "not a time", place=f"{place}:created", found=record.created, allowed="ISO 8601"
        ) from None
    if not record.plan.points:
        raise InputError("a plan without a point", place=f"{place}:plan.points", found="[]")
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
