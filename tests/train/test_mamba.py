"""Mamba against its published size, against transformers, and against itself by other ways."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from twinrun_mamba import compile as compiler
from twinrun_mamba.launch import launcher

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import validate
from twinrun.protocol.models import members
from twinrun.protocol.models.mamba import MambaShape
from twinrun.train.models import IGNORED
from twinrun.train.models.mamba import Mamba

# A width that is no multiple of 8, a rank and numbers of states and taps that differ.
SMALL = MambaShape(width=28, layers=2, vocabulary=61, sequence=23, rank=3, states=5, convolution=3)
LAYOUTS = ("token-major", "channel-first")


def small(**options: Any) -> Mamba:
    model = Mamba(SMALL, **({"kernels": "reference"} | options))
    model.initialise(3)
    return model


def batch(rows: int = 3, sequence: int = SMALL.sequence) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(SMALL.vocabulary, (rows, sequence), generator=draw)
    targets_BS = tokens_BS.roll(-1, dims=1)
    targets_BS[:, -1] = IGNORED
    return tokens_BS, targets_BS


def gradients(model: Mamba) -> dict[str, Tensor]:
    tokens_BS, targets_BS = batch()
    model(tokens_BS, targets_BS).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_parameters_are_the_published_count() -> None:
    shape = members()["mambaoutai"]
    assert isinstance(shape, MambaShape)
    with torch.device("meta"):
        model = Mamba(shape, kernels="reference")
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_622_361_216
    assert shape.parameters() == 1_622_361_216


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_those_of_transformers(layout: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=SMALL.vocabulary,
        hidden_size=SMALL.width,
        state_size=SMALL.states,
        num_hidden_layers=SMALL.layers,
        conv_kernel=SMALL.convolution,
        time_step_rank=SMALL.rank,
        tie_word_embeddings=False,
    )
    reference = transformers.MambaForCausalLM(config).eval()
    model = small(layout=layout)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms too: at their initial values a swapped pair would go unnoticed.
            parameter.add_(torch.randn_like(parameter) * 0.1)
        reference.load_state_dict({upstream_name(name): one for name, one in model.state_dict().items()})
    tokens_BS, _ = batch()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BS), reference(tokens_BS).logits, atol=1e-5, rtol=0)


def upstream_name(name: str) -> str:
    return name if name.startswith("lm_head.") else f"backbone.{name}"


def test_a_single_token_has_logits_and_no_loss() -> None:
    model, (tokens_BS, _) = small(), batch(sequence=1)
    assert model(tokens_BS).shape == (3, 1, SMALL.vocabulary)
    with pytest.raises(InputError, match=r"tokens: wrong shape\n  found: 3, 1"):
        model(tokens_BS, tokens_BS)


def test_loss_weighs_positions_where_asked() -> None:
    tokens_BS, targets_BS = batch()
    losses_BS = cross_entropy(small()(tokens_BS).transpose(1, 2), targets_BS, reduction="none")
    weights_BS = torch.tanh(torch.arange(1, SMALL.sequence + 1) / 10) * (targets_BS >= 0)
    expected = (losses_BS * weights_BS).sum() / weights_BS.sum()
    torch.testing.assert_close(small(position_scale=10)(tokens_BS, targets_BS), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "channel-first"},
        {"checkpointing": "selective", "layout": "channel-first"},
    ],
    ids=str,
)
def test_how_it_is_computed_changes_no_gradient(options: dict[str, Any]) -> None:
    expected = gradients(small())
    assert len(expected) == len(list(small().parameters()))
    for name, gradient in gradients(small(**options)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


class Calls(TorchDispatchMode):
    """Counts what is computed; what a checkpoint has kept does not come here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the kernels of the recipes in their emulation."""
    if missing := compiler.build(["cpu"], say=lambda _: None):
        pytest.skip(missing["cpu"])
    monkeypatch.setenv("TWINRUN_MAMBA_BACKEND", "emulated-32")
    launcher.cache_clear()
    yield
    launcher.cache_clear()


OURS: list[dict[str, Any]] = [
    {"layout": layout, "checkpointing": checkpointing}
    for layout in LAYOUTS
    for checkpointing in (False, True, "selective")
]


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", OURS, ids=str)
def test_our_kernels_give_the_gradients_of_the_reference(options: dict[str, Any]) -> None:
    expected = gradients(small())
    for name, gradient in gradients(small(kernels="ours", **options)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


# Of torch's own making.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("options", [OURS[0], OURS[2], OURS[3]], ids=str)
def test_a_model_with_our_kernels_is_one_graph(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As compile_whole and compile_regions ask for, but for the code that a compiler would make of it."""
    torch._dynamo.reset()
    made = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **how: made(*given, **how, backend="aot_eager"))
    expected, model = gradients(small()), small(kernels="ours", **options)
    model.compile_regions()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)
    whole = small(kernels="ours", **options)
    whole.compile_whole()
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_stays_compiled_beside_kernels_that_break_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch._dynamo.reset()
    runs = Counter[str]()
    made = torch.compile
    first, second = small(), small()
    breaking = second.kernels._replace(
        convolve=torch.compiler.disable(second.kernels.convolve),
        scan=torch.compiler.disable(second.kernels.scan),
        traced=False,
    )
    second.kernels = breaking
    for block in second.blocks:
        block.mixer.kernels = breaking
    for name, model in {"first": first, "second": second}.items():
        monkeypatch.setattr(torch, "compile", partial(made, backend=counted(name, runs)))
        model.compile_whole()
        model(*batch())
    assert runs["second"] >= len(second.blocks)
    before = runs["first"]
    torch.testing.assert_close(first(*batch()), second(*batch()))
    assert runs["first"] == before + 1


