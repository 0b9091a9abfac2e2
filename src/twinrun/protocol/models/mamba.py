"""Mamba-1: selective state spaces without attention, an untied head, as Mambaoutai has it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from twinrun.protocol.hugging_face import Config, Form, Shapes, Sizes, of_blocks
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

# Bytes a block keeps for its backward pass per token and feature of the residual stream, 16-bit: recorded
# peaks of the published model, 6 and 8 sequences of 4096 on H200s, ask for 31 to 35, its head included.
ACTIVATION_BYTES_PER_FEATURE = 33
# Of these the products alone, the input and the residual: 8 of the input projection, 4 of the step sizes,
# 2 of the output projection, 4 of what enters; the projection to rank and states is 0.2.
PRODUCT_BYTES_PER_FEATURE = 19
# The input of a block, and the residual beside it.
INPUT_BYTES_PER_FEATURE = 4


class MambaShape(ModelShape):
    """One member of the Mamba family."""

    # 6 for each weight of a matrix product, and 9 forward and 18 backward for each of layers, states and
    # features of the residual stream (github:lightonai/composer@9745ebc8d2a7:mamba/mamba.py).
    formulas = ("model-flops/6M+27LSD",)

    family: Literal["mamba"] = "mamba"
    width: Positive
    """Features of the residual stream."""
    layers: Positive
    sequence: Annotated[int, Field(ge=2)]
    """Tokens in one training sequence; a single one has no next token."""
    states: Annotated[int, Field(ge=1, le=256)] = 16
    """States of one channel."""
    convolution: Annotated[int, Field(ge=2, le=8)] = 4
    """Tokens that the causal convolution sees."""
    expansion: Positive = 2
    """Channels of a block over `width`."""
    rank: Positive
    """Rank of the step sizes; mamba_ssm takes a sixteenth of `width`, rounded up."""

    @property
    def channels(self) -> int:
        """Return the channels of the convolution and the scan."""
        return self.expansion * self.width

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, as the publication's code counts them."""
        return 6 * self.work().multiplied + 27 * self.layers * self.states * self.width

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        width, channels = self.width, self.channels
        block = BlockWork(
            products=(
                Product(2 * channels, width, "columns"),
                Product(self.rank + 2 * self.states, channels, "inner"),
                Product(channels, self.rank, "columns"),
                Product(width, channels, "inner"),
            ),
            vectors=channels * (self.convolution + 3 + self.states) + width,
            width=width,
            hidden=channels,
            kept=ACTIVATION_BYTES_PER_FEATURE * width,
            kept_products=PRODUCT_BYTES_PER_FEATURE * width,
            kept_input=INPUT_BYTES_PER_FEATURE * width,
            scanned=channels * self.states,
        )
        return self._work(block, self.layers, tied=False, logit_bytes=0)


MAMBA_SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "state_size": "states",
    "conv_kernel": "convolution",
    "expand": "expansion",
    "time_step_rank": "rank",
}


def mamba_config(sizes: Sizes) -> dict[str, object]:
    """Return the keys of the sizes; it has none for the length of a sequence."""
    return {key: sizes[name] for key, name in MAMBA_SIZES.items()}


def mamba_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that the keys say."""
    automatic = {"time_step_rank": math.ceil(config["hidden_size"] / 16)}
    known = {**config, **automatic} if config["time_step_rank"] == "auto" else config
    return {name: int(known[key]) for key, name in MAMBA_SIZES.items()}


def mamba_shapes(sizes: Sizes) -> Shapes:
    """Return the shape of every tensor of a Mamba."""
    width, vocabulary, states, rank = (sizes[name] for name in ("width", "vocabulary", "states", "rank"))
    channels = sizes["expansion"] * width
    mixer: Shapes = {
        "in_proj.weight": (2 * channels, width),
        "conv1d.weight": (channels, 1, sizes["convolution"]),
        "conv1d.bias": (channels,),
        "x_proj.weight": (rank + 2 * states, channels),
        "dt_proj.weight": (channels, rank),
        "dt_proj.bias": (channels,),
        "A_log": (channels, states),
        "D": (channels,),
        "out_proj.weight": (width, channels),
    }
    block: Shapes = {"layers.*.norm.weight": (width,)}
    block |= {f"layers.*.mixer.{name}": shape for name, shape in mixer.items()}
    return {
        "embeddings.weight": (vocabulary, width),
        **of_blocks(sizes["layers"], block),
        "norm_f.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }


MAMBA = Form(
    family="mamba",
    model_type="mamba",
    architecture="MambaForCausalLM",
    fixed={
        "hidden_act": ("silu", "silu"),
        "layer_norm_epsilon": (1e-5, 1e-5),
        "use_bias": (False, False),
        "use_conv_bias": (True, True),
        "tie_word_embeddings": (False, True),
    },
    unset=dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    config=mamba_config,
    sizes=mamba_sizes,
    shapes=mamba_shapes,
    prefix="backbone.",
    without_prefix=("lm_head.",),
)

SHAPE, FORM = MambaShape, MAMBA
