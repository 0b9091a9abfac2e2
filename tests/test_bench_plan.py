from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benches import POINT, bench_plan, loaded_bench
from tests.records import ROOT, loaded_recipe
from twinrun.errors import InputError
from twinrun.job import BenchPlan
from twinrun.recipe import LoadedBench, find_recipes, load_recipe

GOLDEN = Path(__file__).parent / "golden"
# Plans of fixed machines. After a change that is meant: python -m tests.test_bench_plan, then read it.
PLANS: dict[str, dict[str, Any]] = {
    "bench-smoke-cpu": {"scale": "smoke"},
    "bench-node-h200": {"scale": "node", "gpu": "h200"},
    "bench-paper-mi250": {"scale": "paper", "gpu": "mi250"},
}


def whole_text(made: BenchPlan) -> str:
    return json.dumps(made.model_dump(mode="json"), indent=2) + "\n"


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one(name: str) -> None:
    assert whole_text(bench_plan(**PLANS[name])) == (GOLDEN / f"{name}.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_back_with_the_same_digest(name: str) -> None:
    made = bench_plan(**PLANS[name])
    again = BenchPlan.model_validate_json(made.model_dump_json())
    assert (again, again.sha256()) == (made, made.sha256())


def test_both_kinds_of_recipes_are_found() -> None:
    kinds = {name: isinstance(loaded, LoadedBench) for name, loaded in find_recipes(ROOT).items()}
    assert kinds == {"mamba-kernels": True, "mpt7b-scaling": False}


def test_a_benchmark_trains_nothing() -> None:
    with pytest.raises(InputError, match="trains nothing"):
        load_recipe(ROOT, "mamba-kernels")


def test_at_paper_scale_it_is_the_published_configuration() -> None:
    made = bench_plan(scale="paper", gpu="mi250")
    assert made.differences == ()
    assert made.fingerprint == loaded_bench().published.fingerprint


def test_differences_are_those_of_the_nearest_case() -> None:
    assert bench_plan(scale="node", gpu="h200").differences == ()
    smoke = {item.field for item in bench_plan(scale="smoke").differences}
    assert smoke == {"length", "channels"}


def test_a_case_has_the_options_it_does_not_name() -> None:
    (point,) = bench_plan(scale="paper", gpu="mi250").points
    assert (point.id, point.world_size) == (POINT, 1)
    assert point.settings["groups"] == 2
    assert point.settings["length"] == 4096


def test_settings_reach_the_options_and_choose_cases() -> None:
    settings = ("options.groups=4", "repeats=7", f"cases={POINT}")
    made = bench_plan(scale="node", gpu="h200", settings=settings)
    assert [point.id for point in made.points] == [POINT]
    assert (made.bench.repeats, made.points[0].settings["groups"]) == (7, 4)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("cases=2x1", "no such name"),
        ("repeat=7", "did you mean `repeats`"),
        ("repeats=-1", "greater than or equal to 0"),
        ("options.group=1", "did you mean `options.groups`"),
        ("model=mpt-1b", "no such field"),
    ],
)
def test_a_setting_that_does_not_fit_is_told(setting: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        bench_plan(scale="node", gpu="h200", settings=(setting,))
    assert told in str(caught.value)


def test_training_recipes_are_as_they_were() -> None:
    assert loaded_recipe().recipe.training.model == "mpt-7b"


if __name__ == "__main__":
    for plan_name, choices in PLANS.items():
        (GOLDEN / f"{plan_name}.json").write_text(whole_text(bench_plan(**choices)), encoding="utf-8")