def counted(name: str, runs: Counter[str]) -> Any:
    """Return a backend of torch.compile that runs graphs as they are and counts under a name."""

    def backend(graph: Any, _examples: Any) -> Any:
        def run(*given: Any) -> Any:
            runs[name] += 1
            return graph(*given)

        return run

    return backend


def test_selective_checkpointing_keeps_products_alone() -> None:
    products, scans = [], []
    for checkpointing in (False, True, "selective"):
        model, (tokens_BS, targets_BS) = small(checkpointing=checkpointing), batch()
        loss = model(tokens_BS, targets_BS)
        with Calls() as calls:
            loss.backward()
        products.append(calls.counts[torch.ops.aten.mm.default])
        scans.append(calls.counts[torch.ops.aten.softplus.default])
    # The scan runs again where blocks are recomputed; products do in whole blocks alone.
    assert [count > 0 for count in scans] == [False, True, True]
    assert products[0] == products[2] < products[1]


def test_layers_compute_in_bf16_and_parameters_have_their_own_type() -> None:
    tokens_BS, targets_BS = batch()
    wide = small(dtype=torch.bfloat16)
    narrow = small(dtype=torch.bfloat16, parameter_type=torch.bfloat16)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}
    assert narrow(tokens_BS).dtype is torch.bfloat16
    exact = small()(tokens_BS, targets_BS).item()
    for model in (wide, narrow):
        assert model(tokens_BS, targets_BS).item() == pytest.approx(exact, abs=0.02)


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
    steps = nn.functional.softplus(mixer.dt_proj.bias)
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
        small(**options)


@pytest.mark.parametrize("size", [(0, 4), (2, 0), (3,), (1, 2, 3)])
def test_tokens_of_a_wrong_shape_are_refused(size: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="tokens: wrong shape"):
        small()(torch.zeros(size, dtype=torch.int64))


def test_tokens_on_another_device_are_refused() -> None:
    tokens_BS, targets_BS = batch()
    with pytest.raises(
        InputError, match=r"targets: not the device of the model\n  found: meta\n  allowed: cpu"
    ):
        small()(tokens_BS, targets_BS.to("meta"))


@pytest.mark.parametrize(
    ("field", "value"), [("sequence", 1), ("states", 257), ("convolution", 1), ("width", 0), ("rank", 0)]
)
def test_sizes_that_no_kernel_takes_are_refused(field: str, value: int) -> None:
    with pytest.raises(InputError, match=field):
        validate({**SMALL.model_dump(), field: value}, MambaShape, place="recipe.toml")


def test_kernels_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in (("ours", "twinrun_mamba"), ("upstream", "causal_conv1d")):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(MachineError, match=f"found: {name}") as error:
            small(kernels=name)
        assert error.value.hint
