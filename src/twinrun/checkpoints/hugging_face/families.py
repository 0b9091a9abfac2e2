"""Our model families as classes of transformers: config.json, and the names and shapes of tensors.

Our parameters have upstream's names, so that transformers has the same names behind a prefix. Our MPT is a
GPT-2 there: both have learned positions, biases everywhere, an exact GELU if the configuration says so, and
one matrix for embedding and head. The class that is called MPT cannot hold the first two: it adds ALiBi to
every attention and takes no bias. A member with ALiBi is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from twinrun.foundation.errors import InputError

Sizes = Mapping[str, int]
Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]
SHAPE = "shape."


@dataclass(frozen=True)
class TensorPair:
    """One tensor under both names."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    """Shape in this project's models."""
    transposed: bool = False

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Return the shape as they have it."""
        return self.shape[::-1] if self.transposed else self.shape


@dataclass(frozen=True, kw_only=True)
class Form:
    """One family of ours as a class of transformers."""

    family: str
    model_type: str
    architecture: str
    fixed: Mapping[str, tuple[object, object]]
    """Keys of config.json that only have one value for our model, and what a missing key means."""
    unset: Mapping[str, object]
    """Keys of training and of generating text, of which weights say nothing."""
    config: Callable[[Sizes], dict[str, object]]
    """Returns the keys that follow from the sizes of a member."""
    sizes: Callable[[Config], dict[str, int]]
    """Returns those sizes; raises KeyError and ValueError."""
    shapes: Callable[[Sizes], Shapes]
    """Returns the shape of every tensor by our name."""
    prefix: str
    """What a name has before ours."""
    without_prefix: tuple[str, ...] = ()
    """Beginnings of names that have no prefix."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of our names that are called otherwise."""
    transposed: tuple[str, ...] = ()
    """Endings of our names of matrices that they keep as inputs by outputs."""
    absent: tuple[str, ...] = ()
    """Sizes of ours that a member may have, and that they cannot hold."""

    def identity(self, sizes: Sizes) -> dict[str, str]:
        """Return what a checkpoint says of the model's shape."""
        known = {f"{SHAPE}{name}": str(size) for name, size in sizes.items()}
        return {f"{SHAPE}family": self.family, **known, **{f"{SHAPE}{name}": "None" for name in self.absent}}

    def pairs(self, sizes: Sizes) -> Iterator[TensorPair]:
        """Yield every tensor of a member."""
        for name, shape in self.shapes(sizes).items():
            theirs = name if name.startswith(self.without_prefix) else self.prefix + name
            for ours, other in self.renamed.items():
                theirs = theirs.replace(ours, other)
            yield TensorPair(name, theirs, shape, transposed=name.endswith(self.transposed))


def of_blocks(count: int, block: Shapes) -> Shapes:
    """Return the shapes of the tensors of all blocks; `*` in a name is the block's number."""
    return {name.replace("*", str(number)): shape for number in range(count) for name, shape in block.items()}


GPT2_SIZES = {
    "vocab_size": "vocabulary",
    "n_positions": "sequence",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
}


def gpt2_config(sizes: Sizes) -> dict[str, object]:
    """Return the keys of the sizes."""
    keys = {key: sizes[name] for key, name in GPT2_SIZES.items()}
    return {**keys, "n_inner": sizes["expansion"] * sizes["width"]}


def gpt2_sizes(config: Config) -> dict[str, int]:
    """Return the sizes that the keys say."""
    found = {name: int(config[key]) for key, name in GPT2_SIZES.items()}
    expansion, rest = divmod(int(config.get("n_inner") or 4 * found["width"]), found["width"])
    if rest:
        raise ValueError("n_inner is no multiple of n_embd")
    return found | {"expansion": expansion}


def mpt_shapes(sizes: Sizes) -> Shapes:
    """Return the shape of every tensor of an MPT without experts."""
    width, inner = sizes["width"], sizes["expansion"] * sizes["width"]
    layers = {"attn.Wqkv": (3 * width, width), "attn.out_proj": (width, width)}
    layers |= {"ffn.up_proj": (inner, width), "ffn.down_proj": (width, inner)}
    vectors = {"norm_1.weight": width, "norm_1.bias": width, "norm_2.weight": width, "norm_2.bias": width}
    block: Shapes = {f"blocks.*.{name}": (size,) for name, size in vectors.items()}
    for name, (outputs, inputs) in layers.items():
        block |= {f"blocks.*.{name}.weight": (outputs, inputs), f"blocks.*.{name}.bias": (outputs,)}
    return {
        "wte.weight": (sizes["vocabulary"], width),
        "wpe.weight": (sizes["sequence"], width),
        **of_blocks(sizes["layers"], block),
        "norm_f.weight": (width,),
        "norm_f.bias": (width,),
    }


MPT = Form(
    family="mpt",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed={
        "activation_function": ("gelu", "gelu_new"),
        "layer_norm_epsilon": (1e-5, 1e-5),
        "tie_word_embeddings": (True, True),
        "scale_attn_weights": (True, True),
        "scale_attn_by_inverse_layer_idx": (False, False),
        "reorder_and_upcast_attn": (False, False),
        "add_cross_attention": (False, False),
    },
    unset={
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    },
    config=gpt2_config,
    sizes=gpt2_sizes,
    shapes=mpt_shapes,
    prefix="transformer.",
    renamed={
        "blocks.": "h.",
        "norm_": "ln_",
        "attn.Wqkv": "attn.c_attn",
        "attn.out_proj": "attn.c_proj",
        "ffn.up_proj": "mlp.c_fc",
        "ffn.down_proj": "mlp.c_proj",
    },
    # GPT-2 has a Conv1D where others have a Linear.
    transposed=("Wqkv.weight", "out_proj.weight", "up_proj.weight", "down_proj.weight"),
    absent=("experts", "alibi"),
)

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
FORMS = (MAMBA, MPT)


def form_of(identity: Mapping[str, str], *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a checkpoint is of, and its sizes.

    Raises:
        InputError: transformers has no class that holds it.
    """
    family = identity.get(f"{SHAPE}family", "unknown")
    form = next((one for one in FORMS if one.family == family), None)
    if form is None:
        raise InputError(
            "this family has no Hugging Face format",
            place=f"{place}:{SHAPE}family",
            found=family,
            allowed=[one.family for one in FORMS],
        )
    for name in form.absent:
        if (found := identity.get(SHAPE + name, "None")) != "None":
            raise InputError(
                f"{form.architecture} of transformers cannot hold it",
                place=f"{place}:{SHAPE}{name}",
                found=found,
                allowed="None",
            )
    shape = {name.removeprefix(SHAPE): one for name, one in identity.items() if name.startswith(SHAPE)}
    return form, {name: int(one) for name, one in shape.items() if one.isdecimal()}


def form_of_config(config: Config, *, place: str) -> tuple[Form, dict[str, int]]:
    """Return the form of the model that a config.json describes, and its sizes.

    Raises:
        InputError: no family of ours is that model; names the first key that differs.
    """
    form = next((one for one in FORMS if one.model_type == config.get("model_type")), None)
    if form is None:
        raise InputError(
            "no family of ours is such a model",
            place=f"{place}:model_type",
            found=config.get("model_type"),
            allowed=[one.model_type for one in FORMS],
        )
    for key, (allowed, default) in form.fixed.items():
        if (found := config.get(key, default)) != allowed:
            raise InputError(
                f"our {form.family} is another model", place=f"{place}:{key}", found=found, allowed=allowed
            )
    try:
        return form, form.sizes(config)
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"not the sizes of a {form.model_type}: {error}", place=place) from None
