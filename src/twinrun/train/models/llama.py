"""Llama 3, the decoder of Meta: pre-norm blocks, rotary positions, grouped heads, a gated feed-forward layer.

As transformers' LlamaForCausalLM computes it; the parameters have its names without `model.` before them.
Rotations are fp32, as in torchtitan, in whatever type the layers compute.

Shape suffixes: B sequences, S tokens of one, D width, H heads, G heads of keys and values, E width of a head,
R half of that, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from twinrun.protocol.models.llama import FIRST_SEQUENCE, HIGH_TURNS, LOW_TURNS, LlamaShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train import attention as attentions
from twinrun.train.attention import Attend
from twinrun.train.layers import Linear, RMSNorm, checkpointed, head_loss, recomputed, rms_norm
from twinrun.train.models import DTYPES, Model, normal

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


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each on a normalised residual stream."""

    def __init__(
        self,
        shape: LlamaShape,
        *,
        attend: Attend,
        positions: Rotations,
        checkpointing: ActivationCheckpointing,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.input_layernorm = RMSNorm(shape.width)
        self.self_attn = GroupedAttention(shape, attend=attend, positions=positions)
        self.post_attention_layernorm = RMSNorm(shape.width)
        self.mlp = GatedFeedForward(shape)

    def forward(self, x_BSD: Tensor) -> Tensor:
        # Inside what is compiled: what is computed again is fused with what needs it.
        kept = False if isinstance(self.checkpointing, bool) else self.checkpointing
        out: Tensor = checkpointed(kept, self._add, x_BSD)
        return out

    def _add(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD))
        out: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return out


def final_loss(x_BSD: Tensor, norm_D: Tensor, weight_VD: Tensor, targets_BS: Tensor) -> Tensor:
    """Final norm, head and cross entropy: one region for torch.compile. Mean, nats per token."""
    return head_loss(rms_norm(x_BSD, norm_D), weight_VD, targets_BS)


class Llama(Model):
    """The whole decoder; parameters keep the type they are made in, layers compute in `dtype`."""

    def __init__(
        self,
        shape: LlamaShape,
        *,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        checkpointing: ActivationCheckpointing = False,
    ) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.recomputes_blocks = checkpointing is True
        self.final_loss = final_loss
        attend, positions = attentions.chosen(attention), rotations(shape)
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(
            LlamaBlock(shape, attend=attend, positions=positions, checkpointing=checkpointing)
            for _ in range(shape.layers)
        )
        self.norm = RMSNorm(shape.width)
        self.lm_head = None if shape.tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the layers."""
        return self.layers

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or with targets their mean cross entropy in fp32, a scalar."""
        x_BSD = self.embed_tokens(tokens_BS).to(self.dtype)
        for block in self.layers:
            x_BSD = recomputed(block, x_BSD) if self.recomputes_blocks else block(x_BSD)
        weight_VD = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        if targets_BS is None:
            return linear(self.norm(x_BSD), weight_VD.to(self.dtype))
        return self.final_loss(x_BSD, self.norm.weight, weight_VD, targets_BS)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameters: normal, projections back to the stream divided, norms one.

        A value follows from `seed`, the parameter's name and its place in it alone.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            to_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = INITIAL_STD / (math.sqrt(2 * self.shape.layers) if to_stream else 1.0)
            parameter.copy_(normal(parameter.shape, self.key_of(name, seed), parameter.device) * scale)


def build(shape: LlamaShape, *, training: Training) -> Llama:
    """Return a Llama, see `twinrun.train.models.Family`."""
    return Llama(
        shape,
        dtype=DTYPES[training.precision],
        attention=training.attention,
        checkpointing=training.activation_checkpointing,
    )
