"""Llama 3: RMS norms, rotary positions, grouped heads, a gated feed-forward layer, no biases."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinrun.protocol.hugging_face import Config, Form, Shapes, Sizes, of_blocks
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

# Of the scaling that transformers calls `llama3`, the same in every published member: the length of sequences
# in the first training, and how often within it a frequency turns that is divided wholly, or not at all.
FIRST_SEQUENCE, LOW_TURNS, HIGH_TURNS = 8192, 1, 4
SCALING = "llama3"
SCALED = {"low_freq_factor": float(LOW_TURNS), "high_freq_factor": float(HIGH_TURNS)}
SCALED |= {"original_max_position_embeddings": FIRST_SEQUENCE}


class LlamaShape(ModelShape):
    """One member of the Llama family."""

    fp8 = True
    fixed = {"kernels": None, "layout": None, "position_weighting": None, "parameter_type": "fp32"}  # noqa: RUF012
    # Both have 6 for each weight of a matrix product, the head included and the embedding not. Megatron
    # Bridge counts the half of attention that causal kernels compute: 14,451 tokens/s are its 744 TFLOP/s.
    # Megatron-LM counts the whole: 13,812 are its 800.
    formulas = ("model-flops/6M+6LDS", "model-flops/6M+12LDS")

    family: Literal["llama"] = "llama"
    width: Positive
    """Features of the residual stream."""
    heads: Positive
    """Heads of queries."""
    groups: Positive
    """Heads of keys and values, each of which several heads of queries share."""
    layers: Positive
    hidden: Positive
    """Features between the projections of the feed-forward layer."""
    tied: bool = False
    """Whether embedding and head are one matrix."""
    rope_theta: Positive = 500_000
    """Base of the frequencies that positions turn features by."""
    rope_scaling: Literal["llama3"] = "llama3"
    """Which frequencies are divided by `rope_factor`."""
    rope_factor: Annotated[int, Field(ge=1)] = 1
    """1 divides none, as in Llama 3; Llama 3.1 has 8, Llama 3.2 has 32."""

    @model_validator(mode="after")
    def _whole_heads(self) -> LlamaShape:
        if self.width % (2 * self.heads):
            found = f"{self.heads} heads of a width of {self.width}"
            raise ValueError(f"`heads` must leave each an even count of features: {found}")
        if self.heads % self.groups:
            raise ValueError(f"`groups` must divide `heads`: {self.groups} does not divide {self.heads}")
        return self

    def attention_heads(self) -> int:
        """Return the number of heads of queries."""
        return self.heads

    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.groups

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, with the causal half of attention."""
        return self.flops_by_formula()[self.formula]

    def flops_by_formula(self) -> dict[str, int]:
        """Return the FLOP of a token with the causal half of attention, and with the whole."""
        weights, attention = self.work().multiplied, self.layers * self.width * self.sequence
        counts = 6 * weights + 6 * attention, 6 * weights + 12 * attention
        return dict(zip(self.formulas, counts, strict=True))

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        width, hidden, head_size = self.width, self.hidden, self.width // self.heads
        shared = self.groups * head_size
        # Of 16 bits: the stream and its norm before attention and before the feed-forward layer; queries,
        # keys and values, repeated for each head of queries, and what attention gives; the two factors of the
        # feed-forward layer and their product.
        block = BlockWork(
            products=(
                Product(width, width, "columns"),
                Product(2 * shared, width, "columns"),
                Product(width, width, "inner"),
                Product(2 * hidden, width, "columns"),
                Product(width, hidden, "inner"),
            ),
            vectors=2 * width,
            width=width,
            hidden=hidden,
            kept=2 * (4 * width + 4 * width + 3 * hidden),
            kept_products=2 * (width + 2 * width + 2 * shared + 2 * hidden),
            kept_input=2 * width,
            attention_flops=4 * self.sequence * width,
            scores=self.heads * self.sequence,
            head=head_size,
            keys=2 * shared,
        )
        return self._work(block, self.layers, tied=self.tied)


SIZES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "groups",
    "tie_word_embeddings": "tied",
}


def config(sizes: Sizes) -> dict[str, object]:
    """Return the keys of the sizes; weights do not depend on the length of a sequence."""
    scaling = {"rope_type": SCALING, "factor": float(sizes["rope_factor"]), **SCALED}
    return {
        **{key: sizes[name] for key, name in SIZES.items()},
        "head_dim": sizes["width"] // sizes["heads"],
        "max_position_embeddings": sizes.get("sequence", FIRST_SEQUENCE * sizes["rope_factor"]),
        "rope_theta": float(sizes["rope_theta"]),
        "rope_scaling": scaling if sizes["rope_factor"] > 1 else None,
    }


def sizes(found: Config) -> dict[str, int]:
    """Return the sizes that the keys say; raises ValueError for other rotary embeddings than Llama 3's."""
    defaults = {"tie_word_embeddings": False, "num_key_value_heads": found["num_attention_heads"]}
    known = {name: {**defaults, **found}[key] for key, name in SIZES.items()}
    width, heads = int(known["width"]), int(known["heads"])
    if int(found.get("head_dim") or width // heads) * heads != width:
        raise ValueError(f"head_dim is {found['head_dim']}, and {heads} heads share hidden_size {width}")
    # transformers 5 has one table of what were two keys.
    rope = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    theta = rope.pop("rope_theta", found.get("rope_theta", 10_000.0))
    return {
        **{name: one if isinstance(one, bool) else int(one) for name, one in known.items()},
        "rope_theta": _whole(theta, "rope_theta"),
        "rope_factor": _factor(rope),
    }


def _factor(rope: dict[str, Any]) -> int:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return 1
    if kind != SCALING:
        raise ValueError(f"rope_type is {kind}, and ours is {SCALING} or default")
    for key, value in SCALED.items():
        if rope.get(key) != value:
            raise ValueError(f"{key} is {rope.get(key)}, and ours is {value}")
    return _whole(rope.get("factor"), "factor")


def _whole(value: Any, key: str) -> int:
    if float(value) != int(value):
        raise ValueError(f"{key} is {value}, and ours is a whole number")
    return int(value)


def tensor_shapes(sizes: Sizes) -> Shapes:
    """Return the shape of every tensor."""
    width, hidden, vocabulary = sizes["width"], sizes["hidden"], sizes["vocabulary"]
    shared = sizes["groups"] * (width // sizes["heads"])
    attention = {"q": (width, width), "k": (shared, width), "v": (shared, width), "o": (width, width)}
    feed_forward = {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    block: Shapes = {
        f"layers.*.{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")
    }
    block |= {f"layers.*.self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    block |= {f"layers.*.mlp.{name}_proj.weight": shape for name, shape in feed_forward.items()}
    head: Shapes = {} if sizes["tied"] else {"lm_head.weight": (vocabulary, width)}
    return {
        "embed_tokens.weight": (vocabulary, width),
        **of_blocks(sizes["layers"], block),
        "norm.weight": (width,),
        **head,
    }


LLAMA = Form(
    family="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed={
        "hidden_act": ("silu", "silu"),
        "rms_norm_eps": (1e-5, 1e-6),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
    },
    unset={"attention_dropout": 0.0, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))},
    config=config,
    sizes=sizes,
    shapes=tensor_shapes,
    prefix="model.",
    without_prefix=("lm_head.",),
)

SHAPE, FORM = LlamaShape, LLAMA
