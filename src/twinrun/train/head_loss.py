"""Cross entropy of a linear head without all of its logits: they exist for one chunk of tokens at a time.

Shape suffixes: N tokens, D width, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinrun.train.models import IGNORED

# Tokens whose logits exist at once: 8192 rows of 50368 are 0.8 GB in bf16 and still fill a GPU.
CHUNK_TOKENS = 8192


class HeadLoss(torch.autograd.Function):
    """Weighted sum of the tokens' cross entropies; the gradient is taken in the forward pass.

    Logits are never recomputed. `share_N` is fp32, 0 where nothing is learned.
    """

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, share_N: Tensor) -> Tensor:
        head_VD = weight_VD.to(hidden_ND.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        grads_CD = []
        for start in range(0, len(targets_N), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            hidden_CD = hidden_ND[chunk]
            losses_C, grad_CV = cross_entropy_and_gradient(
                hidden_CD @ head_VD.T, targets_N[chunk], share_N[chunk]
            )
            loss = loss + losses_C.sum()
            grads_CD.append(grad_CV @ head_VD)
            # A chunk's product is exact to bf16; the sum over chunks would not be.
            grad_weight_VD = grad_weight_VD + (grad_CV.T @ hidden_CD).float()
        ctx.save_for_backward(torch.cat(grads_CD), grad_weight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden_ND, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_ND * grad, grad_weight_VD * grad, None, None


def cross_entropy_and_gradient(
    logits_CV: Tensor, targets_C: Tensor, share_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token times its share in fp32, and its gradient in the logits' type."""
    scores_CV = logits_CV.float()
    total_C = torch.logsumexp(scores_CV, dim=-1)
    target_C1 = targets_C.clamp(min=0)[:, None]
    losses_C = (total_C - scores_CV.gather(-1, target_C1)[:, 0]) * share_C
    is_target_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == target_C1
    grad_CV = (torch.exp(scores_CV - total_C[:, None]) - is_target_CV.float()) * share_C[:, None]
    return losses_C, grad_CV.to(logits_CV.dtype)


def head_loss(
    hidden_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor, *, position_scale: float | None = None
) -> Tensor:
    """Return the mean cross entropy of a head in fp32, nats per token.

    Args:
        position_scale: weigh a token by tanh(its position in the sequence, from 1, over this).
    """
    share_BS = (targets_BS != IGNORED).float()
    if position_scale is not None:
        positions_S = torch.arange(1, targets_BS.shape[1] + 1, device=targets_BS.device)
        share_BS = share_BS * torch.tanh(positions_S / position_scale)
    share_BS = share_BS / share_BS.sum()
    tokens = (hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten(), share_BS.flatten())
    loss: Tensor = HeadLoss.apply(*tokens)
    return loss
