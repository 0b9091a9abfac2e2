"""Finding the kernel by running it, ALiBi by its formula, and the loss curve of our own kernel."""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("composer")

import torch

from tests.ranks import environment, run_ranks
from tests.train.small import ROOT, SHAPE, TRAINING, MakeJob, job_file
from tests.train.test_scaling import run_here
from twinrun.execution.environment import package_folders
from twinrun.protocol.training import TrainingResult
from twinrun.train.attention import alibi_slopes, fused, written_out


@pytest.mark.parametrize("heads", [1, 8, 12, 40])
def test_slopes_are_those_of_mpt(heads: int) -> None:
    # github:mosaicml/llm-foundry@2e852dbf80fd:llmfoundry/models/layers/attention.py, gen_slopes
    count = 2 ** math.ceil(math.log2(heads))
    found = [1.0 / 2 ** (one * 8 / count) for one in range(1, count + 1)]
    wanted = found if count == heads else (found[1::2] + found[::2])[:heads]
    torch.testing.assert_close(alibi_slopes(heads), torch.tensor(wanted))


def test_alibi_lowers_scores_by_distance_and_slope() -> None:
    q_BSHE, k_BSHE, v_BSHE = torch.randn(3, 1, 9, 2, 8, dtype=torch.float64)
    slopes_H = torch.tensor([0.5, 0.25], dtype=torch.float64)
    wanted = torch.zeros_like(v_BSHE)
    for head, slope in enumerate(slopes_H.tolist()):
        for row in range(9):
            scores = k_BSHE[0, : row + 1, head] @ q_BSHE[0, row, head] / math.sqrt(8)
            weights = torch.softmax(scores - slope * torch.arange(row, -1, -1), 0)
            wanted[0, row, head] = weights @ v_BSHE[0, : row + 1, head]
    for function in (fused, written_out):
        found = function(q_BSHE, k_BSHE, v_BSHE, slopes_H)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not find_spec("triton"), reason="Triton's interpreter is not installed")
@pytest.mark.parametrize(("precision", "alibi"), [("fp32", True), ("bf16", None)])
def test_the_loss_curve_of_our_kernel_is_that_of_sdpa(
    precision: str, alibi: bool | None, make_job: MakeJob
) -> None:
    shape = SHAPE.model_copy(update={"alibi": alibi})
    settings = {"global_batch": 4, "microbatch": 2, "steps": 3, "precision": precision, "trainer": "plain"}
    job = make_job(shape=shape, attention="triton", **settings)
    # In processes of its own: Triton interprets where that was asked for before it was imported.
    done = run_ranks(TRAINING, "--job", str(job_file(job)), world_size=1, variables=with_kernels())
    assert done.returncode == 0, done.stderr
    ours = TrainingResult.model_validate_json((Path(job.out) / "result.json").read_bytes())
    sdpa = run_here(make_job(shape=shape, **settings))
    assert ours.attention_backend == "triton" != sdpa.attention_backend
    assert ours.parameters == sdpa.parameters == shape.parameters()
    # 16 bits of bf16 differ by 4e-3; the curves, means of many, by far less.
    assert losses(ours) == pytest.approx(losses(sdpa), rel=1e-5 if precision == "fp32" else 1e-3)


def losses(result: TrainingResult) -> list[float]:
    return [step.loss for step in result.steps]


def with_kernels() -> dict[str, str]:
    """Return the environment of ranks whose recipe names the kernels."""
    variables = environment()
    kernels = map(str, package_folders(ROOT, ["flash-attention"]))
    return variables | {"PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], *kernels])}
