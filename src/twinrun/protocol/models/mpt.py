"""MPT: a GPT with tied embeddings, biases everywhere, and learned positions or ALiBi."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.protocol.formulas import MODEL_FLOPS
from twinrun.protocol.models.shape import ModelShape, Positive
from twinrun.protocol.work import BlockWork, ModelWork, Product

# Activations a block keeps for its backward pass, in bytes per token and feature of the residual
# stream, 16-bit, without the attention matrix (Korthikanti et al. 2022, arXiv:2205.05198, eq. 2).
ACTIVATION_BYTES_PER_FEATURE = 34
# Of these the products alone: 6 of queries, keys and values, 2 of attention, 8 of the expansion, and 1 that
# the recorded peaks of MPT-7B and 13B ask for.
PRODUCT_BYTES_PER_FEATURE = 17
# What enters a block.
INPUT_BYTES_PER_FEATURE = 2


class MptShape(ModelShape):
    """One member of the MPT family."""

    fixed = {"kernels": None, "layout": None, "position_weighting": None, "parameter_type": "fp32"}  # noqa: RUF012

    family: Literal["mpt"] = "mpt"
    width: Positive
    """Features of the residual stream."""
    heads: Positive
    layers: Positive
    expansion: Positive = 4
    """Width of the feed-forward layer over `width`."""
    experts: Annotated[int, Field(ge=2)] | None = None
    """Feed-forward layers of a block, one of which computes a token; where not given there is only one."""

    alibi: Literal[True] | None = None
    """Scores fall with the distance of a key, by slopes of the heads; there are no learned positions then."""

    @model_validator(mode="after")
    def _whole_heads(self) -> MptShape:
        if self.width % self.heads:
            raise ValueError(f"`heads` must divide `width`: {self.heads} does not divide {self.width}")
        return self

    @property
    def formula(self) -> str:
        """Return `model-flops/6N+12LDS`."""
        return MODEL_FLOPS

    def attention_heads(self) -> int:
        """Return the number of attention heads."""
        return self.heads

    def head_size(self) -> int:
        """Return the width of a head."""
        return self.width // self.heads

    def parameters(self) -> int:
        """Count the parameters, norms and position rows included."""
        width, rows = self.width, self.vocabulary + (0 if self.alibi else self.sequence)
        attention = 4 * width * width + 4 * width
        feed_forward = 2 * self.expansion * width * width + (self.expansion + 1) * width
        norms = 4 * width
        whole = rows * width + self.layers * (attention + feed_forward + norms) + 2 * width
        others = (self.experts - 1) * feed_forward if self.experts else 0
        return whole + self.layers * (others + self._router())

    def flops_per_token(self) -> int:
        """Return the FLOP of a token, forward and backward, no causal discount; one expert computes it."""
        dense = self.model_copy(update={"experts": None}) if self.experts else self
        return (
            6 * (dense.parameters() + self.layers * self._router())
            + 12 * self.layers * self.width * self.sequence
        )

    def work(self) -> ModelWork:
        """Return what a pass has to do."""
        width, hidden, experts = self.width, self.expansion * self.width, self.experts or 1
        products = (
            Product(3 * width, width, "columns"),
            Product(width, width, "inner"),
            Product(hidden, width, "columns", experts),
            Product(width, hidden, "inner", experts),
        )
        block = BlockWork(
            products=products,
            vectors=(8 + (self.expansion + 1) * experts) * width + self._router(),
            width=width,
            hidden=hidden,
            kept=ACTIVATION_BYTES_PER_FEATURE * width,
            kept_products=PRODUCT_BYTES_PER_FEATURE * width,
            kept_input=INPUT_BYTES_PER_FEATURE * width,
            attention_flops=4 * self.sequence * width,
            scores=self.heads * self.sequence,
        )
        return ModelWork(
            block=block,
            layers=self.layers,
            sequence=self.sequence,
            head=Product(self.vocabulary, width, "columns"),
            embedding=(self.vocabulary + (0 if self.alibi else self.sequence)) * width + width,
            tied=True,
        )

    def _router(self) -> int:
        """Return the weights of one router."""
        return self.experts * self.width if self.experts else 0


SHAPE = MptShape
