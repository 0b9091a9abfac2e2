"""MPT, the decoder of MosaicML's LLM Foundry, as published in its 2023 training recipes.

Pre-norm blocks, learned positions or ALiBi, biases everywhere, exact GELU, tied embeddings, no dropout
(github:mosaicml/llm-foundry@2e852dbf80fd, scripts/train/yamls/pretrain/mpt-*.yaml). Parameters have the names
that they have there.

Shape suffixes: B sequences, S tokens of one, D width, H heads, E width of a head, F feed-forward
width, V vocabulary, N = B * S tokens, C tokens of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import gelu, linear

from twinrun.foundation.errors import InputError
from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train import attention as attentions
from twinrun.train.attention import Attend
from twinrun.train.layers import (
    EPSILON,
    INDUCTOR_OPTIONS,
    Experts,
    Linear,
    checkpointed,
    head_loss,
    recomputed,
    shared_gelu,
)
from twinrun.train.models import DTYPES, Model, normal


class LayerNorm(nn.LayerNorm):
    """LLM Foundry's low-precision norm: input, output and parameters in the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    """Normalise the last axis of `x`."""
    weight_D, bias_D = weight_D.to(x.dtype), bias_D.to(x.dtype)
    return functional.layer_norm(x, weight_D.shape, weight_D, bias_D, EPSILON)


class Attention(nn.Module):
    """Multi-head causal self-attention, one projection for queries, keys and values."""

    slopes: Tensor | None
    """ALiBi's slopes, one a head."""

    def __init__(self, shape: MptShape, *, attend: Attend) -> None:
        super().__init__()
        self.head_dim = shape.head_size()
        self.attend = attend
        slopes = attentions.alibi_slopes(shape.heads) if shape.alibi else None
        self.register_buffer("slopes", slopes, persistent=False)
        self.Wqkv = Linear(shape.width, 3 * shape.width)
        self.out_proj = Linear(shape.width, shape.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        qkv_BSD = self.Wqkv(x_BSD).chunk(3, dim=-1)
        q_BSHE, k_BSHE, v_BSHE = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv_BSD)
        y_BSHE = self.attend(q_BSHE, k_BSHE, v_BSHE, self.slopes)
        out: Tensor = self.out_proj(y_BSHE.flatten(-2))
        return out


class FeedForward(nn.Module):
    """Two affine maps around an exact GELU."""

    def __init__(self, shape: MptShape) -> None:
        super().__init__()
        self.gelu: Callable[[Tensor], Tensor] = gelu
        self.up_proj = Linear(shape.width, shape.expansion * shape.width)
        self.down_proj = Linear(shape.expansion * shape.width, shape.width)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gelu(self.up_proj(x_BSD)))
        return out


class MptBlock(nn.Module):
    """Attention and feed-forward, each on a normalised residual stream."""

    def __init__(self, shape: MptShape, *, attend: Attend, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm_1 = LayerNorm(shape.width, eps=EPSILON)
        self.attn = Attention(shape, attend=attend)
        self.norm_2 = LayerNorm(shape.width, eps=EPSILON)
        self.ffn: nn.Module = FeedForward(shape)
        if shape.experts:
            self.ffn = Experts(shape.width, (FeedForward(shape) for _ in range(shape.experts)))

    def forward(self, x_BSD: Tensor) -> Tensor:
        # Inside what is compiled: what is computed again is fused with what needs it.
        kept = False if isinstance(self.checkpointing, bool) else self.checkpointing
        out: Tensor = checkpointed(kept, self._add, x_BSD)
        return out

    def _add(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attn(self.norm_1(x_BSD))
        out: Tensor = x_BSD + self.ffn(self.norm_2(x_BSD))
        return out


def final_loss(
    x_BSD: Tensor, norm_D: Tensor, bias_D: Tensor, weight_VD: Tensor, targets_BS: Tensor
) -> Tensor:
    """Final norm, head and cross entropy: one region for torch.compile. Mean, nats per token."""
    return head_loss(layer_norm(x_BSD, norm_D, bias_D), weight_VD, targets_BS)


class MPT(Model):
    """The whole decoder.

    Parameters keep the type they are made in; layers and residual stream compute in `dtype`, as
    they do under LLM Foundry's PURE mixed precision. A model that differs in its activation or in its initial
    weights is a subclass with `gelu`, `compiled_gelu` or `deviation` of its own.
    """

    options = INDUCTOR_OPTIONS
    gelu: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(gelu)
    compiled_gelu: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(shared_gelu)
    """The same function, for compiled graphs."""

    drawn_as: ClassVar = {
        "wte": "tokens",
        "wpe": "positions",
        "attn": "attention",
        "Wqkv": "qkv",
        "out_proj": "out",
        "ffn": "feed_forward",
        "up_proj": "up",
        "down_proj": "down",
        "norm_f": "norm",
    }

    def __init__(
        self,
        shape: MptShape,
        *,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        checkpointing: ActivationCheckpointing = False,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.recomputes_blocks = checkpointing is True
        self.final_loss = final_loss
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = None if shape.alibi else nn.Embedding(shape.sequence, shape.width)
        attend = attentions.chosen(attention)
        self.blocks = nn.ModuleList(
            MptBlock(shape, attend=attend, checkpointing=checkpointing) for _ in range(shape.layers)
        )
        for module in self.modules():
            if isinstance(module, FeedForward):
                module.gelu = type(self).gelu
        self.norm_f = LayerNorm(shape.width, eps=EPSILON)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or with targets their mean cross entropy in fp32, a scalar."""
        x_BSD = self.wte(tokens_BS)
        if self.wpe is not None:
            x_BSD = x_BSD + self.wpe.weight[: tokens_BS.shape[1]]
        x_BSD = x_BSD.to(self.dtype)
        for block in self.blocks:
            x_BSD = recomputed(block, x_BSD) if self.recomputes_blocks else block(x_BSD)
        weight_VD = self.wte.weight
        if targets_BS is None:
            return linear(self.norm_f(x_BSD), weight_VD.to(self.dtype))
        return self.final_loss(x_BSD, self.norm_f.weight, self.norm_f.bias, weight_VD, targets_BS)

    def compile_whole(self) -> None:
        """Compile the model on one device."""
        self._for_graphs()
        super().compile_whole()

    def compile_regions(self) -> None:
        """Compile each block's forward and the loss; call before or after sharding."""
        self._for_graphs()
        super().compile_regions()

    def _for_graphs(self) -> None:
        for block in self.blocks:
            block.ffn.gelu = self.compiled_gelu

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameters: kaiming normal (fan-in, ReLU), residual projections divided.

        A value follows from `seed`, the parameter's name and its place in it alone, so that every
        device and every world size start from the same weights.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                drawn = normal(parameter.shape, self.key_of(name, seed), parameter.device)
                parameter.copy_(drawn * self.deviation(name, parameter))

    def deviation(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix."""
        scale = math.sqrt(2 / parameter.shape[1])
        residual = name.endswith(("attn.out_proj.weight", "ffn.down_proj.weight"))
        return scale / math.sqrt(2 * len(self.blocks)) if residual else scale


def build(shape: MptShape, *, training: Training) -> MPT:
    """Return an MPT, see `twinrun.train.models.Family`."""
    if shape.experts and training.compile:
        raise InputError("experts get other numbers of tokens in each step", place="compile", found=True)
    return MPT(
        shape,
        dtype=DTYPES[training.precision],
        attention=training.attention,
        checkpointing=training.activation_checkpointing,
    )
