"""The best record of each hardware and subject, and what tells the others from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from twinrun.manifests.metrics import Metric
from twinrun.results.record import Record, hardware


class RecordRank(NamedTuple):
    """The records of one hardware and subject."""

    best: Record
    others: tuple[Record, ...]
    """Newest first."""


def ranked(records: Sequence[Record], metrics: Mapping[str, Metric]) -> list[RecordRank]:
    """Return the records of each hardware and subject: most devices first, then most claims judged."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        key = (hardware(record), record.workload.subject(record.plan.part))
        groups.setdefault(key, []).append(record)
    found = [_ranked(group, metrics) for group in groups.values()]
    return sorted(found, key=lambda one: (-_devices(one.best), -_judged(one.best), hardware(one.best)))


def best_of(records: Sequence[Record], metrics: Mapping[str, Metric]) -> list[Record]:
    """Return the best record of each hardware and subject, of the newest version of its recipe."""
    return [one.best for one in ranked(records, metrics)]


def software(record: Record) -> str:
    """Return what ran, which a stack's name does not say where its lock was not installed."""
    torch = record.environment.libraries.get("torch")
    kept = "as locked" if not record.environment.lock_differences else "not the lock's"
    return f"PyTorch {torch} ({kept})" if torch else "no PyTorch"


def label(record: Record) -> str:
    """Return what tells a record from others of its hardware and subject."""
    return f"{record.created[:16].replace('T', ' ')}, run {record.run}"


def _ranked(group: Sequence[Record], metrics: Mapping[str, Metric]) -> RecordRank:
    newest = sorted(group, key=lambda one: one.created, reverse=True)
    # An older version measured something else, however good its number.
    best = max(newest, key=lambda one: (one.plan.recipe_version, _merit(one, metrics)))
    return RecordRank(best, tuple(one for one in newest if one is not best))


def _merit(record: Record, metrics: Mapping[str, Metric]) -> float:
    """Return the geometric mean of the number that stands for a record, negative where lower is better."""
    largest = [point for point in record.points if point.devices == _devices(record)]
    for name in record.workload.headline:
        found = [one.median for point in largest for one in point.measurements if one.metric == name]
        if found and min(found) > 0:
            mean = statistics.geometric_mean(found)
            return mean if metrics[name].better == "higher" else -mean
    return float("-inf")


def _devices(record: Record) -> int:
    return max((point.devices for point in record.points), default=0)


def _judged(record: Record) -> int:
    return sum(verdict.final not in ("not-comparable", "config-mismatch") for verdict in record.verdicts)
