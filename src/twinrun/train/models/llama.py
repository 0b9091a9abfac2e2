"""Llama 3, the decoder of Meta: pre-norm blocks, rotary positions, grouped heads, a gated feed-forward layer.

As transformers' LlamaForCausalLM computes it; the parameters have its names without `model.` before them.
Rotations are fp32, as in torchtitan, in whatever type the layers compute.

Shape suffixes: B sequences, S tokens of one, D width, H heads, G heads of keys and values, E width of a head,
R half of that, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from twinrun.protocol.models.llama import FIRST_SEQUENCE, HIGH_TURNS, LOW_TURNS, LlamaShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train import layers
from twinrun.train.attention import Attend
from twinrun.train.layers import Linear, RMSNorm, rms_norm

# transformers' `initializer_range`.
INITIAL_STD = 0.02

Rotations = tuple[Tensor, Tensor]
"""Cosine and sine of the angle at each position (S, R)."""


def frequencies(shape: LlamaShape) -> Tensor:
    """Return the angles by which a position turns each pair of features (R), in fp32.

    Llama 3.1 divides the frequencies that turn less than `LOW_TURNS` times within the sequences of the first
    training by a factor, leaves those that turn more than `HIGH_TURNS` times, and goes over in between.
    """
    places_R = torch.arange(0, shape.head_size(), 2).float() / shape.head_size()
    plain_R = 1.0 / shape.rope_theta**places_R
    turns_R = FIRST_SEQUENCE * plain_R / (2 * math.pi)
    kept_R = ((turns_R - LOW_TURNS) / (HIGH_TURNS - LOW_TURNS)).clamp(0, 1)
    return plain_R * (kept_R + (1 - kept_R) / shape.rope_factor)


def rotations(shape: LlamaShape) -> Rotations:
    """Return cosine and sine for every position of a sequence."""
    angles_SR = torch.outer(torch.arange(shape.sequence).float(), frequencies(shape))
    return angles_SR.cos(), angles_SR.sin()


def rotated(x_BSHE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Turn each pair of features, of which one is in the first half of a head and one in the second."""
    a_BSHR, b_BSHR = x_BSHE.float().chunk(2, dim=-1)
    cos_S1R, sin_S1R = (one[: x_BSHE.shape[1], None] for one in (cos_SR, sin_SR))
    turned = (a_BSHR * cos_S1R - b_BSHR * sin_S1R, b_BSHR * cos_S1R + a_BSHR * sin_S1R)
    return torch.cat(turned, dim=-1).to(x_BSHE.dtype)


class GroupedAttention(nn.Module):
    """Causal self-attention in which several heads of queries share one of keys and values."""

    def __init__(self, shape: LlamaShape, *, attend: Attend, positions: Rotations) -> None:
        super().__init__()
        self.attend, self.head_dim = attend, shape.head_size()
        # No buffers: data parallelism would send them before each pass, and DeepSpeed round them to 16 bits.
        self.cos_SR, self.sin_SR = positions
        shared = shape.key_heads() * self.head_dim
        self.q_proj = Linear(shape.width, shape.width, bias=False)
        self.k_proj = Linear(shape.width, shared, bias=False)
        self.v_proj = Linear(shape.width, shared, bias=False)
        self.o_proj = Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        projected = (layer(x_BSD) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q_BSHE, k_BSGE, v_BSGE = (one.unflatten(-1, (-1, self.head_dim)) for one in projected)
        q_BSHE, k_BSGE = (rotated(one, self.cos_SR, self.sin_SR) for one in (q_BSHE, k_BSGE))
        out: Tensor = self.o_proj(self.attend(q_BSHE, k_BSGE, v_BSGE, None).flatten(-2))
        return out


class GatedFeedForward(nn.Module):
    """SwiGLU: one projection scaled by the SiLU of another, and a third back to the width."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return out


class LlamaBlock(layers.ResidualBlock):
    """Attention and feed-forward."""

    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")

    def __init__(
        self, shape: LlamaShape, *, checkpointing: ActivationCheckpointing, **attention: Any
    ) -> None:
        first, second = RMSNorm(shape.width), RMSNorm(shape.width)
        mix, feed = GroupedAttention(shape, **attention), GatedFeedForward(shape)
        super().__init__(first, mix, second, feed, checkpointing=checkpointing)


def final_loss(x_BSD: Tensor, norm_D: Tensor, weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    """Final norm, head and cross entropy: one region for torch.compile. Mean, nats per token."""
    return layers.head_loss(rms_norm(x_BSD, norm_D), weight_VD, targets_BS)


class Llama(layers.Decoder):
    """The whole decoder."""

    final_loss = staticmethod(final_loss)

    def make(self, shape: LlamaShape, **block: Any) -> None:
        """Make the layers."""
        block["positions"] = rotations(shape)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaBlock(shape, **block) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the layers."""
        return self.layers

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return embeddings of tokens."""
        x_BSD: Tensor = self.embed_tokens(tokens_BS)
        return x_BSD

    def head(self) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
        """Return the final norm, and the weights of the head or of the embedding."""
        return self.norm, (self.norm.weight,), (self.lm_head or self.embed_tokens).weight

    def deviation(self, name: str, parameter: Tensor) -> float:  # noqa: ARG002 - the same for every size
        """Return transformers' own, divided for projections back to the stream."""
        to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
        return INITIAL_STD / (math.sqrt(2 * self.shape.layers) if to_stream else 1.0)


def build(shape: LlamaShape, *, training: Training) -> Llama:
    """Return a Llama, see `twinrun.train.models.build_of`."""
    return Llama(shape, **layers.settings_of(training))
