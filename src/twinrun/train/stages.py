"""A decoder as a sequence of layers, and its matrices cut over tensor-parallel ranks.

Shape suffixes: B sequences, S tokens of one, D width, V vocabulary, K features of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding

from twinrun.train.layers import head_loss, recomputed
from twinrun.train.models import Model
from twinrun.train.models.mpt import Linear


class Tokens(nn.Module):
    """The embedding, which the head has in common with the first layer."""

    def __init__(self, tokens: nn.Embedding) -> None:
        super().__init__()
        self.weight = tokens.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return embedding(tokens_BS, self.weight)


class Positions(nn.Module):
    """Adds learned positions; what follows computes in `dtype`."""

    def __init__(self, positions: nn.Embedding, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = positions.weight
        self.dtype = dtype

    def forward(self, x_BSD: Tensor) -> Tensor:
        return (x_BSD + self.weight[: x_BSD.shape[1]]).to(self.dtype)


class RecomputedBlock(nn.Module):
    """A block of which the input alone is kept for the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BSD: Tensor) -> Tensor:
        out: Tensor = recomputed(self.block, x_BSD)
        return out


def middle(model: Model, *, recompute: bool) -> list[nn.Module]:
    """Return the layers between embedding and head."""
    blocks = [RecomputedBlock(block) if recompute else block for block in model.blocks]
    return [Positions(model.wpe, model.dtype), *blocks, model.norm_f]


def with_weight(tokens: Tokens, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `loss` needs: the last layer's output and the head's weights."""
    return x_BSD, tokens.weight


def loss(outputs: tuple[Tensor, Tensor], targets_BS: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32, nats per token."""
    x_BSD, weight_VD = outputs
    return head_loss(x_BSD, weight_VD, targets_BS)


class _ToRanks(torch.autograd.Function):
    """Gives every rank the same input; their gradients of it are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _FromRanks(torch.autograd.Function):
    """Sums the ranks' parts of an output; each has its gradient already."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ColumnParallelLinear(Linear):
    """An affine map of which this rank computes some of the features."""

    def __init__(self, weight_KD: Tensor, bias_K: Tensor, group: dist.ProcessGroup) -> None:
        super().__init__(weight_KD.shape[1], weight_KD.shape[0], device="meta")
        self.weight, self.bias = _cut(weight_KD), _cut(bias_K)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_ToRanks.apply(x, self.group))


class RowParallelLinear(nn.Module):
    """An affine map of which this rank sums over some of the features."""

    def __init__(self, weight_DK: Tensor, bias_D: nn.Parameter, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.bias = _cut(weight_DK), bias_D
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        part = x @ self.weight.to(x.dtype).T
        whole: Tensor = _FromRanks.apply(part, self.group)
        return whole + self.bias.to(x.dtype)


def split_tensors(model: Model, group: dist.ProcessGroup, *, rank: int) -> None:
    """Cut heads and feed-forward features over `group`, whose member `rank` this is; norms stay whole."""
    size = dist.get_world_size(group)
    for block in model.blocks:
        attn, ffn = block.attn, block.ffn
        weight = [part.chunk(size)[rank] for part in attn.Wqkv.weight.chunk(3)]
        bias = [part.chunk(size)[rank] for part in attn.Wqkv.bias.chunk(3)]
        attn.Wqkv = ColumnParallelLinear(torch.cat(weight), torch.cat(bias), group)
        out, up, down = attn.out_proj, ffn.up_proj, ffn.down_proj
        attn.out_proj = RowParallelLinear(out.weight.chunk(size, dim=1)[rank], out.bias, group)
        attn.heads //= size
        ffn.up_proj = ColumnParallelLinear(up.weight.chunk(size)[rank], up.bias.chunk(size)[rank], group)
        ffn.down_proj = RowParallelLinear(down.weight.chunk(size, dim=1)[rank], down.bias, group)


def _cut(part: Tensor) -> nn.Parameter:
    """Return a parameter that no other rank of the group has, which its gradient's norm heeds."""
    parameter = nn.Parameter(part.detach().clone())
    parameter.model_parallel = True
    return parameter
