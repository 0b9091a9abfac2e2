"""Mamba-1 as Mambaoutai has it: pre-norm blocks of one mixer, RMS norms, no attention, an untied head.

The residual stream is added to and normed in one step at the entry of each block; initial values and names of
parameters are mamba_ssm's (github:lightonai/composer@9745ebc8d2a7:mamba/mamba.py builds its MixerModel).

Shape suffixes: B sequences, S tokens of one, D width, E channels, R rank, T states, W width of the
filter, V vocabulary, P rank and twice the states.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from twinrun.foundation.errors import InputError
from twinrun.protocol.models.mamba import MambaShape
from twinrun.protocol.models.shape import ActivationCheckpointing
from twinrun.protocol.training import Training
from twinrun.train.layers import RMSNorm, checkpointed, head_loss, rms_norm
from twinrun.train.models import DTYPES, Model, normal, uniform
from twinrun.train.state_space import Kernels, chosen

# Step sizes at the start: log-uniform between these, and never below the last.
STEP_LOW, STEP_HIGH, STEP_FLOOR = 1e-3, 0.1, 1e-4
EMBEDDING_STD = 0.02

Stream = tuple[Tensor, Tensor]


class Mixer(nn.Module):
    """Gated selective state space: projection, convolution, scan, projection."""

    def __init__(self, shape: MambaShape, *, kernels: Kernels, layout: str) -> None:
        super().__init__()
        self.kernels = kernels
        self.token_major = layout == "token-major"
        self.sizes = [shape.rank, shape.states, shape.states]
        channels = shape.channels
        self.in_proj = nn.Linear(shape.width, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, shape.convolution, groups=channels)
        self.x_proj = nn.Linear(channels, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(shape.rank, channels)
        self.A_log = nn.Parameter(torch.empty(channels, shape.states))
        self.D = nn.Parameter(torch.empty(channels))
        self.out_proj = nn.Linear(channels, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        layers = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        in_ED, x_PE, dt_ER, out_DE = (layer.weight.to(x_BSD.dtype) for layer in layers)
        mix = self._by_token if self.token_major else self._by_channel
        return mix(x_BSD, in_ED.chunk(2), x_PE, dt_ER, out_DE)

    def _by_token(self, x_BSD: Tensor, in_ED: Any, x_PE: Tensor, dt_ER: Tensor, out_DE: Tensor) -> Tensor:
        """Mix with channels adjacent in memory: all products are of tokens, nothing is laid out anew."""
        # Two products in place of one: its gradient would be copied together.
        x_BES, z_BES = (linear(x_BSD, weight_ED).transpose(1, 2) for weight_ED in in_ED)
        u_BES = self._convolve(x_BES)
        low_BSR, b_BST, c_BST = linear(u_BES.transpose(1, 2), x_PE).split(self.sizes, dim=-1)
        delta_BES = linear(low_BSR, dt_ER).transpose(1, 2)
        y_BES = self._scan(u_BES, delta_BES, b_BST.transpose(1, 2), c_BST.transpose(1, 2), z_BES)
        return linear(y_BES.transpose(1, 2), out_DE)

    def _by_channel(self, x_BSD: Tensor, in_ED: Any, x_PE: Tensor, dt_ER: Tensor, out_DE: Tensor) -> Tensor:
        """Mix with tokens adjacent in memory, as mamba_ssm does."""
        batch, _, _ = x_BSD.shape
        rows_DN = x_BSD.flatten(0, 1).T
        x_BES, z_BES = ((weight @ rows_DN).unflatten(1, (batch, -1)).transpose(0, 1) for weight in in_ED)
        u_BES = self._convolve(x_BES)
        low_BRS, b_BTS, c_BTS = torch.bmm(x_PE.expand(batch, -1, -1), u_BES).split(self.sizes, dim=1)
        delta_BES = torch.bmm(dt_ER.expand(batch, -1, -1), low_BRS)
        y_BES = self._scan(u_BES, delta_BES, b_BTS, c_BTS, z_BES)
        return torch.bmm(y_BES.transpose(1, 2), out_DE.T.expand(batch, -1, -1))

    def _convolve(self, x_BES: Tensor) -> Tensor:
        return self.kernels.convolve(x_BES, self.conv1d.weight.squeeze(1), self.conv1d.bias)

    def _scan(self, u_BES: Tensor, delta_BES: Tensor, b_BTS: Tensor, c_BTS: Tensor, z_BES: Tensor) -> Tensor:
        A_ET = -torch.exp(self.A_log.float())
        rest = (self.D.float(), z_BES, self.dt_proj.bias.float())
        return self.kernels.scan(u_BES, delta_BES, A_ET, b_BTS, c_BTS, *rest)


class MambaBlock(nn.Module):
    """A mixer on the normed residual stream."""

    def __init__(self, shape: MambaShape, *, checkpointing: ActivationCheckpointing, **mixer: Any) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm = RMSNorm(shape.width)
        self.mixer = Mixer(shape, **mixer)

    def forward(self, hidden_BSD: Tensor, residual_BSD: Tensor | None = None) -> Stream:
        """Return what the mixer adds, and the stream that it is to be added to."""
        stream: Stream = checkpointed(self.checkpointing, self._mix, hidden_BSD, residual_BSD)
        return stream

    def _mix(self, hidden_BSD: Tensor, residual_BSD: Tensor | None) -> Stream:
        residual_BSD = hidden_BSD if residual_BSD is None else residual_BSD + hidden_BSD
        return self.mixer(rms_norm(residual_BSD, self.norm.weight)), residual_BSD


def final_loss(
    stream: Stream, norm_D: Tensor, weight_VD: Tensor, targets_BS: Tensor, position_scale: float | None
) -> Tensor:
    """Final norm, head and cross entropy: one region for torch.compile. Nats per token."""
    hidden_BSD = rms_norm(stream[0] + stream[1], norm_D)
    return head_loss(hidden_BSD, weight_VD, targets_BS, position_scale=position_scale)


class Mamba(Model):
    """The whole decoder; parameters keep the type they are made in, layers compute in `dtype`."""

    undecayed = ("conv1d.weight", "A_log")
    drawn_as: ClassVar = {"embeddings": "tokens", "layers.": "blocks.", "in_proj": "enter"}
    drawn_as |= {"conv1d.weight": "filter", "conv1d.bias": "filter_bias", "x_proj": "select"}
    drawn_as |= {"dt_proj": "step", "out_proj": "leave", "lm_head": "head"}

    def __init__(
        self,
        shape: MambaShape,
        *,
        kernels: str | None,
        layout: str | None = "token-major",
        dtype: torch.dtype = torch.float32,
        parameter_type: torch.dtype = torch.float32,
        checkpointing: ActivationCheckpointing = False,
        position_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.kernels = chosen(kernels)
        self.traced = self.kernels.traced
        _demand("precision", dtype, tuple(DTYPES.values()))
        _demand("layout", layout, self.kernels.layouts)
        self.shape, self.dtype, self.position_scale = shape, dtype, position_scale
        self.final_loss = final_loss
        self.embeddings = nn.Embedding(shape.vocabulary, shape.width)
        kind: dict[str, Any] = {"kernels": self.kernels, "layout": layout, "checkpointing": checkpointing}
        self.layers = nn.ModuleList(MambaBlock(shape, **kind) for _ in range(shape.layers))
        self.norm_f = RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.to(parameter_type)

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the layers."""
        return self.layers

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or with targets their cross entropy in fp32, a scalar."""
        self.kernels.check(tokens_BS.device)
        return self._decode(tokens_BS, targets_BS)

    def _decode(self, tokens_BS: Tensor, targets_BS: Tensor | None) -> Tensor:
        hidden_BSD, residual_BSD = self.embeddings(tokens_BS).to(self.dtype), None
        for block in self.layers:
            hidden_BSD, residual_BSD = block(hidden_BSD, residual_BSD)
        norm_D, weight_VD = self.norm_f.weight, self.lm_head.weight
        if targets_BS is None:
            return linear(rms_norm(hidden_BSD + residual_BSD, norm_D), weight_VD.to(self.dtype))
        stream = (hidden_BSD, residual_BSD)
        return self.final_loss(stream, norm_D, weight_VD, targets_BS, self.position_scale)

    def compile_whole(self) -> None:
        """Compile the model on one device, but for what is checked: that reads files and raises.

        Kernels that cannot be traced break its graph in each block; torch.compile then gives the function up
        for every model of the process: such a model is compiled by blocks.
        """
        if not self.traced:
            self.compile_regions()
            return
        compiled = torch.compile(self._decode, dynamic=False, fullgraph=True)
        self._decode = compiled  # type: ignore[method-assign]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill the parameters; a value follows from `seed`, the parameter's name and its place alone."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial(name, parameter, self.key_of(name, seed), self.shape))


def initial(name: str, parameter: Tensor, key: int, shape: MambaShape) -> Tensor:
    """Return the first values of a parameter, as mamba_ssm draws them."""
    size, device = parameter.shape, parameter.device
    if name.endswith(("norm.weight", "norm_f.weight", "D")):
        return torch.ones(size, device=device)
    if name.endswith("A_log"):
        return torch.log(torch.arange(1, size[1] + 1, device=device).float()).expand(size)
    if name == "embeddings.weight":
        return normal(size, key, device) * EMBEDDING_STD
    drawn = uniform(size, key, device)
    if name.endswith("dt_proj.bias"):
        step = torch.exp(math.log(STEP_LOW) + drawn * math.log(STEP_HIGH / STEP_LOW)).clamp(min=STEP_FLOOR)
        # Softplus makes the step of this.
        return step + torch.log(-torch.expm1(-step))
    # A convolution's bias is drawn as its weights are.
    bound = 1 / math.sqrt(shape.convolution if "conv1d" in name else size[1])
    if name.endswith("out_proj.weight"):
        bound /= math.sqrt(shape.layers)
    return (2 * drawn - 1) * bound


def build(shape: MambaShape, *, training: Training) -> Mamba:
    """Return a Mamba, see `twinrun.train.models.build_of`."""
    types = {"dtype": DTYPES[training.precision], "parameter_type": DTYPES[training.parameter_type]}
    kept, scale = training.activation_checkpointing, training.position_weighting
    own: dict[str, Any] = {"kernels": training.kernels, "layout": training.layout, "position_scale": scale}
    return Mamba(shape, checkpointing=kept, **types, **own)


def _demand(name: str, found: object, allowed: tuple[object, ...]) -> None:
    if found not in allowed:
        raise InputError("a Mamba has no such setting", place=name, found=found, allowed=allowed)
