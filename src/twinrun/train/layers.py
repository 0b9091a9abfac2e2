"""What blocks and losses of more than one model are made of.

Shape suffixes: B sequences, S tokens of one, D width, V vocabulary, N = B * S tokens, C tokens of one chunk,
X experts, M tokens of one expert.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

from twinrun.protocol.models.shape import HEAD_TOKENS, ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train import attention as attentions
from twinrun.train.models import DTYPES, IGNORED, Model, normal

aten = torch.ops.aten
# Attention's kernels hold two products. All else, a scan and a convolution too, is cheap for what it writes.
KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
ATTENTION = [getattr(aten, f"_scaled_dot_product_{name}").default for name in KERNELS]
PRODUCTS = [getattr(aten, name).default for name in ("mm", "addmm", "bmm", "_scaled_mm")]
# Inductor writes to memory what two kernels read and is longer than 30 operations. The derivative of
# shared_gelu was written in fp32, and its sum, the gradient of a bias, read that: 0.43 ms in place of 0.12
# for a block of MPT-7B (H200, PyTorch 2.11). Regions that hold shared_gelu are compiled with this.
INDUCTOR_OPTIONS = {"realize_opcount_threshold": 200}
# Tokens whose logits exist at once: 8192 rows of 50368 are 0.8 GB in bf16 and still fill a GPU.
CHUNK_TOKENS = HEAD_TOKENS

# Added to the mean square, or variance, that a norm divides by; all families publish this one.
EPSILON = 1e-5

recomputed: Callable[..., Any] = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Call a function, and again in the backward pass; of its first call the inputs alone are kept."""


def checkpointed(kept: ActivationCheckpointing, function: Callable[..., Any], *given: Any) -> Any:
    """Call a function, and what `kept` does not keep of it again in the backward pass."""
    if isinstance(kept, bool):
        return recomputed(function, *given) if kept else function(*given)
    return recomputed(function, *given, context_fn=_keep_products if kept == "selective" else _keep_alternate)


def _own_attention() -> list[Any]:
    """Return our own attention, which torch knows once its package is imported."""
    own = getattr(torch.ops.twinrun_attention, "forward", None)
    return [own.default] if own else []


def _keep_products() -> Any:
    """Return the contexts of a forward pass that keeps matrix products, and of its second run."""
    # PyTorch 2.4, with which a publication trained, has no such function: it is looked up where it is needed.
    return checkpointing.create_selective_checkpoint_contexts([*PRODUCTS, *ATTENTION, *_own_attention()])


def _keep_alternate() -> Any:
    """Return the same contexts where every second `mm` is computed again, the second of a block first.

    As torchtitan's selective option `op` has it, github:pytorch/torchtitan@81c12433:
    torchtitan/models/llama3/infra/parallelize.py, `_save_list` and `_get_custom_policy`. Its list has no
    `_scaled_mm`. The kernels of attention that it does not list, cuDNN's and ours, are kept like its own.
    """
    # The maximum is kept since fp8 takes its scales from it.
    kept = {aten.mm.default, aten.max.default, *ATTENTION, *_own_attention()}
    # torch knows the collective where it was built with torch.distributed.
    scattered = getattr(torch.ops._c10d_functional, "reduce_scatter_tensor", None)
    kept |= {scattered.default} if scattered else set()
    counts = {False: 0, True: 0}
    policy = checkpointing.CheckpointPolicy

    def choose(context: Any, operation: Any, *_given: Any, **_named: Any) -> Any:
        again = context.is_recompute
        counts[again] += operation is aten.mm.default
        second = operation is aten.mm.default and counts[again] % 2 == 0
        return policy.MUST_SAVE if operation in kept and not second else policy.PREFER_RECOMPUTE

    return checkpointing.create_selective_checkpoint_contexts(choose)


class Linear(nn.Linear):
    """An affine map computed in the type of its input, whatever type the parameters have."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


def rms_norm(x_BSD: Tensor, weight_D: Tensor) -> Tensor:
    """Normalise the last axis in fp32."""
    wide = x_BSD.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return (wide * scale * weight_D.float()).to(x_BSD.dtype)


class RMSNorm(nn.Module):
    """A norm of the last axis by its mean square, with a scale for each feature."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return rms_norm(x_BSD, self.weight)


class ResidualBlock(nn.Module):
    """Two layers, each on a normalised residual stream; `parts` names norm, layer, norm, layer."""

    parts: ClassVar[tuple[str, ...]]

    def __init__(self, *modules: nn.Module, checkpointing: ActivationCheckpointing) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        for name, module in zip(self.parts, modules, strict=True):
            self.add_module(name, module)

    def forward(self, x_BSD: Tensor) -> Tensor:
        # Inside what is compiled: what is computed again is fused with what needs it.
        kept = False if isinstance(self.checkpointing, bool) else self.checkpointing
        out: Tensor = checkpointed(kept, self._add, x_BSD)
        return out

    def _add(self, x_BSD: Tensor) -> Tensor:
        norm, mix, second_norm, feed = [getattr(self, name) for name in self.parts]
        x_BSD = x_BSD + mix(norm(x_BSD))
        out: Tensor = x_BSD + feed(second_norm(x_BSD))
        return out


