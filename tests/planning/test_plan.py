from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import checkout
from tests.goldens import check_entry, check_golden, laid_out, shortened
from tests.records import BENCH, PROJECT, RECIPE, ROOT, hardware
from tests.records import plan as plan_of
from twinrun.foundation.errors import InputError, MachineError
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.workloads import load_workload
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import Hardware

LAYOUTS = "deepspeed-pretrain"
# Plans of fixed machines. One of each kind is readable as a whole, of the others the short parts are.
PLANS: dict[str, dict[str, Any]] = {
    "smoke-cpu": {"scale": "smoke"},
    "node-1-h200": {"scale": "node", "gpu": "h200", "devices": 1, "settings": ("model=mpt-1b",)},
    "node-4-h200": {"scale": "node", "gpu": "h200", "devices": 4, "settings": ("model=mpt-1b",)},
    "paper-mi250": {"scale": "paper", "gpu": "mi250", "devices": 8},
    "bench-smoke-cpu": {"recipe": BENCH, "scale": "smoke"},
    "bench-node-h200": {"recipe": BENCH, "scale": "node", "gpu": "h200"},
    "layouts-paper-mi210": {"recipe": LAYOUTS, "scale": "paper", "gpu": "mi210", "devices": 8},
    "bench-paper-mi250": {"recipe": BENCH, "scale": "paper", "gpu": "mi250"},
}
WHOLE = ("paper-mi250", "bench-paper-mi250")


def plan(project: Project = PROJECT, *, gpu: str | None = None, devices: int = 0, **choices: Any) -> Plan:
    """Return the plan of a machine with `devices` devices of the model `gpu`."""
    made = plan_of(gpu=gpu, devices=devices, project=project, **choices)
    # A lock that is resolved again leaves these plans as they are.
    return made.model_copy(update={"lock_sha256": "0" * 64, "image": "image"})


def part(made: Plan) -> Any:
    """Return what the workload says of a plan."""
    return made.part


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one(name: str) -> None:
    # Predictions move with every figure of the calibration, and tests of their own hold them.
    content = plan(**PLANS[name]).model_dump(mode="json", exclude={"points": {"__all__": {"predicted"}}})
    if name in WHOLE:
        check_golden(f"plan-{name}.json", laid_out(content) + "\n")
    else:
        check_entry("plans.json", name, shortened(content))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_back_with_the_same_digest(name: str) -> None:
    made = plan(**PLANS[name])
    again = Plan.model_validate_json(made.model_dump_json())
    assert (again, again.sha256()) == (made, made.sha256())
    others = {plan(**choices).sha256() for choices in PLANS.values() if choices != PLANS[name]}
    assert made.sha256() not in others


