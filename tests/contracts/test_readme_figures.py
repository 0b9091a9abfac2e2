"""README.md and the picture that it opens with hold the figures that the committed records give."""

from __future__ import annotations

from tests.contracts.tree import ROOT
from twinrun.planning.project import Project
from twinrun.report.figures import BLOCK, COMMAND, FILE, picture, with_figures
from twinrun.report.headline_picture import FILE as PICTURE


def test_the_readme_has_the_figures_of_the_records() -> None:
    text = (ROOT / FILE).read_text(encoding="utf-8")
    assert BLOCK.search(text), "no marked table"
    assert text == with_figures(text, Project(ROOT)), f"out of date: run `{COMMAND}`"


def test_the_picture_has_the_figures_of_the_records() -> None:
    text = (ROOT / PICTURE).read_text(encoding="utf-8")
    assert text == picture(Project(ROOT)), f"out of date: run `{COMMAND}`"
