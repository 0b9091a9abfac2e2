"""Mamba-1: selective state spaces without attention, an untied head, as Mambaoutai has it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinrun.protocol.formulas import MAMBA_FLOPS
from twinrun.protocol.models.shape import ModelShape, Positive
from twinrun.protocol.work import BlockWork, ModelWork, Product

# Bytes a block keeps for its backward pass per token and feature of the residual stream, 16-bit: recorded
# peaks of the published model, 6 and 8 sequences of 4096 on H200s, ask for 31 to 35, its head included.
ACTIVATION_BYTES_PER_FEATURE = 33
# Of these the products alone, the input and the residual: 8 of the input projection, 4 of the step sizes,
# 2 of the output projection, 4 of what enters; the projection to rank and states is 0.2.
PRODUCT_BYTES_PER_FEATURE = 19
# What enters a block, and the residual beside it.
INPUT_BYTES_PER_FEATURE = 4


class MambaShape(ModelShape):
    """One member of the Mamba family."""

    family: Literal["mamba"] = "mamba"
    width: Positive
    """Features of the residual stream."""
    layers: Positive
    sequence: Annotated[int, Field(ge=2)]
    """Tokens in one training sequence; a single one has no next token."""
    states: Annotated[int, Field(ge=1, le=256)] = 16
    """States of one channel."""
    convolution: Annotated[int, Field(ge=2, le=8)] = 4
    """Tokens that the causal convolution sees."""
    expansion: Positive = 2
    """Channels of a block over `width`."""
    rank: Positive
    """Rank of the step sizes; mamba_ssm takes a sixteenth of `width`, rounded up."""

    @property
    def channels(self) -> int:
        """Return the channels of the convolution and the scan."""
        return self.expansion * self.width

    @property
    def formula(self) -> str:
        """Return `model-flops/6M+27LSD`."""
        return MAMBA_FLOPS

    def products(self) -> int:
        """Count the weights of all matrix products, the head included and the embedding not."""
        projections = 3 * self.width + 2 * self.rank + 2 * self.states
        return self.layers * self.channels * projections + self.vocabulary * self.width

    def parameters(self) -> int:
        """Count the parameters; the head is its own matrix."""
        vectors = self.convolution + 1 + 1 + self.states + 1
        block = self.channels * vectors + self.width
        return self.products() + self.vocabulary * self.width + self.layers * block + self.width

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, as the publication's code counts them."""
        return 6 * self.products() + 27 * self.layers * self.states * self.width

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        width, channels = self.width, self.channels
        products = (
            Product(2 * channels, width, "columns"),
            Product(self.rank + 2 * self.states, channels, "inner"),
            Product(channels, self.rank, "columns"),
            Product(width, channels, "inner"),
        )
        block = BlockWork(
            products=products,
            vectors=channels * (self.convolution + 3 + self.states) + width,
            width=width,
            hidden=channels,
            kept=ACTIVATION_BYTES_PER_FEATURE * width,
            kept_products=PRODUCT_BYTES_PER_FEATURE * width,
            kept_input=INPUT_BYTES_PER_FEATURE * width,
            scanned=channels * self.states,
        )
        return ModelWork(
            block=block,
            layers=self.layers,
            sequence=self.sequence,
            head=Product(self.vocabulary, width, "columns"),
            embedding=self.vocabulary * width,
            tied=False,
            logit_bytes=0,
        )


SHAPE = MambaShape
