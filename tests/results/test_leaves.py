"""No leaf of a record is altered unseen: it is refused, a gap, fault or excess, or declared neutral."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.leaves import NEUTRAL, alterations, committed_file, declared, neutral_rows, sealed, unseen
from tests.played import PLAYED
from tests.records import PROJECT, plan
from twinrun.results.account import gaps, objections
from twinrun.results.reading import read_content
from twinrun.workloads import load_workload

RECORDS: dict[str, Callable[[], Any]] = {
    "sweep": lambda: committed_file("mpt7b-scaling", "h100-80gbx2_cuda13.0-torch2.11_2026-11-26"),
    "power": lambda: committed_file("mamba-throughput", "h100-80gbx1_cuda13.0-torch2.11_2026-11-27"),
    "kernels": lambda: committed_file("mamba-kernels", "h100-80gbx1_cuda13.0-torch2.11_2026-11-27"),
    "checks": lambda: committed_file("cluster-acceptance", "cpux3_cpu_2026-11-26"),
    **PLAYED,
}
# Alterations of each record that a day tries.
DAILY = 80


def survivors(content: Any, *, start: int, every: int) -> list[str]:
    """Return the alterations that nothing sees and no row declares."""
    honest = read_content(copy.deepcopy(content), PROJECT, place="honest")
    found = []
    for one in list(alterations(content))[start::every]:
        if declared(one.path, one.kind) is None and (held := unseen(content, one, honest)):
            found.append(f"{one.path} {one.kind}, {one.what[:60]}: {held}")
    return found


@pytest.mark.parametrize("name", RECORDS)
def test_a_sample_of_leaves_is_seen(name: str) -> None:
    content = RECORDS[name]()
    every = max(1, len(list(alterations(content))) // DAILY)
    assert not survivors(content, start=every // 2, every=every)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RECORDS)
def test_every_leaf_is_seen(name: str) -> None:
    assert not survivors(RECORDS[name](), start=0, every=1)


@pytest.mark.parametrize("name", RECORDS)
def test_a_whole_record_has_no_gap_and_one_with_a_new_fact_has(name: str) -> None:
    content = RECORDS[name]()
    assert not objections(read_content(copy.deepcopy(content), PROJECT, place="whole"), PROJECT)
    content["points"][0]["facts"]["a new fact"] = "text"
    (gap,) = gaps(read_content(sealed(content), PROJECT, place="changed"), PROJECT)
    assert gap.path.endswith(".facts.a new fact")


@pytest.mark.parametrize("recipe", PROJECT.recipe_names)
def test_what_is_planned_is_of_its_recipe(recipe: str) -> None:
    for scale, gpu in (("smoke", None), ("node", "h100-80gb"), ("node", "mi250"), ("paper", "mi355x")):
        made = plan(recipe, scale=scale, gpu=gpu)
        account = load_workload(made.workload).account
        assert not list(account.of_recipe(PROJECT.recipe(recipe).tables, made.part, made.points))


def test_every_row_has_a_reason_and_no_row_is_there_twice() -> None:
    rows = neutral_rows()
    assert all(row.reason and row.kinds for row in rows), NEUTRAL
    assert len({row.leaf for row in rows}) == len(rows)
