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
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import gelu

from twinrun.foundation.errors import InputError
from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train import attention as attentions
from twinrun.train import layers
from twinrun.train.attention import Attend
from twinrun.train.layers import EPSILON, Linear


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


class MptBlock(layers.ResidualBlock):
    """Attention and feed-forward, or one of several feed-forward layers for each token."""

    parts = ("norm_1", "attn", "norm_2", "ffn")

    def __init__(self, shape: MptShape, *, attend: Attend, checkpointing: ActivationCheckpointing) -> None:
        made = [FeedForward(shape) for _ in range(shape.experts or 1)]
        ffn = layers.Experts(shape.width, made) if shape.experts else made[0]
        first, second = (LayerNorm(shape.width, eps=EPSILON) for _ in range(2))
        super().__init__(first, Attention(shape, attend=attend), second, ffn, checkpointing=checkpointing)


def final_loss(
    x_BSD: Tensor, norm_D: Tensor, bias_D: Tensor, weight_VD: Tensor, targets_BS: Tensor
) -> Tensor:
    """Final norm, head and cross entropy: one region for torch.compile. Mean, nats per token."""
    return layers.head_loss(layer_norm(x_BSD, norm_D, bias_D), weight_VD, targets_BS)


class MPT(layers.Decoder):
    """The whole decoder.

    A model that differs in its activation or in its initial weights is a subclass with `gelu`,
    `compiled_gelu` or `deviation` of its own.
    """

    options = layers.INDUCTOR_OPTIONS
    final_loss = staticmethod(final_loss)
    gelu: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(gelu)
    compiled_gelu: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(layers.shared_gelu)
    """The same function, for compiled graphs."""

    drawn_as: ClassVar = {"wte": "tokens", "wpe": "positions", "attn": "attention", "Wqkv": "qkv"}
    drawn_as |= {"out_proj": "out", "ffn": "feed_forward", "up_proj": "up", "down_proj": "down"}
    drawn_as |= {"norm_f": "norm"}

    def make(self, shape: MptShape, **block: Any) -> None:
        """Make the layers."""
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = None if shape.alibi else nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(MptBlock(shape, **block) for _ in range(shape.layers))
        self.norm_f = LayerNorm(shape.width, eps=EPSILON)
        for module in self.modules():
            if isinstance(module, FeedForward):
                module.gelu = type(self).gelu

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return embeddings of tokens and positions."""
        x_BSD: Tensor = self.wte(tokens_BS)
        return x_BSD if self.wpe is None else x_BSD + self.wpe.weight[: tokens_BS.shape[1]]

    def head(self) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
        """Return the final norm, and the weights of the embedding."""
        return self.norm_f, (self.norm_f.weight, self.norm_f.bias), self.wte.weight

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

    def deviation(self, name: str, parameter: Tensor) -> float:
        """Return that of kaiming's normal (fan-in, ReLU), residual projections divided."""
        scale = math.sqrt(2 / parameter.shape[1])
        residual = name.endswith(("attn.out_proj.weight", "ffn.down_proj.weight"))
        return scale / math.sqrt(2 * len(self.blocks)) if residual else scale


def build(shape: MptShape, *, training: Training) -> MPT:
    """Return an MPT, see `twinrun.train.models.build_of`."""
    if shape.experts and training.compile:
        raise InputError("experts get other numbers of tokens in each step", place="compile", found=True)
    return MPT(shape, **layers.settings_of(training))
