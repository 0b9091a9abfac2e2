"""The model families, each small: against published sizes, against transformers, and by other ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, softplus
from torch.utils._python_dispatch import TorchDispatchMode
from twinrun_mamba import compile as compiler
from twinrun_mamba.launch import launcher

from twinrun.foundation.errors import InputError, MachineError
from twinrun.parity import Tracer, renumber
from twinrun.parity.traces import read_trace
from twinrun.protocol.models import members
from twinrun.protocol.models.llama import LLAMA as LLAMA_FORM
from twinrun.protocol.models.llama import LlamaShape
from twinrun.protocol.models.mamba import MambaShape
from twinrun.protocol.models.mpt import MptShape
from twinrun.train import layers
from twinrun.train.models import IGNORED
from twinrun.train.models.llama import Llama
from twinrun.train.models.mamba import Mamba
from twinrun.train.models.mpt import MPT

# Sizes that are no multiples of one another.
MPT_SHAPE = MptShape(width=32, heads=4, layers=2, vocabulary=61, sequence=24)
MAMBA = MambaShape(width=28, layers=2, vocabulary=61, sequence=23, rank=3, states=5, convolution=3)
LLAMA = LlamaShape(
    width=32, heads=4, groups=2, layers=3, hidden=48, tied=True, rope_factor=8, vocabulary=61, sequence=24
)
FAMILIES: dict[str, tuple[Callable[..., Any], Any]] = {
    "mpt": (MPT, MPT_SHAPE),
    "mpt-experts": (MPT, MPT_SHAPE.model_copy(update={"experts": 4})),
    "mamba": (partial(Mamba, kernels="reference"), MAMBA),
    "llama-tied": (Llama, LLAMA),
    "llama-untied": (Llama, LLAMA.model_copy(update={"tied": False})),
}
# github:mosaicml/llm-foundry@2e852dbf80fd, scripts/train/benchmarking/README.md; Mambaoutai's publication.
PUBLISHED = {
    "mpt-125m": 125311488,
    "mpt-350m": 355985408,
    "mpt-760m": 760470528,
    "mpt-1b": 1315950592,
    "mpt-3b": 2651837440,
    "mpt-7b": 6658859008,
    "mpt-13b": 12853954560,
    "mpt-30b": 29975214080,
    "mpt-70b": 64862437376,
    "mambaoutai": 1622361216,
}
LLAMAS = ("llama-1b", "llama-3b", "llama-8b", "llama-70b", "llama-405b", "llama-smoke")
MAKERS: dict[str, Callable[[Any], nn.Module]] = {
    "mpt": MPT,
    "mamba": partial(Mamba, kernels="reference"),
    "llama": Llama,
}
every_family = pytest.mark.parametrize("family", FAMILIES)
# Dynamo of PyTorch 2.7 instantiates the autograd function it traces.
dynamo_warns = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def small(family: str, *, seed: int = 3, **options: Any) -> Any:
    make, shape = FAMILIES[family]
    model = make(shape, **options)
    model.initialise(seed)
    return model


def batch(family: str) -> tuple[Tensor, Tensor]:
    return drawn(FAMILIES[family][1], rows=3)


def drawn(shape: Any, rows: int = 2) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(shape.vocabulary, (rows, shape.sequence), generator=draw)
    targets_BS = tokens_BS.roll(-1, dims=1)
    targets_BS[:, -1] = IGNORED
    return tokens_BS, targets_BS


def gradients(family: str, model: nn.Module) -> dict[str, Tensor]:
    model(*batch(family)).backward()
    found = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return found


class Calls(TorchDispatchMode):
    """Counts what is computed; what a checkpoint has kept does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()
        self.products: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        if func is torch.ops.aten.mm.default:
            self.products[(*args[0].shape, args[1].shape[1])] += 1
        return func(*args, **(kwargs or {}))


@every_family
def test_loss_with_targets_is_the_mean_cross_entropy_of_the_logits(family: str) -> None:
    model, (tokens_BS, targets_BS) = small(family), batch(family)
    expected = cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())
    torch.testing.assert_close(model(tokens_BS, targets_BS), expected)


@every_family
@pytest.mark.parametrize("checkpointing", [True, "selective", "selective-alternate"])
def test_recomputed_blocks_have_the_same_gradients(family: str, checkpointing: Any) -> None:
    kept = gradients(family, small(family))
    for name, gradient in gradients(family, small(family, checkpointing=checkpointing)).items():
        torch.testing.assert_close(gradient, kept[name])


