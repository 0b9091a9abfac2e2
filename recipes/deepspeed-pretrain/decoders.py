"""The families that are cut: what a decoder has around its blocks, and the matrices of a block."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.train.models import Model
from twinrun.train.models.llama import Llama
from twinrun.train.models.mpt import MPT


class TensorCut(NamedTuple):
    """How tensor parallelism cuts a matrix: the features that come out, its columns, or those that go in."""

    axis: Literal["columns", "inner"]
    parts: int = 1
    """Matrices that are one in memory, each of which is cut."""


class Decoder(NamedTuple):
    """What a decoder has around its blocks, of which the first and the last stage of a pipeline are made."""

    embedding: nn.Embedding
    entry: nn.Module
    """Makes of embedded tokens what enters the first block."""
    norm: nn.Module
    head: nn.Parameter
    """Weights of the head, those of the embedding where both are one matrix."""
    cuts: dict[str, TensorCut]
    """The matrices of a block by name."""


class Entry(nn.Module):
    """Adds learned positions, if there are any; what follows computes in `dtype`."""

    def __init__(self, dtype: torch.dtype, positions: nn.Embedding | None = None) -> None:
        super().__init__()
        self.dtype = dtype
        self.weight = positions.weight if positions is not None else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        return (x_BSD if self.weight is None else x_BSD + self.weight[: x_BSD.shape[1]]).to(self.dtype)


OF_MPT = {
    "attn.Wqkv": TensorCut("columns", parts=3),
    "attn.out_proj": TensorCut("inner"),
    "ffn.up_proj": TensorCut("columns"),
    "ffn.down_proj": TensorCut("inner"),
}
OF_LLAMA = {
    **{f"self_attn.{name}_proj": TensorCut("columns") for name in "qkv"},
    "self_attn.o_proj": TensorCut("inner"),
    "mlp.gate_proj": TensorCut("columns"),
    "mlp.up_proj": TensorCut("columns"),
    "mlp.down_proj": TensorCut("inner"),
}


def decoder_of(model: Model) -> Decoder:
    """Return what is around the blocks of a model, and how they are cut; raises InputError."""
    if isinstance(model, MPT) and model.wpe is not None:
        return Decoder(model.wte, Entry(model.dtype, model.wpe), model.norm_f, model.wte.weight, OF_MPT)
    if isinstance(model, Llama):
        head = model.embed_tokens if model.lm_head is None else model.lm_head
        return Decoder(model.embed_tokens, Entry(model.dtype), model.norm, head.weight, OF_LLAMA)
    raise InputError(
        "no stages or cut matrices of this model",
        place="layouts",
        found=type(model).__name__,
        allowed="MPT with learned positions, or Llama",
    )
