"""Our MPT as GPT-2.

Both have learned positions, biases everywhere, an exact GELU if the configuration says so, and one matrix
for embedding and head. The class of transformers that is called MPT cannot hold the first two: it adds ALiBi
to every attention and takes no bias.
"""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.checkpoints.hugging_face.form import Config, Form, Sizes, TensorPair

NAMES = {
    "vocab_size": "vocabulary",
    "n_positions": "sequence",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
}
FIXED = {
    "activation_function": ("gelu", "gelu_new"),
    "layer_norm_epsilon": (1e-5, 1e-5),
    "tie_word_embeddings": (True, True),
    "scale_attn_weights": (True, True),
    "scale_attn_by_inverse_layer_idx": (False, False),
    "reorder_and_upcast_attn": (False, False),
    "add_cross_attention": (False, False),
}
# Of training and of generating text, which weights say nothing of.
NONE = {
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("bos_token_id", "eos_token_id")),
}


def config(sizes: Sizes) -> dict[str, object]:
    """Return the keys of the sizes."""
    inner = sizes["expansion"] * sizes["width"]
    return {**{key: sizes[name] for key, name in NAMES.items()}, "n_inner": inner, **NONE}


def sizes(config: Config) -> dict[str, int]:
    """Return the sizes that the keys say."""
    found = {name: int(config[key]) for key, name in NAMES.items()}
    expansion, rest = divmod(int(config.get("n_inner") or 4 * found["width"]), found["width"])
    if rest:
        raise ValueError("n_inner is no multiple of n_embd")
    return found | {"expansion": expansion}


def pairs(sizes: Sizes) -> Iterator[TensorPair]:
    """Yield every tensor; GPT-2 keeps matrices as inputs by outputs."""
    width, inner = sizes["width"], sizes["expansion"] * sizes["width"]
    yield TensorPair("tokens.weight", "transformer.wte.weight", (sizes["vocabulary"], width))
    yield TensorPair("positions.weight", "transformer.wpe.weight", (sizes["sequence"], width))
    for number in range(sizes["layers"]):
        ours, theirs = f"blocks.{number}.", f"transformer.h.{number}."
        yield from _norm(f"{ours}norm_1", f"{theirs}ln_1", width)
        yield from _affine(f"{ours}attention.qkv", f"{theirs}attn.c_attn", (3 * width, width))
        yield from _affine(f"{ours}attention.out", f"{theirs}attn.c_proj", (width, width))
        yield from _norm(f"{ours}norm_2", f"{theirs}ln_2", width)
        yield from _affine(f"{ours}feed_forward.up", f"{theirs}mlp.c_fc", (inner, width))
        yield from _affine(f"{ours}feed_forward.down", f"{theirs}mlp.c_proj", (width, inner))
    yield from _norm("norm", "transformer.ln_f", width)


def _norm(ours: str, theirs: str, width: int) -> Iterator[TensorPair]:
    for part in ("weight", "bias"):
        yield TensorPair(f"{ours}.{part}", f"{theirs}.{part}", (width,))


def _affine(ours: str, theirs: str, shape: tuple[int, int]) -> Iterator[TensorPair]:
    yield TensorPair(f"{ours}.weight", f"{theirs}.weight", shape, transposed=True)
    yield TensorPair(f"{ours}.bias", f"{theirs}.bias", shape[:1])


FORM = Form(
    family="mpt",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fixed=FIXED,
    config=config,
    sizes=sizes,
    pairs=pairs,
    absent=("experts",),
)
