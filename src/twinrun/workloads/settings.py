"""Settings as flat names and texts, and what a change of one does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinrun.foundation.manifest import Frozen
from twinrun.workloads.workload import Factor, Grade


def factor(pattern: str, speed: Grade, numerics: Grade, because: str) -> Factor:
    """Return a factor; positional, because factors stand in tables."""
    return Factor(pattern=pattern, speed=speed, numerics=numerics, because=because)


def flat(model: Frozen) -> dict[str, str]:
    """Return the fields of `model` that are set as text, with dotted names for nested ones."""
    return dict(_leaves(model.model_dump(mode="json", exclude_none=True)))


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
