from __future__ import annotations

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
from twinrun.foundation.errors import MachineError
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import Hardware, PlanRequest

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


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one_and_is_read_back(name: str) -> None:
    made = plan(**PLANS[name])
    again = Plan.model_validate_json(made.model_dump_json())
    assert (again, again.sha256()) == (made, made.sha256())
    # Predictions move with every figure of the calibration, and tests of their own hold them.
    content = made.model_dump(mode="json", exclude={"points": {"__all__": {"predicted", "seconds"}}})
    if name in WHOLE:
        check_golden(f"plan-{name}.json", laid_out(content) + "\n")
    else:
        check_entry("plans.json", name, shortened(content))


def test_the_digest_depends_on_no_path_and_no_process(tmp_path: Path) -> None:
    root, digests = checkout(tmp_path, RECIPE), set()
    program = (
        "import sys; from pathlib import Path; from tests.planning.test_plan import PLANS, Project, plan;"
        "print(plan(Project(Path(sys.argv[1])), **PLANS['node-4-h200']).sha256())"
    )
    for seed in ("1", "2"):
        variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONHASHSEED": seed}
        variables |= {"TZ": f"UTC{seed}", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        command = [sys.executable, "-c", program, str(root)]
        digests.add(subprocess.check_output(command, text=True, env=variables, cwd=tmp_path))
    assert digests == {plan(**PLANS["node-4-h200"]).sha256() + "\n"}


def test_the_digest_says_what_is_run_and_how_and_no_estimate() -> None:
    made = plan(scale="node", gpu="h200", devices=1)
    others = {plan(**choices).sha256() for choices in PLANS.values()}
    assert len({made.sha256(), *others}) == len(PLANS) + 1
    for field in ("engine", "launcher", "scheduler", "stack", "image"):
        assert made.model_copy(update={field: "another"}).sha256() != made.sha256()
    guessed = {"seconds": 1e6, "predicted": ()}
    points = tuple(point.model_copy(update=guessed) for point in made.points)
    assert made.model_copy(update={"points": points}).sha256() == made.sha256()


@pytest.mark.parametrize(
    ("gpu", "devices", "model"), [("h200", 4, "mpt-3b"), ("h200", 1, "mpt-7b"), ("mi250", 1, "mpt-1b")]
)
def test_the_largest_model_whose_sweep_is_short_is_taken(gpu: str, devices: int, model: str) -> None:
    made = plan(scale="node", gpu=gpu, devices=devices)
    assert made.part.training.model == model
    assert sum(point.seconds or 0 for point in made.points) <= 360


def resolved(have: Hardware) -> tuple[Plan, dict[str, str]]:
    """Return the plan of the node scale on hardware, and why what was chosen."""
    have = have.model_copy(update={"vendor": "cpu"})
    what: dict[str, Any] = {"recipe": PROJECT.recipe(RECIPE), "stack": PROJECT.stack("cpu"), "overrides": {}}
    asked = PlanRequest(scale="node", hardware=have, **what)
    made, choices = resolve(asked, engine="venv", launcher="torchrun", scheduler="local")
    return made, {one.name: one.because for one in choices}


def test_a_longer_sweep_is_offered_by_name_and_a_gpu_without_a_row_takes_the_smallest() -> None:
    _, because = resolved(hardware("h200", 2))
    assert "--set model=mpt-7b takes about" in because["model"]
    memory = PROJECT.gpus["h200"].device_memory_bytes
    made, _ = resolved(Hardware(gpu=None, device_memory_bytes=memory, devices=1, cores=2))
    assert (made.gpu, made.part.training.model) == (None, "mpt-125m")
    assert [point.seconds for point in made.points] == [None]


def test_a_model_asked_for_is_not_replaced_by_a_smaller_one() -> None:
    with pytest.raises(MachineError, match="mpt-30b does not fit"):
        plan(scale="node", gpu="h200", devices=1, settings=("model=mpt-30b",))


def apart(made: Plan) -> tuple[Difference, ...]:
    return differences_of_plan(PROJECT.recipe(made.recipe), made)


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


def test_settings_reach_the_options_and_choose_cases_even_those_with_options_of_their_own() -> None:
    chosen = ('options.compressions=["bf16"]', "cases=64KB,1KB")
    points = plan(recipe="ring-allreduce", scale="smoke", settings=chosen).points
    assert {one.part.case: one.part.settings["compressions"] for one in points} == {
        "64KB": ("bf16",),
        "1KB": ("bf16",),
    }
    assert len(points[0].part.settings["dtypes"]) == 4
    (point,) = plan(recipe=BENCH, scale="paper", gpu="mi250").points
    assert (point.id, point.world_size) == (POINT, 1)
    assert (point.part.settings["groups"], point.part.settings["length"]) == (2, 4096)
    settings = ("options.groups=4", "repeats=7", f"cases={POINT}")
    made = plan(recipe=BENCH, scale="node", gpu="h200", settings=settings)
    assert [point.id for point in made.points] == [POINT]
    assert (made.part.bench.repeats, made.points[0].part.settings["groups"]) == (7, 4)
