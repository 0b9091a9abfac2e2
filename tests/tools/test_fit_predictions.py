"""The fit finds what rows were made of, and what it knows of them is what is written."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tools import fit_predictions as tool
from twinrun.planning.project import Project
from twinrun.predict.calibration import EFFECTS, Basis, calibration, told
from twinrun.predict.rows import rows


def test_a_fit_finds_what_made_all_rows_slower() -> None:
    gpus, known = Project(tool.ROOT).gpus, calibration()
    runs = [row.run(gpus, known) for row in rows() if row.source == "torchtitan"]
    slower = [replace(run, seconds=1.5 * run.seconds) for run in runs]
    one, other = (known.fitted(tool.Fitting(each, known).fit(1, settled=True)) for each in (runs, slower))
    found = [
        [told(run.subject, Basis(run.subject.software, each)).seconds for run in runs]
        for each in (one, other)
    ]
    ratios = [b / a for a, b in zip(*found, strict=True)]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1.5, rel=0.1)


@pytest.mark.nightly
def test_the_written_effects_are_those_of_the_rows(tmp_path: object) -> None:
    gpus, known = Project(tool.ROOT).gpus, calibration()
    found = tool.Fitting([row.run(gpus, known) for row in rows()], known).fit()
    assert found.keys() == known.effects.keys()
    assert EFFECTS.is_file()
    assert all(abs(one.mean - found[key].mean) < 0.1 for key, one in known.effects.items())
