"""Variables that hide devices from a process, read as the vendors' runtimes read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from twinrun.manifest import Frozen


class Hiding(Frozen):
    """What one variable did."""

    variable: str
    value: str
    left: int
    of: int

    def __str__(self) -> str:
        return f"{self.variable}={self.value} leaves {self.left} of {self.of}"


def visible(
    identifiers: Sequence[str | None], groups: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> tuple[tuple[int, ...], tuple[Hiding, ...]]:
    """Return the places of the devices that `environment` leaves, and what each variable did.

    Args:
        identifiers: of the devices, in their order.
        groups: variables applied one group after the other, each to what the one before left;
            of a group only the first variable that is set counts.
    """
    places = tuple(range(len(identifiers)))
    hidings = []
    for group in groups:
        variable = next((name for name in group if name in environment), None)
        if variable is not None:
            value, count = environment[variable], len(places)
            kept = _chosen([identifiers[place] for place in places], value)
            places = tuple(places[position] for position in kept)
            hidings.append(Hiding(variable=variable, value=value, left=len(places), of=count))
    return places, tuple(hidings)


def _chosen(identifiers: Sequence[str | None], value: str) -> tuple[int, ...]:
    """Return the places `value` names; the first entry that names nothing ends the list."""
    kept: list[int] = []
    for entry in value.split(","):
        place = _place(identifiers, entry.strip())
        if place is None or place in kept:
            break
        kept.append(place)
    return tuple(kept)


def _place(identifiers: Sequence[str | None], entry: str) -> int | None:
    if re.fullmatch("[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(identifiers) else None
    if not _bare(entry):
        return None
    starting = [place for place, one in enumerate(identifiers) if one and _bare(one).startswith(_bare(entry))]
    return starting[0] if len(starting) == 1 else None


def _bare(identifier: str) -> str:
    """Return the digits of an identifier, which tools and runtimes prefix differently."""
    return identifier.lower().removeprefix("gpu-").removeprefix("0x")
