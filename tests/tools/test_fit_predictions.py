"""The calibration is what a fit on the fitted rows gives, within a tenth of the error."""

from __future__ import annotations

import math

import pytest

from tools import fit_predictions as tool
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration

GPUS = Project(tool.ROOT).gpus
KNOWN = calibration()


@pytest.mark.parametrize("software", tool.FITTED)
def test_no_fit_is_much_better_than_the_calibration(software: str) -> None:
    mine, gpus = tool.fitted_rows(software, GPUS)
    fitted = tool.fit(KNOWN, software, mine, gpus)
    has, gets = (math.sqrt(tool.loss(one, software, mine)) for one in (KNOWN, fitted))
    assert gets <= has <= 1.1 * gets


def test_a_fit_undoes_what_made_the_calibration_worse() -> None:
    software = "twinrun-2026"
    mine, gpus = tool.fitted_rows(software, GPUS)
    away = tool.FittedFigure(software, "products", "h200").moved(KNOWN, 0.8)
    before, after, best = (
        math.sqrt(tool.loss(one, software, mine))
        for one in (away, tool.fit(away, software, mine, gpus), KNOWN)
    )
    assert after < before / 3
    assert best <= 1.01 * after
