"""No leaf of a record is altered unseen: it is refused, a gap, fault or excess, or declared neutral."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.leaves import (
    HOLDS,
    NEUTRAL,
    alterations,
    committed_file,
    declared,
    finals,
    neutral_rows,
    unseen,
)
from tests.records import PROJECT
from twinrun.foundation.errors import InputError
from twinrun.results.reading import read_content

# Whole records of today's code, of each workload that has one: recipe, file, and every how many leaves a day.
COMMITTED = {
    "sweep": ("mpt7b-scaling", "h100-80gbx2_cuda13.0-torch2.11_2026-11-26", 31),
    "power": ("mamba-throughput", "h100-80gbx1_cuda13.0-torch2.11_2026-11-27", 23),
    "kernels": ("mamba-kernels", "h100-80gbx1_cuda13.0-torch2.11_2026-11-27", 41),
    "checks": ("cluster-acceptance", "cpux3_cpu_2026-11-26", 29),
}


def survivors(content: Any, *, start: int, every: int) -> list[str]:
    """Return the alterations that nothing sees and no row declares."""
    honest = read_content(copy.deepcopy(content), PROJECT, place="honest")
    found = []
    for one in list(alterations(content))[start::every]:
        if declared(one.path, one.kind) is None and (held := unseen(content, one, honest)):
            found.append(f"{one.path} {one.kind}, {one.what[:60]}: {held}")
    return found


@pytest.mark.parametrize("name", COMMITTED)
def test_a_sample_of_leaves_is_seen(name: str) -> None:
    recipe, file, every = COMMITTED[name]
    assert not survivors(committed_file(recipe, file), start=7, every=every)


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMITTED)
def test_every_leaf_is_seen(name: str) -> None:
    recipe, file, _ = COMMITTED[name]
    assert not survivors(committed_file(recipe, file), start=0, every=1)


@pytest.mark.parametrize("name", COMMITTED)
def test_a_field_that_nobody_declared_is_refused(name: str) -> None:
    recipe, file, _ = COMMITTED[name]
    content = committed_file(recipe, file)
    content["points"][0]["facts"]["a new fact"] = "text"
    record = finals_of(content)
    assert not set(record.values()) & set(HOLDS)


def finals_of(content: Any) -> dict[str, str]:
    from tests.leaves import sealed  # noqa: PLC0415

    try:
        return finals(read_content(sealed(content), PROJECT, place="changed"))
    except InputError:
        return {}


def test_every_row_has_a_reason_and_no_row_is_there_twice() -> None:
    rows = neutral_rows()
    assert all(row.reason and row.kinds for row in rows), NEUTRAL
    assert len({row.leaf for row in rows}) == len(rows)
