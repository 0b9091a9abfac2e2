"""Series over stacks: repeats say what noise is, and only more than that is a change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.records import ROOT, again, training_record
from twinrun.foundation.errors import InputError
from twinrun.history.pages import write_history_page
from twinrun.history.series import changed_places, noise_of, read_history, series_of
from twinrun.planning.project import Project
from twinrun.results.judged import Judged

RECIPE, METRIC = "mpt-throughput", "tokens-per-second"


@pytest.fixture(scope="module")
def record() -> Judged:
    return training_record({"devices=1": 400.0}, gpu="h200", scale="node", settings=("model=mpt-1b",))


def runs(record: Judged, stacks: Sequence[Sequence[float]]) -> list[Judged]:
    """Return the record again and again: a run for each factor of each stack."""
    found = []
    for place, factors in enumerate(stacks):
        plan = record.plan.model_copy(update={"lock_sha256": f"{place:064}"})
        for factor in factors:
            (first,) = record.record.points
            steps = tuple(
                one.model_copy(update={"seconds": one.seconds / factor}) for one in first.result.steps
            )
            libraries = {**first.result.libraries, "torch": f"2.{place}"}
            result = first.result.model_copy(update={"steps": steps, "libraries": libraries})
            points = (first.model_copy(update={"result": result}),)
            found.append(again(record, plan=plan, points=points))
    return found


def test_a_change_is_more_than_the_noise_and_names_what_differs(record: Judged) -> None:
    stacks = [(1.0, 1.002, 0.998), (1.001, 0.999), (0.95, 0.952)]
    (found,) = series_of(Project(ROOT), runs(record, stacks), metric=METRIC)
    assert found.noise == pytest.approx(0.0018, abs=0.0005)
    assert [change.place for change in found.changes] == [2]
    assert found.changes[0].effect == pytest.approx(-0.049, abs=0.001)
    assert "library torch 2.1 -> 2.2" in found.changes[0].differs


def drawn(seed: int, means: Sequence[float], *, repeats: int) -> tuple[list[list[float]], float | None]:
    """Return runs of stacks that differ by 0.5 % among each other, and their noise of 0.3 % a run."""
    chance = random.Random(seed)
    levels = [mean * (1 + chance.gauss(0, 0.005)) for mean in means]
    groups = [[level * (1 + chance.gauss(0, 0.003)) for _ in range(repeats)] for level in levels]
    return groups, noise_of(groups)


@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize(
    ("means", "places"),
    [
        pytest.param([1.0] * 29 + [0.9], [29], id="the newest of thirty is 10 % slower"),
        pytest.param([1.0] * 15 + [0.95] * 4 + [1.0] * 11, [15, 19], id="four stacks are 5 % slower"),
        pytest.param([1.0] * 12, [], id="nothing changed"),
    ],
)
def test_a_change_is_found_at_any_length_and_nothing_else_is(
    means: Sequence[float], places: list[int], repeats: int
) -> None:
    # The place of a change is told to within one stack, and chance may mark a stack in one of 24 series.
    right = 0
    for seed in range(24):
        found = [place for place, _ in changed_places(*drawn(seed, means, repeats=repeats))]
        right += len(found) == len(places) and all(
            abs(one - other) <= 1 for one, other in zip(found, places, strict=True)
        )
    assert right >= 22


def test_records_make_a_page(record: Judged, tmp_path: Path) -> None:
    project = Project(ROOT)
    assert read_history(project, "cluster-acceptance", runs=ROOT / "no-runs")
    found = series_of(project, runs(record, [(1.0,), (0.5,)]), metric=METRIC)
    # Without repeats nothing is marked.
    assert [(one.noise, one.changes) for one in found] == [(None, ())]
    page = write_history_page(tmp_path / "page.html", RECIPE, found)
    assert page.read_text(encoding="utf-8").count("<svg") == sum(len(one.points) > 1 for one in found)
    with pytest.raises(InputError, match="no record has such a figure"):
        series_of(project, [], metric="step-time")
