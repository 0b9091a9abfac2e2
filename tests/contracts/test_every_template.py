"""What the template bakes is a recipe like any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.commands import invoke
from tests.contracts.baking import TEMPLATE, bake, with_signed_record, written
from tests.contracts.checks import RECIPE_CHECKS, check_written
from twinrun.planning.project import LISTED, Project
from twinrun.report.page import write_recipe_report
from twinrun.results.reading import read_record
from twinrun.workloads import workload_names

NASTY = 'a "quoted" title: \\n is no line, C:\\path, {curly} # [brackets], naïve ≤ 7, 吾, 💡 \'\'\' """'
ANSWERS: dict[str, dict[str, str]] = {
    **{name: {"workload": name} for name in workload_names()},
    "defaults": {},
    "quotes and backslashes": {"title": NASTY, "publication_title": NASTY},
    "a card of two dies": {"gpu": "mi250"},
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_what_is_baked_is_a_recipe(answers: Mapping[str, str], tmp_path: Path) -> None:
    root = checkout(tmp_path)
    loaded = bake(root, answers)
    for check in RECIPE_CHECKS:
        check(root, loaded)
    # Answers arrive as typed.
    assert loaded.recipe.title == answers.get("title", loaded.recipe.title)
    assert loaded.recipe.publication.title == answers.get("publication_title", "") or "title" not in answers


@pytest.mark.needs("ssh-keygen")
def test_a_written_recipe_with_a_signed_record_is_green_and_has_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bake(checkout(tmp_path), {"name": "with-a-record", "gpu": "mi300x"}).folder
    root = tmp_path / "checkout"
    written(root / folder)
    # The whole project with this recipe beside it, which made-up records are of.
    monkeypatch.setenv(LISTED, str(root / folder))
    path = with_signed_record(root / folder, tmp_path / "key")
    loaded = Project(root).recipe("with-a-record")
    for check in (*RECIPE_CHECKS, check_written):
        check(root, loaded)
    record = read_record(path, Project(root))
    assert record.signer.startswith("signed with the key SHA256:")
    page = write_recipe_report(tmp_path / "page.html", records=[record], recipe=loaded, project=Project(root))
    pages = "".join(one.read_text(encoding="utf-8") for one in page.parent.glob("page/*.html"))
    assert "signed with the key" in pages


@pytest.mark.parametrize(
    ("workload", "points"),
    [
        ("training", ["devices=1", "devices=2"]),
        ("bench", ["64x96"]),
        ("checks", ["devices=1", "devices=2"]),
        ("evaluation", ["devices=1"]),
    ],
)
def test_what_is_baked_plans_and_nothing_outside_its_folder_is_touched(
    workload: str, points: list[str], tmp_path: Path
) -> None:
    root = checkout(tmp_path)
    before = _files(root)
    loaded = bake(root, {"workload": workload})
    added = _files(root).items() - before.items()
    assert {path.relative_to(root).parts[:2] for path, _ in added} == {("recipes", "my-recipe")}
    assert before.items() <= _files(root).items()
    asked = ("--vendor", "cpu", "--scale", "smoke", "--engine", "venv", "--dry", "--json")
    plan = json.loads(invoke(root, "run", loaded.folder, *asked).stdout)["plan"]
    assert [point["id"] for point in plan["points"]] == points


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("name=My_Recipe", "name: found 'My_Recipe'"),
        ("name=quo'te", "lower-case letters and digits"),
        ("name=../up", "name: found '../up'"),
        ("name=mpt7b-scaling", "a name that no folder of recipes/ has yet"),
        ("gpu=mi520", "did you mean mi250"),
        ("gpu=h100", "did you mean h100-80gb"),
        ("title= ", "title: found ' ', allowed: one line of text"),
        ("publication_title=two\nlines", "publication_title: found 'two\\nlines'"),
        ("workload=nope", "allowed: training, bench, checks, evaluation"),
    ],
)
def test_wrong_answers_are_refused_in_one_line_and_leave_nothing(
    answers: str, said: str, tmp_path: Path
) -> None:
    done = cookiecutter_command(tmp_path, str(TEMPLATE), answers)
    assert done.returncode == 1
    message = done.stdout + done.stderr
    assert said in message
    assert "Traceback" not in message
    assert len(message.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_command_writes_into_the_recipes_of_its_checkout(tmp_path: Path) -> None:
    root = checkout(tmp_path / "project")
    shutil.copytree(TEMPLATE, root / "templates" / "recipe")
    for folder, template in ((root, "templates/recipe"), (tmp_path, str(root / "templates" / "recipe"))):
        done = cookiecutter_command(folder, template, f"name=in-{folder.name.lower().replace('_', '-')}")
        assert done.returncode == 0, done.stderr
        assert not list(folder.glob("in-*"))
    assert len(list((root / "recipes").glob("in-*/recipe.toml"))) == 2


def cookiecutter_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run cookiecutter in `folder` as a user does, without questions."""
    command = (sys.executable, "-B", "-m", "cookiecutter", "--no-input", *arguments)
    # It writes its replays to the user's home.
    with tempfile.TemporaryDirectory() as home:
        env = os.environ | {"HOME": home}
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def _files(root: Path) -> dict[Path, bytes]:
    # What `images` leads to is no part of `root` to rglob.
    folders = (root, root / "images")
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
