"""What one pass of a model has to do, in counts that no GPU and no software changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Bytes of a logit while the loss is computed: 16-bit, its fp32 copy, its exponential, its 16-bit gradient.
LOGIT_BYTES = 12


@dataclass(frozen=True)
class Product:
    """A matrix of weights that every token is multiplied with."""

    columns: int
    """Features that come out."""
    inner: int
    """Features that go in."""
    cut: Literal["columns", "inner"]
    """Which of them tensor parallelism divides."""
    experts: int = 1
    """Copies of the matrix, of which a token meets `active`."""
    active: int = 1

    @property
    def weights(self) -> int:
        """Weights of all copies."""
        return self.columns * self.inner * self.experts


@dataclass(frozen=True)
class BlockWork:
    """One block; counts are of one token in the forward pass."""

    products: tuple[Product, ...]
    vectors: int
    """Parameters beside the matrices: biases, norms, convolutions."""
    width: int
    """Features of the residual stream."""
    hidden: int
    """Features between the products of the feed-forward layer, or of the scan."""
    kept: int
    """Bytes kept for the backward pass, with 16-bit activations."""
    kept_products: int
    """Bytes of these that are no cheaper to compute again: what the products take and give."""
    kept_input: int
    """Bytes of what enters the block, from which all can be computed again."""
    attention_flops: int = 0
    """Operations of queries with keys and of weights with values, every position with every other."""
    scores: int = 0
    """Elements of the attention matrices."""
    keys: int = 0
    """Features of keys and values, which ranks that share a sequence exchange."""
    scanned: int = 0
    """Channels times states of a selective scan."""

    @property
    def weights(self) -> int:
        """Parameters of the block."""
        return sum(one.weights for one in self.products) + self.vectors


@dataclass(frozen=True)
class ModelWork:
    """A model: equal blocks between an embedding and a head."""

    block: BlockWork
    layers: int
    sequence: int
    head: Product
    """The product that gives the logits."""
    embedding: int
    """Parameters of the embeddings, of the head too where both are one matrix."""
    tied: bool
    """Whether embedding and head are one matrix."""
    logit_bytes: int = LOGIT_BYTES
    """Bytes of a logit beside what blocks keep; 0 where these count the head."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, its last norm included."""
        head = 0 if self.tied else self.head.weights
        return self.layers * self.block.weights + self.embedding + head + self.block.width
