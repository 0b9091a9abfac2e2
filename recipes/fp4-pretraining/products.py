"""The three matrix products of a linear layer, each with quantised factors or without.

Shape suffixes: N tokens, D features in, M features out; R and C rows of two factors, K terms of a sum.
"""

from __future__ import annotations

import hashlib
from functools import cache, partial
from typing import Any, Literal

import torch
from formats import FORMATS, quantised
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen


class Settings(Frozen):
    """Settings of a layout, which names every one."""

    forward: bool
    """Whether the factors of x W are quantised."""
    input_gradient: bool
    """Whether those of dy W are."""
    weight_gradient: bool
    """Whether those of dy x are."""
    format: Literal["mxfp4", "mxfp8", "nvfp4"]
    block: Literal[16, 32, 64]
    """Numbers that share a scale, along the axis that a product sums over."""
    hadamard: Literal["none", "fixed", "random"]
    """Rotation of both factors before they are quantised; `random` flips signs anew in each product."""
    hadamard_size: Literal[2, 4, 8, 16, 32, 64, 128]
    """Points of the transform."""
    rounding: Literal["nearest", "stochastic"]


class Quantiser:
    """Rotates and quantises factors of products; random numbers follow from seed, rank and step."""

    def __init__(self, settings: Settings, *, seed: int, rank: int, device: torch.device) -> None:
        self.settings, self._kind = settings, FORMATS[settings.format]
        self._seed, self._rank = seed, rank
        self._generator = torch.Generator(device)

    def begin(self, step: int) -> None:
        """Draw the random numbers of a step, counted from 0, from here on."""
        # A generator of a processor takes 32 bits.
        digest = hashlib.sha256(f"{self._seed} {self._rank} {step}".encode()).digest()
        self._generator.manual_seed(int.from_bytes(digest[:4], "big"))

    def product(self, a_RK: Tensor, b_CK: Tensor) -> Tensor:
        """Return a b^T of quantised factors, in the type of `a_RK`; its sums are those of the device."""
        given = a_RK.dtype
        if self.settings.hadamard != "none":
            rotation = self._rotation(a_RK.device)
            a_RK, b_CK = rotated(a_RK, rotation), rotated(b_CK, rotation)
        exact = self._kind.product_type or given
        return (self._quantised(a_RK).to(exact) @ self._quantised(b_CK).to(exact).T).to(given)

    def _quantised(self, x: Tensor) -> Tensor:
        noise = self._uniform(x.shape, x.device) if self.settings.rounding == "stochastic" else None
        return quantised(x, self._kind, block=self.settings.block, noise=noise)

    def _rotation(self, device: torch.device) -> Tensor:
        matrix = hadamard(self.settings.hadamard_size, device)
        if self.settings.hadamard == "fixed":
            return matrix
        flips = self._uniform(matrix.shape[:1], device) < 0.5
        return torch.where(flips[:, None], -matrix, matrix)

    def _uniform(self, shape: torch.Size, device: torch.device) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=device)


@cache
def hadamard(size: int, device: torch.device) -> Tensor:
    """Return Sylvester's matrix of `size` points, orthogonal."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Return `x` in fp32 with each group of its last axis rotated."""
    return (x.float().unflatten(-1, (-1, len(rotation))) @ rotation).flatten(-2)


class QuantisedProducts(torch.autograd.Function):
    """x W^T and its two gradients."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_MD: Tensor, quantiser: Quantiser) -> Tensor:
        ctx.save_for_backward(x_ND, weight_MD)
        ctx.quantiser = quantiser
        return _product(x_ND, weight_MD, quantiser, quantiser.settings.forward)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_NM,), (x_ND, weight_MD), chosen = gradients, ctx.saved_tensors, ctx.quantiser.settings
        grad_ND = _product(grad_NM, weight_MD.T, ctx.quantiser, chosen.input_gradient)
        grad_MD = _product(grad_NM.T, x_ND.T, ctx.quantiser, chosen.weight_gradient)
        return grad_ND, grad_MD, None


def _product(a_RK: Tensor, b_CK: Tensor, quantiser: Quantiser, chosen: bool) -> Tensor:
    return quantiser.product(a_RK, b_CK) if chosen else a_RK @ b_CK.T


def quantise(blocks: nn.Module, quantiser: Quantiser, *, tokens: int, place: str) -> None:
    """Let every linear layer of `blocks` multiply by `quantiser`.

    Args:
        tokens: of one forward pass, over which gradients of weights are summed.

    Raises:
        InputError: a product sums over terms that are no multiple of the block or the transform.
    """
    layers = {name: layer for name, layer in blocks.named_modules() if isinstance(layer, nn.Linear)}
    for name, layer in layers.items():
        sums = {"in": layer.in_features, "out": layer.out_features, "tokens": tokens}
        for key in ("block", "hadamard_size"):
            size = getattr(quantiser.settings, key)
            if odd := [f"{what} {terms}" for what, terms in sums.items() if terms % size]:
                raise InputError(
                    "a product sums over whole blocks",
                    place=f"{place}.{key}",
                    found=f"{size}, {name} has {', '.join(odd)}",
                    allowed="a divisor of all three",
                    hint="change the block, or sizes under [models] of recipe.toml",
                )
        layer.forward = partial(_forward, layer, quantiser)


def _forward(layer: nn.Linear, quantiser: Quantiser, x: Tensor) -> Tensor:
    y_NM: Tensor = QuantisedProducts.apply(x.flatten(0, -2), layer.weight.to(x.dtype), quantiser)
    y = y_NM.unflatten(0, x.shape[:-1])
    return y if layer.bias is None else y + layer.bias.to(x.dtype)
