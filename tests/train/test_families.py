"""What holds for the models of every family, each small."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.train.test_llama import SMALL as LLAMA
from tests.train.test_mamba import SMALL as MAMBA
from tests.train.test_mpt import SMALL as MPT_SHAPE
from twinrun.parity import Tracer
from twinrun.parity.traces import read_trace
from twinrun.train.models import IGNORED
from twinrun.train.models.llama import Llama
from twinrun.train.models.mamba import Mamba
from twinrun.train.models.mpt import MPT

# Sizes that are no multiples of one another, from the tests of each family.
FAMILIES: dict[str, tuple[Callable[..., Any], Any]] = {
    "mpt": (MPT, MPT_SHAPE),
    "mpt-experts": (MPT, MPT_SHAPE.model_copy(update={"experts": 4})),
    "mamba": (partial(Mamba, kernels="reference"), MAMBA),
    "llama-tied": (Llama, LLAMA),
    "llama-untied": (Llama, LLAMA.model_copy(update={"tied": False})),
}

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def small(family: str, *, seed: int = 3, **options: Any) -> nn.Module:
    make, shape = FAMILIES[family]
    model: nn.Module = make(shape, **options)
    model.initialise(seed)
    return model


def batch(family: str, rows: int = 3) -> tuple[Tensor, Tensor]:
    shape, draw = FAMILIES[family][1], torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(shape.vocabulary, (rows, shape.sequence), generator=draw)
    targets_BS = tokens_BS.roll(-1, dims=1)
    targets_BS[:, -1] = IGNORED
    return tokens_BS, targets_BS


def gradients(family: str, model: nn.Module) -> dict[str, Tensor]:
    model(*batch(family)).backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return found


def test_the_future_does_not_reach_the_past(family: str) -> None:
    model, (tokens_BS, _) = small(family), batch(family)
    changed_BS = tokens_BS.clone()
    changed_BS[:, 10:] = (changed_BS[:, 10:] + 1) % FAMILIES[family][1].vocabulary
    with torch.no_grad():
        before, after = model(tokens_BS), model(changed_BS)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert (before[:, 10] - after[:, 10]).abs().max() > 1e-3


def test_loss_with_targets_is_the_mean_cross_entropy_of_the_logits(family: str) -> None:
    model, (tokens_BS, targets_BS) = small(family), batch(family)
    expected = cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())
    torch.testing.assert_close(model(tokens_BS, targets_BS), expected)


@pytest.mark.parametrize("checkpointing", [True, "selective", "selective-alternate"])
def test_recomputed_blocks_have_the_same_gradients(family: str, checkpointing: Any) -> None:
    kept = gradients(family, small(family))
    for name, gradient in gradients(family, small(family, checkpointing=checkpointing)).items():
        torch.testing.assert_close(gradient, kept[name])


def test_layers_compute_in_bf16_and_parameters_stay_fp32(family: str) -> None:
    model, (tokens_BS, targets_BS) = small(family, dtype=torch.bfloat16), batch(family)
    loss = model(tokens_BS, targets_BS)
    loss.backward()
    assert model(tokens_BS).dtype is torch.bfloat16
    assert loss.dtype is torch.float32
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert loss.item() == pytest.approx(small(family)(tokens_BS, targets_BS).item(), abs=0.02)


def test_initial_weights_depend_on_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    first = small(family).state_dict()
    torch.manual_seed(2)
    second, other = small(family).state_dict(), small(family, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_renumbered_features_are_the_same_function_in_other_sums(family: str) -> None:
    whole, other = small(family), small(family)
    other.renumber(1)
    width = FAMILIES[family][1].width
    across = [name for name, one in whole.named_parameters() if one.dim() == 2 and width in one.shape]
    assert across
    assert not [name for name in across if torch.equal(whole.get_parameter(name), other.get_parameter(name))]
    tokens_BS, targets_BS = batch(family)
    # Sums of MPT's larger weights differ by more.
    apart = 1e-5 if family.startswith("mpt") else 1e-6
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens_BS), other(tokens_BS), atol=apart, rtol=1e-5)
        assert not torch.equal(whole(tokens_BS), other(tokens_BS))
    # The first step changes both in the same way.
    for model in (whole, other):
        model(tokens_BS, targets_BS).backward()
    norms = [sum(float(one.grad.norm()) ** 2 for one in model.parameters()) for model in (whole, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_control_run_and_recomputed_blocks_have_the_digests_of_the_run(family: str, tmp_path: Path) -> None:
    traces = []
    for name, number, recomputing in (("run", 0, False), ("control", 1, False), ("recomputed", 0, True)):
        model = small(family, checkpointing=recomputing)
        order: Any = model.numbering(number) if number else None
        if number:
            model.renumber(number)
        tracer = Tracer(model, tmp_path / name, order=order)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with tracer.step():
                model(*batch(family)).backward()
            optimizer.step()
            optimizer.zero_grad()
        traces.append(read_trace(tmp_path / name).steps)
    run, *others = traces
    for other in others:
        assert other[2].keys() == run[2].keys()
        far = {
            name: max(abs(a - b) / max(abs(one[0]), 1e-3) for a, b in zip(one, other[2][name], strict=True))
            for name, one in run[2].items()
        }
        assert max(far.values()) < 1e-3, far
