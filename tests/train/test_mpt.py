"""MPT against its published sizes, against GPT-2 of transformers, and against plain formulas."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from twinrun.protocol.models import members
from twinrun.protocol.models.mpt import PRODUCT_BYTES_PER_FEATURE, MptShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.train import layers
from twinrun.train.models import IGNORED
from twinrun.train.models.mpt import MPT

# github:mosaicml/llm-foundry@2e852dbf80fd, scripts/train/benchmarking/README.md
FAMILY = {
    "mpt-125m": 125311488,
    "mpt-350m": 355985408,
    "mpt-760m": 760470528,
    "mpt-1b": 1315950592,
    "mpt-3b": 2651837440,
    "mpt-7b": 6658859008,
    "mpt-13b": 12853954560,
    "mpt-30b": 29975214080,
    "mpt-70b": 64862437376,
}
SMALL = MptShape(width=32, heads=4, layers=2, vocabulary=61, sequence=24)


def small(**options: Any) -> MPT:
    model = MPT(SMALL, **options)
    model.initialise(3)
    return model


def batch(rows: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(SMALL.vocabulary, (rows, SMALL.sequence), generator=draw)
    targets_BS = tokens_BS.roll(-1, dims=1)
    targets_BS[:, -1] = IGNORED
    return tokens_BS, targets_BS


def gradients(model: MPT) -> dict[str, Tensor]:
    tokens_BS, targets_BS = batch()
    model(tokens_BS, targets_BS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "published"), FAMILY.items())
def test_parameters_are_the_published_count(name: str, published: int) -> None:
    shape = members()[name]
    assert isinstance(shape, MptShape)
    with torch.device("meta"):
        model = MPT(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert shape.parameters() == published


def test_logits_equal_those_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=SMALL.vocabulary,
        n_positions=SMALL.sequence,
        n_embd=SMALL.width,
        n_layer=SMALL.layers,
        n_head=SMALL.heads,
        activation_function="gelu",
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too: at their initial values a swapped pair would go unnoticed.
            parameter.add_(torch.randn_like(parameter) * 0.1)
        copy_to_gpt2(model, reference.transformer)
    tokens_BS, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BS), reference(tokens_BS).logits, atol=1e-5, rtol=0)


def test_parameters_have_the_names_of_upstream() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=61, no_bias=True)
    theirs = transformers.MptForCausalLM(config).transformer.state_dict().keys()
    # Theirs has ALiBi in place of positions, and no biases.
    assert {name for name in small().state_dict() if name != "wpe.weight" and "bias" not in name} == theirs


def copy_to_gpt2(model: MPT, reference: nn.Module) -> None:
    pairs = [(model.norm_f, reference.ln_f)]
    for ours, theirs in zip(model.blocks, reference.h, strict=True):
        pairs += [(ours.norm_1, theirs.ln_1), (ours.norm_2, theirs.ln_2)]
        pairs += [(ours.attn.Wqkv, theirs.attn.c_attn), (ours.attn.out_proj, theirs.attn.c_proj)]
        pairs += [(ours.ffn.up_proj, theirs.mlp.c_fc), (ours.ffn.down_proj, theirs.mlp.c_proj)]
    reference.wte.weight.copy_(model.wte.weight)
    assert model.wpe is not None
    reference.wpe.weight.copy_(model.wpe.weight)
    for ours, theirs in pairs:
        # GPT-2 keeps its affine maps transposed.
        theirs.weight.copy_(ours.weight.T if ours.weight.dim() == 2 else ours.weight)
        theirs.bias.copy_(ours.bias)


@pytest.mark.parametrize("chunk", [7, 48, 1000])
def test_chunked_loss_has_the_plain_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "CHUNK_TOKENS", chunk)
    hidden_BSD, weight_VD = torch.randn(3, 16, 16), torch.randn(61, 16)
    targets_BS = torch.randint(61, (3, 16))
    targets_BS[:, ::5] = IGNORED
    results = []

    def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())

    for loss_of in (layers.head_loss, plain_loss):
        hidden, weight = hidden_BSD.clone().requires_grad_(), weight_VD.clone().requires_grad_()
        loss = loss_of(hidden, weight, targets_BS)
        (2.5 * loss).backward()
        results.append((loss.detach(), hidden.grad, weight.grad))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def test_fused_attention_equals_the_formula() -> None:
    fused, written = gradients(small()), gradients(small(attention="math"))
    for name, gradient in fused.items():
        torch.testing.assert_close(gradient, written[name], rtol=1e-4, atol=1e-6)


# Dynamo of PyTorch 2.7 instantiates the autograd function it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_selective_checkpointing_keeps_what_its_estimate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is kept is decided before any code is made, which takes most of the time.
    decided = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", decided)
    kept = {checkpointing: kept_by_a_block(checkpointing) for checkpointing in (False, "selective")}
    # The statistics of the norms and of attention are fp32, a few numbers a token and head.
    # This backend keeps 4 for what enters and what projects attention; peaks on GPUs ask for 1 of them.
    assert kept["selective"] == pytest.approx(PRODUCT_BYTES_PER_FEATURE + 3, rel=0.04)
    assert kept["selective"] < 0.7 * kept[False]


def kept_by_a_block(checkpointing: ActivationCheckpointing) -> float:
    """Return the bytes that a compiled block keeps for its backward pass, per token and feature of bf16."""
    torch._dynamo.reset()
    shape = MptShape(width=256, heads=2, layers=1, vocabulary=8, sequence=64)
    model = MPT(shape, checkpointing=checkpointing, dtype=torch.bfloat16).bfloat16()
    model.compile_regions()
    x_BSD = torch.ones(2, shape.sequence, shape.width, dtype=torch.bfloat16, requires_grad=True)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.blocks[0](x_BSD).sum().backward()
    return float(sum(kept.values()) / x_BSD.numel())


# Dynamo of PyTorch 2.7 instantiates the autograd function it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_equals_eager(*, whole: bool) -> None:
    eager, model = gradients(small()), small()
    model.compile_whole() if whole else model.compile_regions()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


def test_initial_weights_follow_the_published_distribution() -> None:
    shape = MptShape(width=256, heads=4, layers=8, vocabulary=320, sequence=64)
    model = MPT(shape)
    model.initialise(1)
    plain, residual = (2 / 256) ** 0.5, (2 / 1024) ** 0.5 / 4
    up, down = model.blocks[3].ffn.up_proj, model.blocks[3].ffn.down_proj
    assert up.weight.std().item() == pytest.approx(plain, rel=0.01)
    assert up.weight.mean().item() == pytest.approx(0, abs=plain / 100)
    assert down.weight.std().item() == pytest.approx(residual, rel=0.01)
    assert up.bias.abs().max() == 0
    assert model.norm_f.weight.min() == 1
    # Hashed numbers must not repeat between parameters: 5 sigma of an empty correlation.
    other = model.blocks[4].ffn.up_proj.weight
    correlation = torch.corrcoef(torch.stack([up.weight.flatten(), other.flatten()]))[0, 1]
    assert abs(correlation.item()) < 5 / up.weight.numel() ** 0.5
