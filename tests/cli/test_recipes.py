"""What a new user asks first: which recipes there are, and what a run would do."""

from __future__ import annotations

import json
import re

from tests.cli.refusals import error_message
from tests.commands import ROOT, invoke

RECIPE = "recipes/mpt7b-scaling"
CPU = ("--vendor", "cpu", "--scale", "smoke", "--engine", "host")


def test_every_recipe_is_listed_with_what_it_asks_and_does_here() -> None:
    listed = json.loads(invoke(ROOT, "recipes", "--json").stdout)
    assert [one["recipe"] for one in listed] == sorted(
        path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").glob("*/recipe.toml")
    )
    done = invoke(ROOT, "recipes", variables={"COLUMNS": "160"})
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 160
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for one in listed:
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"{one['recipe']} "))
        assert one["question"][:40] in row
        assert set(one["question"].split()) <= set(done.stdout.split())
        # A recipe that the README lists is listed with the question that it asks.
        if f"`{one['recipe'].removeprefix('recipes/')}` |" in readme:
            assert f"| {one['question']} |" in readme
        assert one["scales"].keys() == {"smoke", "node", "paper"}
    assert readme.count("` | ") > 10


def test_a_plan_is_a_page_and_json_is_all_of_it() -> None:
    page = invoke(ROOT, "run", RECIPE, *CPU, "--dry", variables={"COLUMNS": "80"})
    assert (page.returncode, page.stderr) == (0, "")
    assert len(page.stdout.splitlines()) < 50
    for part in (
        r"^scale +smoke +asked for$",
        r"^devices=2 +1 +2 +about \d+ s +- +-$",
        r"^parameters +124,672 +6,658,859,008$",
        r"--nproc-per-node\s+1\b",
    ):
        assert re.search(part, re.sub(r" +$", "", page.stdout, flags=re.MULTILINE), re.MULTILINE), part
    whole = json.loads(invoke(ROOT, "run", RECIPE, *CPU, "--dry", "--json").stdout)
    assert whole["commands"].keys() == {"devices=1", "devices=2"}


def test_numbers_are_read_in_every_form() -> None:
    leg = invoke(ROOT, "run", "recipes/mpt1b-convergence", *CPU, "--leg", "1", "--dry", "--json")
    assert leg.returncode == 0, leg.stderr
    done = invoke(ROOT, "predict", "mpt-1b", "--gpu", "h200", "--nodes", "1,2", "--nodes=4", "--json")
    assert len(json.loads(done.stdout)["predictions"]) == 3


def test_kernels_are_listed_with_their_predicted_times() -> None:
    done = invoke(ROOT, "predict", "--kernels", "--gpu", "mi250", variables={"COLUMNS": "120"})
    rows = json.loads(invoke(ROOT, "predict", "--kernels", "--gpu", "mi250", "--json").stdout)
    assert {row["arch"] for row in rows} == {"gfx90a"}
    assert len(done.stdout.splitlines()) == len(rows) + 1
    assert all(row["low"] < row["ms"] < row["high"] for row in rows)


def test_a_plan_of_an_image_is_a_page_and_json_is_all_of_it() -> None:
    assert invoke(ROOT, "build", "--stack", "cpu", "--dry").stdout.startswith("image     twinrun/cpu:")
    assert json.loads(invoke(ROOT, "build", "--stack", "cpu", "--dry", "--json").stdout)["command"]


def test_the_folder_of_all_recipes_is_none() -> None:
    message = error_message(invoke(ROOT, "run", "recipes", "--dry"), 2)
    assert message.endswith("hint: `invoke recipes` says what each asks ")


def test_hints_name_what_a_command_has() -> None:
    for command in (("build", "--stack", "cpu"), ("cluster", "up"), ("run", RECIPE, *CPU[:-1], "docker")):
        message = error_message(invoke(ROOT, *command), 3)
        assert re.search("hint: (start it|install (it|a container engine))", message)
        assert ("--engine venv" in message) == (command[0] == "run")
