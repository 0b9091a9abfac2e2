"""The fit finds what rows were made of, and what it knows of them is what is written."""

from __future__ import annotations

import math

import pytest

from tools import fit_predictions as tool
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration, told

GPUS, KNOWN = Project(tool.ROOT).gpus, calibration()


def test_a_fit_finds_what_made_all_rows_slower() -> None:
    runs = [row.run(GPUS, KNOWN) for row in tool.rows() if row.source == "torchtitan"]
    slower = [run._replace(seconds=1.5 * run.seconds) for run in runs]
    one, other = (tool.fit(each, KNOWN) for each in (runs, slower))
    ratios = [told(run.subject, (), other).seconds / told(run.subject, (), one).seconds for run in runs]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.5, rel=0.1)


@pytest.mark.nightly
def test_the_written_effects_are_those_of_the_rows() -> None:
    start = KNOWN.model_copy(update={"effects": {}})
    runs = [row.run(GPUS, KNOWN) for row in tool.rows()]
    found = tool.fit(runs, start, rounds=tool.ROUNDS, learn=True).effects
    assert found.keys() == KNOWN.effects.keys()
    assert all(abs(one.mean - found[key].mean) < 0.1 for key, one in KNOWN.effects.items())
