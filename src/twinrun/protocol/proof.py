"""One all-reduce over two nodes: what `twinrun site qualify` measures."""

from __future__ import annotations

from twinrun.protocol.job import Result


class ProofResult(Result):
    """What the ranks measured."""

    message_bytes: int
    seconds: float
    """Time of one all-reduce, the shortest of several."""
    ranks: int

    @property
    def bus_gb_s(self) -> float:
        """Bytes that each link carries in a second, in GB: 2 (N - 1) / N of the message."""
        return 2 * (self.ranks - 1) / self.ranks * self.message_bytes / self.seconds / 1e9
