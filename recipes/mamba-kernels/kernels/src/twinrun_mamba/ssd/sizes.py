"""The sizes of a call, and the constants that kernels are compiled with."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

# The least edge of a product of matrices.
LEAST_BLOCK = 16
# Elements of a (time, head) tile of the kernels that have no products.
TIMES_HEADS = 2048


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; x is (batch, length, heads, P), B is (batch, length, groups, N)."""

    batch: int
    length: int
    heads: int
    P: int
    groups: int
    N: int
    Q: int

    @classmethod
    def of(cls, x: Tensor, B: Tensor, chunk_size: int) -> Sizes:
        """Return the sizes of x and B."""
        batch, length, heads, size = x.shape
        return cls(batch, length, heads, size, B.shape[2], B.shape[3], chunk_size)

    @property
    def chunks(self) -> int:
        """Chunks of a row, the last one as long as what is left."""
        return -(-self.length // self.Q)

    @property
    def group(self) -> int:
        """Heads that share B and C."""
        return self.heads // self.groups

    @property
    def programs(self) -> int:
        """Chunks of every row and head."""
        return self.batch * self.chunks * self.heads

    @property
    def by_head(self) -> tuple[int, int, int]:
        """The shape of what there is for each head of each chunk."""
        return self.batch, self.heads, self.chunks

    @property
    def states(self) -> tuple[int, int, int, int, int]:
        """The shape of a state of each chunk."""
        return self.batch, self.chunks, self.heads, self.P, self.N

    @property
    def products(self) -> tuple[int, int, int, int, int]:
        """The shape of the products of C and B."""
        return self.batch, self.chunks, self.groups, self.Q, self.Q

    @property
    def block_p(self) -> int:
        """Columns of a tile of x, a power of two."""
        return max(LEAST_BLOCK, int(triton.next_power_of_2(self.P)))

    @property
    def heads_of_a_tile(self) -> int:
        """Heads that a program without products takes."""
        return min(int(triton.next_power_of_2(self.heads)), max(1, TIMES_HEADS // self.Q))

    @property
    def head_tiles(self) -> int:
        """Programs without products of all chunks."""
        return -(-self.heads // self.heads_of_a_tile) * self.batch * self.chunks

    @property
    def columns(self) -> int:
        """Columns of a tile of a state at most, a power of two."""
        return max(LEAST_BLOCK, int(triton.next_power_of_2(self.N)))

    def passes(self, elements: int) -> int:
        """Return the programs that share a state, of so many elements each."""
        return -(-self.P * self.N // elements)
