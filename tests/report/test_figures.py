from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import training_record
from tests.report.committed import PROJECT
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.report.figures import chosen, figures, with_figures
from twinrun.results.conditions import Findings
from twinrun.results.record import Record, write_record

ROWS = """mpt7b-scaling | 4 x NVIDIA H200 SXM | mpt-7b, bf16, plain | devices=4
mamba-kernels | 1 x NVIDIA H200 SXM | median of 30 calls | 2x4096x5376x16"""
PAGE = f"before\n<!-- figures\n{ROWS}\n-->\nold\n<!-- end of figures -->\nafter\n"


def test_tables_stand_between_their_markers() -> None:
    text = with_figures(PAGE, PROJECT)
    assert text.startswith(f"before\n<!-- figures\n{ROWS}\n-->\n| recipe |")
    assert text.endswith("|\n<!-- end of figures -->\nafter\n")
    assert "old" not in text
    assert with_figures(text, PROJECT) == text


def test_a_page_without_markers_stays() -> None:
    assert with_figures("no table", PROJECT) == "no table"


class OneRecord(Project):
    """The project as if a recipe had one committed record."""

    def __init__(self, folder: Path, record: Record) -> None:
        super().__init__(PROJECT.root)
        self._file = folder / "record.json"
        write_record(self._file, record)

    def results(self, recipe: LoadedRecipe) -> list[Path]:
        return [self._file]


# One claim of two fails.
SLOW = training_record(
    {"devices=2": 300.0, "devices=4": 200.0},
    gpu="h200",
    scale="node",
    settings=("model=mpt-1b", "devices=2,4"),
)
SHOWN = "mpt7b-scaling | 4 x NVIDIA H200 SXM | mpt-1b, bf16, composer | devices=4"


def test_a_subject_that_no_record_shows_says_why(tmp_path: Path) -> None:
    revision = SLOW.revision.model_copy(update={"commit": None})
    project = OneRecord(tmp_path, SLOW.model_copy(update={"revision": revision}))
    assert "| devices=4 | no record: the run has no commit | - | - |" in chosen([SHOWN], project)
    assert "| - | no record: the run has no commit | - | - |" in figures("mpt7b-scaling", project)
    assert "| devices=4 | no record | - | - |" in chosen([SHOWN.replace("H200", "B200")], project)


def test_a_row_has_the_figures_and_the_failed_claims_of_its_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The record says no more than its figures need.
    monkeypatch.setattr(Findings, "of", lambda *_: Findings())
    project = OneRecord(tmp_path, SLOW.model_copy(update={"rules": 1}))
    for text in (chosen([SHOWN], project), figures("mpt7b-scaling", project)):
        assert "20.2% MFU" in text
        assert "✗ `throughput-1-node` fails here" in text
        assert "✗ `efficiency-1-to-32-nodes` fails here" in text


def test_a_record_that_was_sent_in_is_marked_wherever_a_figure_of_it_stands(tmp_path: Path) -> None:
    project = OneRecord(tmp_path, SLOW.model_copy(update={"evidence": "as sent in"}))
    row = SHOWN.replace("SXM |", "SXM, as sent in |")
    for text in (chosen([row], project), figures("mpt7b-scaling", project)):
        assert "| 4 x NVIDIA H200 SXM, as sent in | mpt-1b, bf16, composer | devices=4 | 20.2% MFU" in text
    assert "| no record |" in chosen([SHOWN], project)


def test_a_point_that_the_record_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no devices=8; allowed: .*devices=4"):
        chosen([SHOWN.replace("devices=4", "devices=8")], OneRecord(tmp_path, SLOW))