def test_the_digest_depends_on_no_path_and_no_process(tmp_path: Path) -> None:
    root = checkout(tmp_path, RECIPE)
    program = (
        "import sys; from pathlib import Path; from tests.planning.test_plan import PLANS, Project, plan;"
        "print(plan(Project(Path(sys.argv[1])), **PLANS['node-4-h200']).sha256())"
    )
    digests = set()
    for seed in ("1", "2"):
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "PYTHONHASHSEED": seed,
            "TZ": f"UTC{seed}",
        }
        variables["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        command = [sys.executable, "-c", program, str(root)]
        digests.add(
            subprocess.run(
                command, capture_output=True, text=True, check=True, env=variables, cwd=tmp_path
            ).stdout
        )
    assert digests == {plan(**PLANS["node-4-h200"]).sha256() + "\n"}


def test_how_it_runs_is_part_of_the_digest() -> None:
    made = plan(scale="smoke")
    for field in ("engine", "launcher", "scheduler", "stack", "image"):
        assert made.model_copy(update={field: "another"}).sha256() != made.sha256()


def test_an_estimate_is_no_part_of_the_digest() -> None:
    made = plan(scale="smoke")
    points = tuple(point.model_copy(update={"seconds": 1e6}) for point in made.points)
    assert made.model_copy(update={"points": points}).sha256() == made.sha256()


@pytest.mark.parametrize(
    ("gpu", "devices", "model"), [("h200", 4, "mpt-3b"), ("h200", 1, "mpt-7b"), ("mi250", 1, "mpt-760m")]
)
def test_the_largest_model_whose_sweep_is_short_is_taken(gpu: str, devices: int, model: str) -> None:
    made = plan(scale="node", gpu=gpu, devices=devices)
    assert part(made).training.model == model
    assert sum(point.seconds or 0 for point in made.points) <= 360


def test_a_longer_sweep_is_offered_by_name() -> None:
    loaded, stack = PROJECT.recipe(RECIPE), PROJECT.stack("cpu")
    _, choices = resolve(
        loaded,
        workload=load_workload(loaded.workload),
        scale="node",
        settings=(),
        stack=stack,
        hardware=hardware("h200", 2),
        engine="venv",
        launcher="torchrun",
        scheduler="local",
    )
    (model,) = [choice for choice in choices if choice.name == "model"]
    assert "--set model=mpt-7b takes about" in model.because


def test_a_model_asked_for_is_not_replaced_by_a_smaller_one() -> None:
    with pytest.raises(MachineError, match="mpt-30b does not fit"):
        plan(scale="node", gpu="h200", devices=1, settings=("model=mpt-30b",))


def apart(made: Plan) -> tuple[Difference, ...]:
    return differences_of_plan(PROJECT.recipe(made.recipe), made)


def test_the_paper_scale_differs_from_the_publication_in_nothing() -> None:
    assert apart(plan(**PLANS["paper-mi250"])) == ()
    fields = [item.field for item in apart(plan(scale="smoke"))]
    assert {"parameters", "precision", "global_batch"} <= set(fields)


@pytest.mark.parametrize(
    ("recipe", "settings", "fields"),
    [
        (RECIPE, ("data=standard-library",), ["data.repository", "data.tokenizer"]),
        (RECIPE, ("optimizer.learning_rate=1e-6",), ["optimizer.learning_rate"]),
        (RECIPE, ("optimizer.betas=[0.9, 0.96]",), ["optimizer.beta2"]),
        (RECIPE, ("seed=18",), ["data.order_seed"]),
        ("mpt1b-convergence", (), []),
        ("mpt1b-convergence", ("microbatch=2",), ["microbatch"]),
        ("mamba-throughput", (), []),
        ("mamba-convergence", (), ["data.repository"]),
        ("deepspeed-pretrain", (), ["data.repository", "data.tokenizer"]),
    ],
)
def test_the_paper_scale_on_other_data_or_with_another_optimizer_says_so(
    recipe: str, settings: tuple[str, ...], fields: list[str]
) -> None:
    made = plan(recipe=recipe, scale="paper", gpu="mi250", devices=8, settings=settings)
    assert [one.field for one in apart(made) if one.stated] == fields


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("step=8", "did you mean `steps`"),
        ("model=mpt-1", "did you mean `mpt-1b`"),
        ("data=standard-libary", "did you mean `standard-library`"),
        ("steps=many", "--set:steps"),
        ("steps=0", "--set:steps"),
        ("precision=fp16", "--set precision"),
        ("optimizer.betas=[1]", "--set:optimizer.betas"),
        ("warmup_steps=40", "no step would be timed"),
        ("devices=0", "--set devices"),
        ("devices=", "--set devices"),
    ],
)
def test_a_setting_that_cannot_be_is_told(setting: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(scale="smoke", settings=(setting,))
    assert expected in str(caught.value)


def test_a_scale_with_a_field_that_is_not_there_names_the_recipe(tmp_path: Path) -> None:
    root = checkout(tmp_path, RECIPE)
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"optimizer.decay_steps" = 40', '"optimizer.decay" = 40'), encoding="utf-8")
    with pytest.raises(InputError, match=r"recipe\.toml:set\.optimizer\.decay: no such field"):
        plan(Project(root), scale="smoke")


def test_a_gpu_without_a_row_takes_the_smallest_model() -> None:
    memory = PROJECT.gpus["h200"].device_memory_bytes
    made, _ = resolve(
        PROJECT.recipe(RECIPE),
        workload=load_workload("training"),
        scale="node",
        settings=(),
        stack=PROJECT.stack("cpu"),
        hardware=Hardware(gpu=None, device_memory_bytes=memory, devices=1, cores=2),
        engine="venv",
        launcher="torchrun",
        scheduler="local",
    )
    assert (made.gpu, part(made).training.model) == (None, "mpt-125m")
    assert [point.seconds for point in made.points] == [None]


POINT = "2x4096x5376x16"


def test_a_benchmark_differs_where_its_nearest_case_does() -> None:
    paper = plan(recipe=BENCH, scale="paper", gpu="mi250")
    assert apart(paper) == ()
    stated = PROJECT.recipe(BENCH).published.fingerprint
    assert paper.description.marks(stated) == stated
    # What the publication does not give is held against the paper scale of the recipe.
    assert not [one for one in apart(plan(recipe=BENCH, scale="node", gpu="h200")) if one.stated]
    smoke = apart(plan(recipe=BENCH, scale="smoke"))
    assert {one.field for one in smoke if one.stated} == {"length", "channels"}


def test_a_case_has_the_options_it_does_not_name() -> None:
    (point,) = plan(recipe=BENCH, scale="paper", gpu="mi250").points
    settings: Any = point.part
    assert (point.id, point.world_size) == (POINT, 1)
    assert (settings.settings["groups"], settings.settings["length"]) == (2, 4096)


def test_settings_reach_the_options_and_choose_cases() -> None:
    settings = ("options.groups=4", "repeats=7", f"cases={POINT}")
    made = plan(recipe=BENCH, scale="node", gpu="h200", settings=settings)
    chosen: Any = made.points[0].part
    assert [point.id for point in made.points] == [POINT]
    assert (part(made).bench.repeats, chosen.settings["groups"]) == (7, 4)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("cases=2x1", "no such name"),
        ("repeat=7", "did you mean `repeats`"),
        ("repeats=-1", "greater than or equal to 0"),
        ("options.group=1", "did you mean `options.groups`"),
        ("options.groups=many", "allowed: a whole number"),
        ("options.groups=1.5", "allowed: a whole number"),
        ("options.groups=true", "allowed: a whole number"),
        ("model=mpt-1b", "no such field"),
        ("devices=2", "one device"),
    ],
)
def test_a_setting_of_a_benchmark_that_does_not_fit_is_told(setting: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(recipe=BENCH, scale="node", gpu="h200", settings=(setting,))
    assert expected in str(caught.value)


def test_a_plan_edited_by_hand_is_refused() -> None:
    content = json.loads(plan(scale="smoke").model_dump_json())
    for change in (
        {"workload": "nothing"},
        {"part": {**content["part"], "shape": {"family": "mpt"}}},
        {"points": [{**content["points"][0], "part": {"microbatches": "many"}}]},
    ):
        with pytest.raises(InputError):
            Plan.model_validate_json(json.dumps(content | change))
