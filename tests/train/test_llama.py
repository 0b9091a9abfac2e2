"""Llama against its published sizes and against transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from twinrun.protocol.models import members
from twinrun.protocol.models.llama import LLAMA, LlamaShape
from twinrun.train import attention
from twinrun.train.models import IGNORED
from twinrun.train.models.llama import Llama, frequencies

PUBLISHED = ("llama-1b", "llama-3b", "llama-8b", "llama-70b", "llama-405b")
SMALL = LlamaShape(
    width=32, heads=4, groups=2, layers=3, hidden=48, tied=True, rope_factor=8, vocabulary=61, sequence=24
)
# Features of a head in tests of members whose blocks are larger than the memory of a small machine.
NARROW = 16


def member(name: str) -> LlamaShape:
    shape = members()[name]
    assert isinstance(shape, LlamaShape)
    return shape


def reduced(name: str) -> LlamaShape:
    """Return one block of a member, at most 3,072 features wide, with its heads, groups and rotations."""
    shape = member(name)
    sizes: dict[str, Any] = {"layers": 1, "vocabulary": 320, "sequence": 96}
    if shape.width > 3072:
        sizes |= {"width": NARROW * shape.heads, "hidden": NARROW * shape.hidden // shape.head_size()}
    return shape.model_copy(update=sizes)


def config_of(shape: LlamaShape) -> Any:
    keys = LLAMA.config(shape.model_dump())
    fixed = {key: value for key, (value, _) in LLAMA.fixed.items()}
    return transformers.LlamaConfig(**keys, **fixed)


def pair(shape: LlamaShape) -> tuple[Llama, Any]:
    """Return our model and theirs with the same weights, norms included."""
    ours = Llama(shape)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1, generator=draw)
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config_of(shape))
    named = {
        name if name.startswith("lm_head") else f"model.{name}": one for name, one in ours.named_parameters()
    }
    named.setdefault("lm_head.weight", ours.embed_tokens.weight)
    theirs.load_state_dict(named, assign=True)
    # Frequencies are no weights: made on the meta device, they have no values.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    return ours, theirs.eval()


def batch(shape: LlamaShape, rows: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(7)
    tokens_BS = torch.randint(shape.vocabulary, (rows, shape.sequence), generator=draw)
    targets_BS = tokens_BS.roll(-1, dims=1)
    targets_BS[:, -1] = IGNORED
    return tokens_BS, targets_BS


@pytest.mark.parametrize("name", [*PUBLISHED, "llama-smoke"])
def test_parameters_are_those_of_transformers(name: str) -> None:
    shape = member(name)
    with torch.device("meta"):
        ours, theirs = Llama(shape), transformers.LlamaForCausalLM(config_of(shape))
    assert sum(one.numel() for one in ours.parameters()) == shape.parameters() == theirs.num_parameters()


@pytest.mark.parametrize("name", [*PUBLISHED, "llama-smoke"])
def test_logits_and_loss_are_those_of_transformers(name: str) -> None:
    shape = reduced(name)
    ours, theirs = pair(shape)
    tokens_BS, targets_BS = batch(shape)
    with torch.no_grad():
        logits, expected = ours(tokens_BS), theirs(tokens_BS, labels=tokens_BS)
        loss = ours(tokens_BS, targets_BS)
    scale = expected.logits.abs().max()
    assert (logits - expected.logits).abs().max() / scale < 1e-5
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("factor", [1, 8, 32])
def test_frequencies_are_those_of_transformers(name: str, factor: int) -> None:
    shape = member(name).model_copy(update={"rope_factor": factor})
    config = config_of(shape)
    kind = "llama3" if factor > 1 else "default"
    if kind in ROPE_INIT_FUNCTIONS:
        expected, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        torch.testing.assert_close(frequencies(shape), expected, rtol=1e-6, atol=0)


def test_gradients_are_those_of_transformers() -> None:
    ours, theirs = pair(SMALL)
    tokens_BS, targets_BS = batch(SMALL)
    ours(tokens_BS, targets_BS).backward()
    found = {name: one.grad.clone() for name, one in ours.named_parameters() if one.grad is not None}
    ours.zero_grad()
    # The weights are the same tensors.
    theirs(tokens_BS, labels=tokens_BS).loss.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sdpa", "math"])
def test_grouped_heads_attend_as_repeated_ones(name: str) -> None:
    q_BSHE, k_BSGE, v_BSGE = (torch.randn(2, 12, heads, 8) for heads in (6, 2, 2))
    attend = attention.chosen(name)
    k_BSHE, v_BSHE = (one.repeat_interleave(3, dim=2) for one in (k_BSGE, v_BSGE))
    torch.testing.assert_close(attend(q_BSHE, k_BSGE, v_BSGE, None), attend(q_BSHE, k_BSHE, v_BSHE, None))


class ProductCounter(TorchDispatchMode):
    """Counts products that are computed, by shape; what a checkpoint has kept does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.shapes[(*args[0].shape, args[1].shape[1])] += 1
        return func(*args, **(kwargs or {}))


def test_every_second_product_of_a_block_is_computed_again() -> None:
    again = {}
    for checkpointing in (False, "selective", "selective-alternate"):
        model = Llama(SMALL, checkpointing=checkpointing)
        model.initialise(3)
        loss = model.layers[0](torch.randn(2, SMALL.sequence, SMALL.width)).square().mean()
        with ProductCounter() as products:
            loss.backward()
        again[checkpointing] = products.shapes
    assert again["selective"] == again[False]
    # Of q, k, v, o, gate, up and down: the second, fourth and sixth.
    rows, shared = 2 * SMALL.sequence, SMALL.groups * SMALL.head_size()
    outputs = [shared, SMALL.width, SMALL.hidden]
    assert again["selective-alternate"] - again[False] == Counter((rows, SMALL.width, one) for one in outputs)
