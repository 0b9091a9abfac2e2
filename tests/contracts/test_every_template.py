"""What the template bakes is a recipe like any other."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.contracts.baking import TEMPLATE, bake, checkout
from tests.contracts.checks import RECIPE_CHECKS
from tests.contracts.tree import ROOT
from twinrun import commands

NASTY = 'a "quoted" title: \\n is no line, C:\\path, {curly} # [brackets], naïve ≤ 7, 吾, 💡 \'\'\' """'
TEXTS = "title publication_title publication_by figure statement because software missing"
ANSWERS: dict[str, dict[str, str]] = {
    "defaults": {},
    "quotes and backslashes": dict.fromkeys(TEXTS.split(), NASTY),
    "tokens per second of dies": {
        "name": "mpt1b-tokens",
        "metric": "tokens-per-second",
        "value": "1920.5",
        "per": "device",
        "gpu": "mi250",
        "devices_per_card": "2",
        "cards": "16",
        "nodes": "4",
        "parameters": "",
        "global_batch": "512",
        "activation_checkpointing": "true",
    },
}


@pytest.mark.parametrize("answers", ANSWERS.values(), ids=ANSWERS)
def test_what_is_baked_is_a_recipe(answers: Mapping[str, str], tmp_path: Path) -> None:
    root = checkout(tmp_path)
    loaded = bake(root, answers)
    for check in RECIPE_CHECKS:
        check(root, loaded)


def test_answers_arrive_as_typed(tmp_path: Path) -> None:
    loaded = bake(checkout(tmp_path), {"title": NASTY, "because": NASTY})
    assert loaded.recipe.title == NASTY
    assert loaded.published.claim[0].because == NASTY


def test_the_dry_plan_of_what_is_baked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = checkout(tmp_path)
    loaded = bake(root, {})
    request = commands.Request(recipe=loaded.folder, vendor="cpu", scale="smoke", engine="venv", dry=True)
    assert commands.run(root, request, out=None, resume=False, as_json=True) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert [point["id"] for point in plan["points"]] == ["devices=1", "devices=2"]


def test_the_script_is_that_of_the_first_recipe() -> None:
    baked, first = TEMPLATE / "{{cookiecutter.name}}", ROOT / "recipes" / "mpt7b-scaling"
    texts = [(folder / "train.py").read_text(encoding="utf-8") for folder in (baked, first)]
    codes = [[ast.dump(node) for node in ast.parse(text).body[1:]] for text in texts]
    assert codes[0] == codes[1]


def test_every_question_is_explained() -> None:
    questions = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    asked = [name for name in questions if not name.startswith("_")]
    assert list(questions["__prompts__"]) == asked
