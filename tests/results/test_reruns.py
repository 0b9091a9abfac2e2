"""Honest re-runs of every committed record, simulated with its own spread: none is accused."""

from __future__ import annotations

import random
from collections import Counter
from statistics import NormalDist

import pytest

from tests.records import PROJECT, judge
from twinrun.protocol.measurements import Measurement, sampled
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.verdicts import FAILURES
from twinrun.workloads.workload import PointRecord

RECIPES = sorted(name for name in PROJECT.recipe_names if PROJECT.results(PROJECT.recipe(name)))
# Of all verdicts on re-runs.
FALSE_ALARMS = 0.01


def again(record: Record, draw: random.Random) -> Record:
    """Return a record of the same machine on another day: every sampled number is drawn anew."""
    points = tuple(_drawn(record, point, draw) for point in record.points)
    return record.model_copy(update={"points": points})


def _drawn(record: Record, point: PointRecord, draw: random.Random) -> PointRecord:
    derived = {one.id for one in record.workload.derived(record.plan.part, point, record.gpu)}
    measured = tuple(_sampled(one, draw) for one in point.measurements if one.id not in derived)
    drawn = point.model_copy(update={"measurements": measured})
    follows = record.workload.derived(record.plan.part, drawn, record.gpu)
    return drawn.model_copy(update={"measurements": (*measured, *follows)})


def _sampled(one: Measurement, draw: random.Random) -> Measurement:
    """Return a measurement of as many normal samples as before, their deviation that of the range (Blom)."""
    if one.count < 2 or one.low == one.high:
        return one
    ends = 2 * NormalDist().inv_cdf((one.count - 0.375) / (one.count + 0.25))
    samples = [
        max(draw.gauss(one.median, (one.high - one.low) / ends), one.low / 2) for _ in range(one.count)
    ]
    return sampled(
        one.id,
        samples,
        metric=one.metric,
        unit=one.unit,
        per=one.per,
        formula=one.formula,
        labels=one.labels,
    )


def accused(recipe: str, runs: int) -> tuple[Counter[str], int]:
    """Return how often a claim failed on re-runs of records that do not fail it, and of how many verdicts."""
    loaded, draw = PROJECT.recipe(recipe), random.Random(recipe)
    records = [read_record(file, PROJECT) for file in PROJECT.results(loaded)]
    # Without the account, so that records of older forms are judged too.
    fair = {
        one.run: {found.claim for found in judge(one, loaded.published) if found.final not in FAILURES}
        for one in records
    }
    found: Counter[str] = Counter()
    for number in range(runs):
        record = records[number % len(records)]
        for verdict in judge(again(record, draw), loaded.published):
            if verdict.claim in fair[record.run]:
                found["verdicts"] += 1
                found[verdict.claim] += verdict.final in FAILURES
    total = found.pop("verdicts", 0)
    return +found, total


def test_no_committed_record_fails_a_claim_but_by_training_that_diverged() -> None:
    failed = [
        (record.run, verdict.claim, verdict.why)
        for recipe in RECIPES
        for record in (read_record(file, PROJECT) for file in PROJECT.results(PROJECT.recipe(recipe)))
        for verdict in record.verdicts
        if verdict.final in FAILURES and verdict.final != "failed"
    ]
    assert not failed


@pytest.mark.parametrize("recipe", RECIPES)
def test_honest_runs_are_not_accused(recipe: str) -> None:
    found, total = accused(recipe, 30)
    assert found.total() <= FALSE_ALARMS * total, found


@pytest.mark.trials
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thousand_honest_runs_are_not_accused(recipe: str) -> None:
    found, total = accused(recipe, 1000)
    assert found.total() <= FALSE_ALARMS * total, found
