"""A model of transformers with our functions in place of upstream's: the ways that it takes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import twinrun_mamba
from torch import Tensor
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba import modeling_mamba

SMALL = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=16, time_step_rank=4)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Switch as the package's README says, and let models on a CPU go the GPU's way, emulated."""
    for name in ("selective_scan_fn", "selective_state_update", "mamba_inner_fn"):
        monkeypatch.setattr(modeling_mamba, name, getattr(twinrun_mamba, name))
    convolutions = (twinrun_mamba.causal_conv1d_update, twinrun_mamba.causal_conv1d_fn)
    monkeypatch.setattr(modeling_mamba, "_causal_conv1d_cache", convolutions)
    monkeypatch.setattr(modeling_mamba.MambaMixer, "forward", modeling_mamba.MambaMixer.cuda_kernels_forward)
    monkeypatch.setenv("TWINRUN_MAMBA_BACKEND", "emulated-32")


def model_and_tokens() -> tuple[Any, Tensor]:
    """Return the same small model and tokens each time."""
    torch.manual_seed(0)
    return MambaForCausalLM(SMALL), torch.randint(0, SMALL.vocab_size, (2, 37))


def trained() -> dict[str, Tensor]:
    """Return loss and gradients of one step."""
    model, tokens = model_and_tokens()
    loss = model.train()(tokens, labels=tokens).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: weight.grad for name, weight in model.named_parameters()}


def generated() -> Tensor:
    """Return the logits behind each of some more tokens: a prompt in one go, then step by step."""
    model, tokens = model_and_tokens()
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.eval().generate(tokens[:, :9], **given).logits)


def test_training_is_that_of_its_own_operations(request: pytest.FixtureRequest) -> None:
    expected = trained()
    request.getfixturevalue("ours")
    torch.testing.assert_close(trained(), expected, rtol=1e-4, atol=1e-6)


def test_generation_is_that_of_its_own_operations(request: pytest.FixtureRequest) -> None:
    expected = generated()
    request.getfixturevalue("ours")
    torch.testing.assert_close(generated(), expected, rtol=1e-4, atol=1e-5)