class Decoder(Model):
    """Embedding, residual blocks, final norm and head.

    Parameters keep the type they are made in; layers and residual stream compute in `dtype`, as they do under
    LLM Foundry's PURE mixed precision.
    """

    def __init__(
        self,
        shape: Any,
        *,
        dtype: torch.dtype = torch.float32,
        attention: str = "sdpa",
        checkpointing: ActivationCheckpointing = False,
    ) -> None:
        super().__init__()
        self.shape, self.dtype, self.recomputes_blocks = shape, dtype, checkpointing is True
        self.make(shape, attend=attentions.chosen(attention), checkpointing=checkpointing)

    def make(self, shape: Any, **block: Any) -> None:
        """Make the layers; `block` has what blocks take beside the shape: `attend` and `checkpointing`."""
        raise NotImplementedError

    def embed(self, tokens_BS: Tensor) -> Tensor:
        """Return what enters the first block (B, S, D)."""
        raise NotImplementedError

    def head(self) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
        """Return the final norm with its parameters, and the weights of the head (V, D)."""
        raise NotImplementedError

    def deviation(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix."""
        raise NotImplementedError

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or with targets their mean cross entropy in fp32, a scalar."""
        x_BSD = self.embed(tokens_BS).to(self.dtype)
        for block in self.blocks:
            x_BSD = recomputed(block, x_BSD) if self.recomputes_blocks else block(x_BSD)
        # By their names: a rank that has shards gathers a parameter when it is asked for.
        norm, parameters, weight_VD = self.head()
        if targets_BS is None:
            return linear(norm(x_BSD), weight_VD.to(self.dtype))
        return self.final_loss(x_BSD, *parameters, weight_VD, targets_BS)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameters: biases zero, norms one, matrices normal by `deviation`.

        A value follows from `seed`, the parameter's name and its place in it alone, so that every
        device and every world size start from the same weights.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                drawn = normal(parameter.shape, self.key_of(name, seed), parameter.device)
                parameter.copy_(drawn * self.deviation(name, parameter))


def settings_of(training: Training) -> dict[str, Any]:
    """Return what a decoder is made with beside its shape."""
    kept, attention = training.activation_checkpointing, training.attention
    return {"dtype": DTYPES[training.precision], "attention": attention, "checkpointing": kept}


class SharedGelu(torch.autograd.Function):
    """Exact GELU, x times the normal distribution function, to 4e-7; for compiled graphs.

    Value and derivative share one exponential: Abramowitz and Stegun 7.1.26 writes the error
    function as a polynomial times the density. With the two library calls of gelu the kernels of
    a compiled block are bound by arithmetic instead of memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * normal_distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, density = normal_distribution(wide)
        return (grad.float() * (below + wide * density)).to(x.dtype)


def shared_gelu(x: Tensor) -> Tensor:
    """Apply SharedGelu; dynamo follows it only through a function."""
    y: Tensor = SharedGelu.apply(x)
    return y


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return distribution function, to 7.5e-8, and density of the standard normal, in fp32."""
    kernel = torch.exp(-0.5 * x * x)
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * x.abs())
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * kernel * t * (0.254829592 + t * (-0.284496736 + t * series))
    return torch.where(x < 0, tail, 1 - tail), kernel / math.sqrt(2 * math.pi)


class HeadLoss(torch.autograd.Function):
    """Weighted sum of the tokens' cross entropies, without all of the logits at once.

    The gradient is taken in the forward pass, so that logits are never recomputed. `share_N` is fp32, 0 where
    nothing is learned.
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


class Experts(nn.Module):
    """A router sends each token to one of several layers; the result is scaled by the router's share of it.

    No token is ever dropped. As the layers of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961),
    without their auxiliary loss.
    """

    def __init__(self, width: int, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.router = nn.Linear(width, len(self.experts), bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_ND = x_BSD.flatten(0, 1)
        shares_NX = torch.softmax(linear(x_ND.float(), self.router.weight.float()), dim=1)
        share_N, chosen_N = shares_NX.max(dim=1)
        y_ND = torch.zeros_like(x_ND)
        for number, expert in enumerate(self.experts):
            # An expert that no token was sent to still takes part, with nothing: its gradient is zero.
            rows_M = (chosen_N == number).nonzero()[:, 0]
            y_MD = expert(x_ND[rows_M]) * share_N[rows_M, None].to(x_ND.dtype)
            y_ND = y_ND.index_add(0, rows_M, y_MD)
        return y_ND.view_as(x_BSD)