@every_family
def test_initial_weights_depend_on_the_seed_alone(family: str) -> None:
    torch.manual_seed(1)
    first = small(family).state_dict()
    torch.manual_seed(2)
    second, other = small(family).state_dict(), small(family, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_family
def test_renumbered_features_are_the_same_function_in_other_sums(family: str) -> None:
    whole, other = small(family), small(family)
    order = renumber(other, 1, samples=False)
    for name, one in whole.named_parameters():
        changed = any(side is not None for side in order.get(name, ()))
        # Biases and some states are all alike.
        assert changed or torch.equal(one, other.get_parameter(name)), name
    assert order
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


@every_family
def test_a_control_run_and_recomputed_blocks_have_the_digests_of_the_run(family: str, tmp_path: Path) -> None:
    traces = []
    for name, number, recomputing in (("run", 0, False), ("control", 1, False), ("recomputed", 0, True)):
        model = small(family, checkpointing=recomputing)
        order = renumber(model, number, samples=False) if number else None
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


@pytest.mark.parametrize("name", [*PUBLISHED, *LLAMAS])
def test_parameters_are_the_published_count(name: str) -> None:
    shape: Any = members()[name]
    with torch.device("meta"):
        model = MAKERS[shape.family](shape)
        llama = transformers.LlamaForCausalLM(config_of(shape)) if name in LLAMAS else None
    published = llama.num_parameters() if llama else PUBLISHED[name]
    assert sum(one.numel() for one in model.parameters()) == shape.parameters() == published


@dynamo_warns
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("family", ["mpt", "llama-tied"])
def test_compiled_equals_eager(family: str, *, whole: bool) -> None:
    eager, model = gradients(family, small(family)), small(family)
    model.compile_whole() if whole else model.compile_regions()
    for name, gradient in gradients(family, model).items():
        torch.testing.assert_close(gradient, eager[name], rtol=1e-4, atol=1e-6)


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


def test_the_shared_gelu_is_exact_to_fp32_in_value_and_gradient() -> None:
    x, results = torch.linspace(-12, 12, 10_001), []
    # The library's own error in fp32 is larger than ours: hold both against fp64.
    for function, dtype in ((gelu, torch.float64), (layers.shared_gelu, torch.float32)):
        leaf = x.detach().to(dtype).requires_grad_()
        y = function(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad))
    for exact, shared in zip(*results, strict=True):
        torch.testing.assert_close(shared, exact, rtol=0, atol=5e-7, check_dtype=False)
    assert layers.shared_gelu(torch.ones(3, dtype=torch.bfloat16)).dtype is torch.bfloat16


# Llama.
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
    keys = LLAMA_FORM.config(shape.model_dump())
    fixed = {key: value for key, (value, _) in LLAMA_FORM.fixed.items()}
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


@pytest.mark.parametrize("name", LLAMAS)
def test_logits_and_loss_are_those_of_transformers(name: str) -> None:
    shape = reduced(name)
    ours, theirs = pair(shape)
    tokens_BS, targets_BS = drawn(shape)
    with torch.no_grad():
        logits, expected = ours(tokens_BS), theirs(tokens_BS, labels=tokens_BS)
        loss = ours(tokens_BS, targets_BS)
    scale = expected.logits.abs().max()
    assert (logits - expected.logits).abs().max() / scale < 1e-5
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=0)


def test_gradients_are_those_of_transformers() -> None:
    ours, theirs = pair(LLAMA)
    tokens_BS, targets_BS = drawn(LLAMA)
    ours(tokens_BS, targets_BS).backward()
    found = {name: one.grad.clone() for name, one in ours.named_parameters() if one.grad is not None}
    ours.zero_grad()
    # The weights are the same tensors.
    theirs(tokens_BS, labels=tokens_BS).loss.backward()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_every_second_product_of_a_block_is_computed_again() -> None:
    again = {}
    for checkpointing in (False, "selective", "selective-alternate"):
        model: Any = small("llama-tied", checkpointing=checkpointing)
        loss = model.layers[0](torch.randn(2, LLAMA.sequence, LLAMA.width)).square().mean()
        with Calls() as calls:
            loss.backward()
        again[checkpointing] = calls.products
    assert again["selective"] == again[False]
    # Of q, k, v, o, gate, up and down: the second, fourth and sixth.
    rows, shared = 2 * LLAMA.sequence, LLAMA.groups * LLAMA.head_size()
    outputs = [shared, LLAMA.width, LLAMA.hidden]
    assert again["selective-alternate"] - again[False] == Counter((rows, LLAMA.width, one) for one in outputs)


