"""Layouts in the ranks: messages, cut matrices, experts, and what is found before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("streaming", reason="needs the packages of a stack")

import compilation
import torch
from shared_work import Parts, messages, state_bytes

from tests.ranks import environment, run_ranks
from tests.train.checkpoint_jobs import digests, saving
from tests.train.small import LAYOUTS, SHAPE, STEPS, WITH_DEEPSPEED, MakeJob, launch
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import load_json
from twinrun.protocol.job import REFUSED
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import Optimizer, TrainingJob, TrainingResult
from twinrun.train.checkpoint.state import MODEL
from twinrun.train.models import build_of

SCRIPT = Path(__file__).with_name("layout_ranks.py")
EXPERTS = SHAPE.model_copy(update={"experts": 4})


def test_ranks_find_nothing_wrong() -> None:
    variables = environment()
    variables["PYTHONPATH"] += f":{Path(__file__).parents[1]}"
    ended = run_ranks(SCRIPT, world_size=2, variables=variables, modules=WITH_DEEPSPEED)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_experts_are_the_ones_that_their_router_chose(make_job: MakeJob) -> None:
    job = make_job(shape=EXPERTS)
    model = build_of(EXPERTS)(EXPERTS, training=job.training)
    model.initialise(5)
    assert sum(one.numel() for one in model.parameters()) == EXPERTS.parameters()
    layer, x_ND = model.blocks[0].ffn, torch.randn(24, SHAPE.width)
    shares_NX = torch.softmax(x_ND @ layer.router.weight.T, dim=1)
    expected = [
        shares_X.max() * layer.experts[int(shares_X.argmax())](x_D)
        for x_D, shares_X in zip(x_ND, shares_NX, strict=True)
    ]
    torch.testing.assert_close(layer(x_ND[None])[0], torch.stack(expected))
    # No token for some experts, and yet every parameter has a gradient, as data parallelism needs it.
    layer(x_ND[None, :1]).sum().backward()
    assert all(one.grad is not None for one in layer.experts.parameters())
    # They cost the arithmetic of one.
    assert EXPERTS.flops_per_token() == SHAPE.flops_per_token() + 6 * SHAPE.layers * 4 * SHAPE.width


def with_layout(job: TrainingJob, **layout: Any) -> TrainingJob:
    return job.model_copy(update={"layout": Layout(**{"framework": "deepspeed", **layout})})


def test_formulas_are_those_of_the_paper() -> None:
    """Table 1 of the paper, 7.5 billion parameters on 64 ranks: 120 GB, and 1.9 GB with ZeRO-3.

    Its 31.4 and 16.6 GB of ZeRO-1 and 2 have gradients, which between two steps are gone.
    """
    on_64, plain = Parts(7_500_000_000, 64), Layout(framework="torch")
    zeros = [Layout(framework="deepspeed", zero=zero) for zero in range(4)]
    assert [round(7.5 * state_bytes(zeros[zero], on_64, "bf16"), 1) for zero in (1, 3)] == [16.4, 1.9]
    assert 7.5 * state_bytes(plain, on_64, "bf16") == 120
    sent = [messages(one, on_64, microbatches=1) or 0 for one in zeros]
    assert [one / sent[0] for one in sent] == [1, 1, 1, 1.5]
    fsdp2 = Layout(framework="torch", sharding="full")
    assert state_bytes(fsdp2, on_64, "bf16") == 12 / 64
    assert messages(fsdp2, on_64, microbatches=1) == sent[3]
    assert messages(fsdp2, on_64, microbatches=8, reduction="step") == sent[0]
    # Experts are split over the ranks that have the same ones.
    layout = Layout(framework="deepspeed", zero=1, experts=2)
    held = state_bytes(layout, Parts(100, 4, 300, 2), "bf16")
    assert held == (100 * (2 + 12 / 4) + 300 * (2 + 12 / 2)) / 400


def test_what_an_offload_needs_is_found_before_the_start(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compilation.VARIABLE, str(tmp_path / "extensions"))
    absent = with_layout(make_job(), zero=3, offload="optimizer", storage=str(tmp_path / "disk"))
    with pytest.raises(InputError, match="no folder that can be written") as caught:
        compilation.check(absent)
    assert str(tmp_path / "disk") in str(caught.value)
    (tmp_path / "disk").mkdir()
    compilation.check(absent)
    huge = absent.model_copy(update={"shape": SHAPE.model_copy(update={"vocabulary": 10**15})})
    with pytest.raises(MachineError, match="the disk is too small"):
        compilation.check(huge)
    lock = tmp_path / "extensions" / "py311_cpu" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with pytest.raises(MachineError, match="killed and left its lock") as stale:
        compilation.check(absent)
    assert str(lock) in str(stale.value)
    # What compiles nothing waits for nobody.
    compilation.check(with_layout(make_job(), zero=3))


@pytest.mark.needs("deepspeed")
def test_ranks_name_the_lock_of_a_killed_compilation(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(compilation.VARIABLE, str(tmp_path))
    lock = tmp_path / "py311_cpu" / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    job = with_layout(make_job(), zero=3, offload="optimizer", storage=str(tmp_path))
    done = launch(LAYOUTS, job, modules=WITH_DEEPSPEED)
    assert done.returncode == REFUSED
    assert f"{lock}: a compilation is under way, or was killed and left its lock" in done.stderr
    assert "compiling" not in done.stderr.lower()


@pytest.mark.needs("deepspeed")
def test_a_setting_that_deepspeed_does_not_have_is_named(make_job: MakeJob) -> None:
    typo = {"zero_optimization.stage3_max_live_paramters": 0}
    done = launch(LAYOUTS, with_layout(make_job(), zero=3, settings=typo), modules=WITH_DEEPSPEED)
    assert done.returncode == 1
    assert "settings: DeepSpeed refuses a setting: Extra inputs are not permitted" in done.stderr
    assert "found: stage3_max_live_paramters" in done.stderr
    assert "pydantic" not in done.stderr


def run(job: TrainingJob) -> TrainingResult:
    done = launch(LAYOUTS, job, modules=WITH_DEEPSPEED)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_json(Path(job.out) / "result.json", TrainingResult)


def losses(result: TrainingResult) -> list[float]:
    return [step.loss for step in result.steps]


DDP = {"framework": "torch"}
ZEROS: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]


# Ranks and layout of the run that saves, and of the one that goes on.
@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(
    ("ranks", "saved", "others", "resumed"),
    [
        (2, ZEROS[3], 1, ZEROS[1]),
        *(
            pytest.param(*trial, marks=pytest.mark.trials)
            for trial in (
                (2, ZEROS[1], 4, ZEROS[3]),
                (4, ZEROS[3], 2, ZEROS[2]),
                (2, ZEROS[2], 4, ZEROS[1]),
                (2, ZEROS[1], 2, ZEROS[3]),
                (2, ZEROS[3], 2, DDP),
                (4, DDP, 2, ZEROS[2]),
            )
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(
    ranks: int, saved: dict[str, Any], others: int, resumed: dict[str, Any], make_job: MakeJob, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    whole = losses(run(saving(with_layout(make_job(world_size=ranks, sharding="none"), **saved), place)))
    shutil.rmtree(place / f"step-{STEPS:08d}")
    job = with_layout(make_job(world_size=others, sharding="none"), **resumed)
    found = losses(run(saving(job, place, mode="bounded")))
    assert found == pytest.approx(whole, rel=2e-6)
    assert found[: STEPS - 2] == whole[: STEPS - 2], "what was done before is kept as it was"


@pytest.mark.needs("deepspeed")
def test_masters_start_from_weights_that_nobody_rounded(make_job: MakeJob, tmp_path: Path) -> None:
    """A rate that moves nothing but zeros leaves in the checkpoint what the masters started from."""
    still = Optimizer(learning_rate=1e-30, warmup_steps=1, decay_steps=STEPS, gradient_clip=1.0)
    weights = []
    settings: dict[str, Any] = {"precision": "bf16", "steps": 2, "warmup_steps": 1, "optimizer": still}
    for name, layout in {"ddp": DDP, "zero": ZEROS[1]}.items():
        job = make_job(world_size=1, sharding="none", **settings)
        run(saving(with_layout(job, **layout), tmp_path / name))
        found = digests(tmp_path / name, 2)
        names = [name for name in found if name.startswith(MODEL) and name.endswith(".weight")]
        weights.append({name: found[name] for name in names})
    assert weights[0] == weights[1]


@pytest.mark.trials
@pytest.mark.needs("deepspeed")
def test_the_same_layout_goes_on_bit_for_bit(make_job: MakeJob, tmp_path: Path) -> None:
    place = tmp_path / "place"
    job = with_layout(make_job(world_size=2, sharding="none"), zero=1)
    whole = losses(run(saving(job, place)))
    last = digests(place, STEPS)
    shutil.rmtree(place / f"step-{STEPS:08d}")
    again = with_layout(make_job(world_size=2, sharding="none"), zero=1)
    assert losses(run(saving(again, place))) == whole
    assert digests(place, STEPS) == last
    config = json.loads((Path(again.out) / "ds_config.json").read_text())
    assert config["zero_optimization"]["stage"] == 1
