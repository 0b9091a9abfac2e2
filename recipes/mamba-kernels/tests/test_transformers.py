"""Models of transformers with our functions in place of upstream's: the ways that they take on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pytest
import torch
import transformers
import twinrun_mamba
from torch import Tensor
from twinrun_mamba import InstallError, installation
from twinrun_mamba.launch import Launcher

RELEASE = tuple(map(int, version("transformers").split(".")[:2]))
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
STATES: dict[str, Any] = {**SIZES, "state_size": 16, "time_step_rank": 4}
# transformers 4.57 and 5.17 norm all channels together where they run no kernel, with kernels by group.
HEADS: dict[str, Any] = {**SIZES, "state_size": 16, "num_heads": 2, "head_dim": 32, "chunk_size": 16}
# Triton's interpreter takes its time.
HEADS |= {"num_hidden_layers": 1, "n_groups": 2 if RELEASE >= (5, 23) else 1}
# Configuration, model, and the module's name and mixer.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("Mamba", STATES, "MambaMixer"),
    "mamba2": ("Mamba2", HEADS, "Mamba2Mixer"),
}
if RELEASE >= (5, 17):
    MODELS["falcon_mamba"] = ("FalconMamba", STATES, "FalconMambaMixer")


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """Leave nothing installed."""
    yield
    twinrun_mamba.uninstall()


@pytest.fixture
def gpu_way(model: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> Callable[[], None]:
    """Install, let the model on a CPU go the GPU's way where the two differ, and emulate the kernels."""

    def switch() -> None:
        twinrun_mamba.install("transformers")
        mixer = getattr(_module(model), MODELS[model][2])
        if hasattr(mixer, "cuda_kernels_forward"):
            monkeypatch.setattr(mixer, "forward", mixer.cuda_kernels_forward)
        monkeypatch.setenv("TWINRUN_MAMBA_BACKEND", "emulated-32")

    return switch


def _module(model: str) -> Any:
    return import_module(f"transformers.models.{model}.modeling_{model}")


def model_and_tokens(model: str) -> tuple[Any, Tensor]:
    """Return the same small model and tokens each time."""
    name, sizes, _ = MODELS[model]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    made = getattr(transformers, f"{name}ForCausalLM")(config)
    return made, torch.randint(0, SIZES["vocab_size"], (2, 37))


def trained(model: str) -> dict[str, Tensor]:
    """Return loss and gradients of one step."""
    made, tokens = model_and_tokens(model)
    loss = made.train()(tokens, labels=tokens).loss
    loss.backward()
    found = {"loss": loss.detach()} | {name: weight.grad for name, weight in made.named_parameters()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def generated(model: str) -> Tensor:
    """Return the logits behind each of some more tokens: a prompt in one go, then step by step."""
    made, tokens = model_and_tokens(model)
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(made.eval().generate(tokens[:, :9], **given).logits)


@pytest.mark.parametrize("model", MODELS)
def test_training_is_that_of_its_own_operations(model: str, gpu_way: Callable[[], None]) -> None:
    expected = trained(model)
    gpu_way()
    torch.testing.assert_close(trained(model), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_generation_is_that_of_its_own_operations_and_runs_the_kernels(
    model: str, gpu_way: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generated(model)
    gpu_way()
    started: list[str] = []
    start = Launcher.__call__

    def watched(self: Launcher, name: str, *rest: Any, **options: Any) -> None:
        started.append("_".join(name.split("_")[:2]))
        start(self, name, *rest, **options)

    monkeypatch.setattr(Launcher, "__call__", watched)
    torch.testing.assert_close(generated(model), expected, rtol=1e-4, atol=1e-5)
    assert {"conv_forward", "conv_update", "scan_forward"} <= set(started)


def _names() -> dict[tuple[str, str], Any]:
    known = installation._known("transformers")
    return {
        (name, attribute): getattr(import_module(name), attribute)
        for name, values in known.modules.items()
        for attribute in values
    }


def test_installation_says_what_it_replaced_and_undoes_it(caplog: pytest.LogCaptureFixture) -> None:
    before = _names()
    with caplog.at_level("INFO", "twinrun_mamba"), twinrun_mamba.install("transformers") as installed:
        assert {(one.module, one.name) for one in installed.replaced} == set(before)
        assert all(value is not _names()[name] for name, value in before.items() if callable(value))
        assert str(installed) == "\n".join(record.getMessage() for record in caplog.records)
    assert _names() == before
    twinrun_mamba.install("transformers")
    twinrun_mamba.install("transformers")
    twinrun_mamba.uninstall()
    assert _names() == before


def test_what_somebody_else_replaced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _module("mamba")
    monkeypatch.setattr(module, "mamba_inner_fn", module.mamba_inner_fn)
    installed = twinrun_mamba.install("transformers")
    module.mamba_inner_fn = other = object()
    installed.uninstall()
    assert module.mamba_inner_fn is other


@pytest.mark.parametrize("found", ["4.56.2", "4.58.0", "5.0.0", "5.16.1", "6.0.0", "unknown", "insides"])
def test_an_unknown_version_or_other_insides_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, says = _names(), f"transformers: found {found}, allowed 4.57, 5.17 to 5.23"
    if found == "insides":
        says = r"without transformers\.models\.mamba.*mamba_inner_fn"
        monkeypatch.delattr(_module("mamba"), "mamba_inner_fn")
    else:
        monkeypatch.setattr(installation, "version", lambda _: found)
    with pytest.raises(InstallError, match=says):
        twinrun_mamba.install("transformers")
    monkeypatch.undo()
    assert _names() == before


def test_a_package_that_is_unknown_or_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_version", lambda _: "")
    for package, says in (
        (("flash_attn",), "package: found 'flash_attn', allowed transformers, mamba_ssm"),
        (("mamba_ssm",), r"mamba_ssm: found none installed, allowed 2\.3"),
        ((), "found none of the packages that are served"),
    ):
        with pytest.raises(InstallError, match=says):
            twinrun_mamba.install(*package)
