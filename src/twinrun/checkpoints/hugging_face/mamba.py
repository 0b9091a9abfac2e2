"""Our Mamba as the class of transformers of that name, with a head of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinrun.checkpoints.hugging_face.form import Config, Form, Sizes, TensorPair

NAMES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "state_size": "states",
    "conv_kernel": "convolution",
    "expand": "expansion",
    "time_step_rank": "rank",
}
FIXED = {
    "hidden_act": ("silu", "silu"),
    "layer_norm_epsilon": (1e-5, 1e-5),
    "use_bias": (False, False),
    "use_conv_bias": (True, True),
    "tie_word_embeddings": (False, True),
}
NONE = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def config(sizes: Sizes) -> dict[str, object]:
    """Return the keys of the sizes; it has none for the length of a sequence."""
    return {**{key: sizes[name] for key, name in NAMES.items()}, **NONE}


def sizes(config: Config) -> dict[str, int]:
    """Return the sizes that the keys say."""
    automatic = {"time_step_rank": math.ceil(config["hidden_size"] / 16)}
    known = {**config, **automatic} if config["time_step_rank"] == "auto" else config
    return {name: int(known[key]) for key, name in NAMES.items()}


def pairs(sizes: Sizes) -> Iterator[TensorPair]:
    """Yield every tensor."""
    width, vocabulary, states, rank = (sizes[name] for name in ("width", "vocabulary", "states", "rank"))
    channels, taps = sizes["expansion"] * width, sizes["convolution"]
    yield TensorPair("tokens.weight", "backbone.embeddings.weight", (vocabulary, width))
    for number in range(sizes["layers"]):
        ours, theirs = f"blocks.{number}.", f"backbone.layers.{number}."
        yield TensorPair(f"{ours}norm", f"{theirs}norm.weight", (width,))
        ours, theirs = f"{ours}mixer.", f"{theirs}mixer."
        yield TensorPair(f"{ours}enter.weight", f"{theirs}in_proj.weight", (2 * channels, width))
        filters = TensorPair(
            f"{ours}filter", f"{theirs}conv1d.weight", (channels, taps), viewed=(channels, 1, taps)
        )
        yield filters
        yield TensorPair(f"{ours}filter_bias", f"{theirs}conv1d.bias", (channels,))
        yield TensorPair(f"{ours}select.weight", f"{theirs}x_proj.weight", (rank + 2 * states, channels))
        yield TensorPair(f"{ours}step.weight", f"{theirs}dt_proj.weight", (channels, rank))
        yield TensorPair(f"{ours}step.bias", f"{theirs}dt_proj.bias", (channels,))
        yield TensorPair(f"{ours}A_log", f"{theirs}A_log", (channels, states))
        yield TensorPair(f"{ours}D", f"{theirs}D", (channels,))
        yield TensorPair(f"{ours}leave.weight", f"{theirs}out_proj.weight", (width, channels))
    yield TensorPair("norm", "backbone.norm_f.weight", (width,))
    yield TensorPair("head.weight", "lm_head.weight", (vocabulary, width))


FORM = Form(
    family="mamba",
    model_type="mamba",
    architecture="MambaForCausalLM",
    fixed=FIXED,
    config=config,
    sizes=sizes,
    pairs=pairs,
)
