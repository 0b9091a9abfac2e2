"""Models of others by their config.json: parameters as published, and what is not understood named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.fit_predictions import CONFIGS
from twinrun.foundation.errors import InputError
from twinrun.predict.configured_model import configured, generic_flops, of_config
from twinrun.protocol.models import member

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA |= {"vocab_size": 128256, "max_position_embeddings": 131072, "hidden_act": "silu", "rope_theta": 5e5}
SMALL = {"vocab_size": 32000, "max_position_embeddings": 32768}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
NEOX = {"model_type": "gpt_neox", "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64}
MPT = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "max_seq_len": 2048}
# What the weights of each have in all, as their pages say; biases and learned positions are not counted.
PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "Llama 3 8B": (LLAMA, 8_030_261_248),
    "Mistral 7B": (LLAMA | SMALL | {"model_type": "mistral"}, 7_241_732_096),
    "Mixtral 8x7B": (LLAMA | SMALL | EXPERTS, 46_702_792_704),
    "GPT-2": (GPT2 | {"vocab_size": 50257}, 124_439_808),
    "GPT-NeoX 20B": (NEOX | {"intermediate_size": 24576, "vocab_size": 50432}, 20_554_567_680),
    "MPT-7B": (MPT | {"expansion_ratio": 4, "vocab_size": 50432, "attn_config": {}}, 6_649_286_656),
}
TODAY = {"qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560}
TODAY |= {"gemma-3-1b": 999_885_952, "gemma-3-27b": 27_000_000_000, "olmo-2-7b": 7_300_000_000}
TODAY |= {"deepseek-v3": 671 * 10**9, "kimi-k2": 1026 * 10**9}
TODAY |= {"gpt-oss-20b": 20_900_000_000, "gpt-oss-120b": 116_800_000_000}
PUBLISHED |= {name: (CONFIGS[name], count) for name, count in TODAY.items()}


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published(name: str, tmp_path: Path) -> None:
    config, parameters = PUBLISHED[name]
    shape, strange = configured(written(tmp_path, config))
    assert shape.parameters() == pytest.approx(parameters, rel=8e-3 if name == "GPT-2" else 2e-3)
    assert strange == ()
    assert shape.sequence <= 8192


def test_windows_and_dense_layers_count_what_a_token_meets() -> None:
    windowed, _ = of_config(CONFIGS["gemma-3-27b"], sequence=8192, file="gemma")
    whole = windowed.model_copy(update={"window": None})
    # 10 of 62 blocks see all, the others 1,024 tokens each way.
    share = (10 * 8192 + 52 * 2048) / (62 * 8192)
    assert windowed.work().block.attention_flops == pytest.approx(share * whole.work().block.attention_flops)
    met = generic_flops(of_config(CONFIGS["deepseek-v3"], sequence=4096, file="")[0].work())
    # 37 billion parameters of 671 meet a token, and attention.
    assert 37e9 < met / 6 < 1.15 * 37e9


def test_a_member_of_ours_is_the_same_from_its_config_and_what_is_not_understood_is_named(
    tmp_path: Path,
) -> None:
    ours, more = member("llama-8b", place="model"), {"kv_rank": 512, "n_shared_expert": 1}
    theirs, strange = configured(written(tmp_path, LLAMA | more), sequence=8192)
    assert strange == tuple(more)
    assert theirs.flops_per_token() == ours.flops_per_token()
    assert theirs.parameters() == ours.parameters()
    assert theirs.work().block.attention_flops == ours.work().block.attention_flops


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "rwkv"}, "no kind of model"),
        ({}, "no kind of model"),
        ({"model_type": "llama", "vocab_size": 5}, "a size is missing"),
        (LLAMA | {"hidden_size": -1}, "width"),
        (LLAMA | {"num_attention_heads": 33}, "num_attention_heads = 33 does not divide hidden_size = 4096"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads = 5 does not divide num_attention_heads"),
    ],
)
def test_what_cannot_be_read_is_refused(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        configured(written(tmp_path, config))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"no config\.json"):
        configured(tmp_path)
