"""A recipe outside the checkout is one like any other, and brings its own metrics."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkouts import ROOT, checkout
from tests.commands import invoke
from tests.contracts.baking import bake
from twinrun.foundation.errors import InputError
from twinrun.planning.project import LISTED, Project

ROW = """
[[metric]]
id = "share-of-mine"
title = "share"
unit = "ratio"
better = "higher"
per = ["run"]
counts = "something that only this recipe counts"
"""


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A baked recipe in a folder of its own."""
    baked = bake(checkout(tmp_path), {"name": "far", "workload": "training"})
    folder = tmp_path / "elsewhere" / "far"
    folder.parent.mkdir()
    shutil.move(tmp_path / "checkout" / baked.folder, folder)
    return folder


def test_it_is_planned_by_its_path(far: Path) -> None:
    asked = ("--vendor", "cpu", "--scale", "smoke", "--engine", "venv", "--dry", "--json")
    done = invoke(ROOT, "run", str(far), *asked)
    assert str(far) not in done.stdout.split('"commands"')[0].split('"plan"')[1]


def test_its_name_is_known_where_its_folder_is_listed(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="unknown recipe"):
        Project(ROOT).recipe("far")
    monkeypatch.setenv(LISTED, str(far))
    assert Project(ROOT).recipe("far").folder == str(far)


def test_its_metrics_count(far: Path) -> None:
    (far / "metrics.toml").write_text(ROW)
    manifest = far / "recipe.toml"
    text = manifest.read_text()
    reports = '[training.reports]\nshare-of-mine = "ratio"\n\n[training.optimizer]'
    manifest.write_text(text.replace("[training.optimizer]", reports))
    assert Project(ROOT).recipe(str(far)).tables.training.reports == {"share-of-mine": "ratio"}
    manifest.write_text(text.replace("[training.optimizer]", reports.replace("ratio", "%")))
    with pytest.raises(InputError, match="another unit than that of the metric"):
        Project(ROOT).recipe(str(far))


def test_a_row_that_the_project_has_is_refused(far: Path) -> None:
    (far / "metrics.toml").write_text(ROW.replace("share-of-mine", "loss"))
    with pytest.raises(InputError, match="given twice"):
        Project(ROOT).recipe(str(far))


def test_a_name_belongs_to_one_recipe_and_a_file_is_none(far: Path) -> None:
    with pytest.raises(InputError, match="a recipe is a folder"):
        Project(ROOT).recipe(str(far / "recipe.toml"))
    twin = far.rename(far.with_name("mpt7b-scaling"))
    with pytest.raises(InputError, match="two recipes of one name"):
        Project(ROOT).recipe(str(twin))
