"""MPT: a GPT with tied embeddings, biases everywhere, and learned positions or ALiBi."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.protocol.hugging_face import Config, Form, Shapes, Sizes, of_blocks
from twinrun.protocol.models.shape import BlockWork, ModelShape, ModelWork, Positive, Product

# Activations a block keeps for its backward pass, in bytes per token and feature of the residual
# stream, 16-bit, without the attention matrix (Korthikanti et al. 2022, arXiv:2205.05198, eq. 2).
ACTIVATION_BYTES_PER_FEATURE = 34
# Of these the products alone: 6 of queries, keys and values, 2 of attention, 8 of the expansion, and 1 that
# the recorded peaks of MPT-7B and 13B ask for.
PRODUCT_BYTES_PER_FEATURE = 17
# The input of a block.
INPUT_BYTES_PER_FEATURE = 2


class MptShape(ModelShape):
    """One member of the MPT family."""

    fp8 = True
    fixed = {"kernels": None, "layout": None, "position_weighting": None, "parameter_type": "fp32"}  # noqa: RUF012
    # It reproduces the 380 rows of LLM Foundry's benchmark tables
    # (github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/benchmarking/README.md).
    formulas = ("model-flops/6N+12LDS",)

    family: Literal["mpt"] = "mpt"
    width: Positive
    """Features of the residual stream."""
    heads: Positive
    layers: Positive
    expansion: Positive = 4
    """Width of the feed-forward layer over `width`."""
    experts: Annotated[int, Field(ge=2)] | None = None
    """Feed-forward layers of a block, one of which computes a token; where not given there is only one."""

    alibi: Literal[True] | None = None
    """Scores fall with the distance of a key, by slopes of the heads; there are no learned positions then."""

    @model_validator(mode="after")
    def _whole_heads(self) -> MptShape:
        if self.width % self.heads:
            raise ValueError(f"`heads` must divide `width`: {self.heads} does not divide {self.width}")
        return self

    def attention_heads(self) -> int:
        """Return the number of attention heads."""
        return self.heads

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, no causal discount; one expert computes it."""
        dense = self.model_copy(update={"experts": None}) if self.experts else self
        products = 6 * (dense.parameters() + self.layers * self._router())
        return products + 12 * self.layers * self.width * self.sequence

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        width, hidden, experts = self.width, self.expansion * self.width, self.experts or 1
        block = BlockWork(
            products=(
                Product(3 * width, width, "columns"),
                Product(width, width, "inner"),
                Product(hidden, width, "columns", experts),
                Product(width, hidden, "inner", experts),
            ),
            vectors=(8 + (self.expansion + 1) * experts) * width + self._router(),
            width=width,
            hidden=hidden,
            kept=ACTIVATION_BYTES_PER_FEATURE * width,
            kept_products=PRODUCT_BYTES_PER_FEATURE * width,
            kept_input=INPUT_BYTES_PER_FEATURE * width,
            attention_flops=4 * self.sequence * width,
            scores=self.heads * self.sequence,
            head=width // self.heads,
            keys=2 * width,
        )
        beside = width if self.alibi else (self.sequence + 1) * width
        return self._work(block, self.layers, tied=True, beside=beside)

    def _router(self) -> int:
        """Return the weights of one router."""
        return self.experts * self.width if self.experts else 0


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


def tensor_shapes(sizes: Sizes) -> Shapes:
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


GPT2 = Form(
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
    shapes=tensor_shapes,
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

SHAPE, FORM = MptShape, GPT2