# Mamba.
LAYOUTS = ("token-major", "channel-first")
OURS: list[dict[str, Any]] = [
    {"layout": layout, "checkpointing": checkpointing}
    for layout in LAYOUTS
    for checkpointing in (False, True, "selective")
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers(layout: str) -> None:
    config = transformers.MambaConfig(
        vocab_size=MAMBA.vocabulary,
        hidden_size=MAMBA.width,
        state_size=MAMBA.states,
        num_hidden_layers=MAMBA.layers,
        conv_kernel=MAMBA.convolution,
        time_step_rank=MAMBA.rank,
        tie_word_embeddings=False,
    )
    reference = transformers.MambaForCausalLM(config).eval()
    model = small("mamba", layout=layout)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms too: at their initial values a swapped pair would go unnoticed.
            parameter.add_(torch.randn_like(parameter) * 0.1)
        reference.load_state_dict(
            {
                name if name.startswith("lm_head.") else f"backbone.{name}": one
                for name, one in model.state_dict().items()
            }
        )
    tokens_BS, _ = batch("mamba")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BS), reference(tokens_BS).logits, atol=1e-5, rtol=0)


def test_loss_weighs_positions_where_asked() -> None:
    tokens_BS, targets_BS = batch("mamba")
    losses_BS = cross_entropy(small("mamba")(tokens_BS).transpose(1, 2), targets_BS, reduction="none")
    weights_BS = torch.tanh(torch.arange(1, MAMBA.sequence + 1) / 10) * (targets_BS >= 0)
    expected = (losses_BS * weights_BS).sum() / weights_BS.sum()
    torch.testing.assert_close(small("mamba", position_scale=10)(tokens_BS, targets_BS), expected)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels of the recipes in their emulation."""
    if missing := compiler.build(["cpu"], say=lambda _: None):
        pytest.skip(missing["cpu"])
    monkeypatch.setenv("TWINRUN_MAMBA_BACKEND", "emulated-32")
    launcher.cache_clear()
    yield
    launcher.cache_clear()


@dynamo_warns
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", [OURS[0], OURS[2], OURS[3]], ids=str)
def test_a_model_with_our_kernels_is_one_graph(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compile_whole and compile_regions ask for, but for the code that a compiler would make of it."""
    torch._dynamo.reset()
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **how: made(*given, **how, backend="aot_eager"))
    expected, model = gradients("mamba", small("mamba")), small("mamba", kernels="ours", **options)
    model.compile_regions()
    for name, gradient in gradients("mamba", model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)
    whole = small("mamba", kernels="ours", **options)
    whole.compile_whole()
    for name, gradient in gradients("mamba", whole).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_initial_values_are_those_of_mamba_ssm() -> None:
    shape = MambaShape(width=256, layers=3, vocabulary=2000, sequence=8, rank=16)
    model = Mamba(shape, kernels="reference")
    model.initialise(1)
    mixer, channels = model.blocks[1].mixer, shape.channels
    torch.testing.assert_close(mixer.A_log[7], torch.log(torch.arange(1.0, 17.0)))
    assert model.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for weight, bound in (
        (mixer.in_proj.weight, 256**-0.5),
        (mixer.x_proj.weight, channels**-0.5),
        (mixer.dt_proj.weight, 16**-0.5),
        (mixer.out_proj.weight, (channels * shape.layers) ** -0.5),
        (mixer.conv1d.weight, 0.5),
        (mixer.conv1d.bias, 0.5),
        (model.lm_head.weight, 256**-0.5),
    ):
        assert bound * 0.95 < weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    steps = softplus(mixer.dt_proj.bias)
    assert 1e-3 * 0.999 <= steps.min() < 1.2e-3
    assert 0.085 < steps.max() <= 0.1001
    again = Mamba(shape, kernels="reference")
    again.initialise(1)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kernels": None}, "kernels: a state-space model needs kernels"),
        ({"kernels": "theirs"}, "found: theirs\n  allowed: ours, upstream, reference"),
        ({"layout": "row-major"}, "allowed: token-major, channel-first"),
        ({"dtype": torch.float64}, r"precision: .*\n  found: torch.float64\n  allowed: torch.float32"),
    ],
)
def test_settings_that_do_not_exist_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        small("mamba", **options)


def test_kernels_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("ours", "twinrun_mamba"), ("upstream", "causal_conv1d")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(MachineError, match=f"found: {name}") as error:
            small("mamba", kernels=name)
        assert error.value.hint
