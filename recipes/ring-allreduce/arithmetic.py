"""What links must carry, and how long the published ones take for it."""

from __future__ import annotations

RING, ROOT = "link-bytes/ring", "link-bytes/root"
# Infinity Fabric as published: two rings of 100 GB/s, in one direction or in both.
PUBLISHED_GB_S = (200, 400)
PUBLISHED_MS = 100


def expected_bytes(algorithm: str, buffer_bytes: int, ranks: int) -> tuple[float, str]:
    """Return the bytes of the busiest link in one direction, and the formula.

    Two levels come to the same as one ring: each rank sends (L-1)/L, then 2(M-1)/M of 1/L, then (L-1)/L.
    """
    if algorithm == "naive":
        return float((ranks - 1) * buffer_bytes), ROOT
    return 2 * (ranks - 1) / ranks * buffer_bytes, RING


def in_words(buffer_bytes: int, ranks: int) -> str:
    """Return the arithmetic of a ring in a sentence."""
    moved, _ = expected_bytes("ring", buffer_bytes, ranks)
    times = ", ".join(f"{moved / rate / 1e6:.4g} ms at {rate} GB/s" for rate in PUBLISHED_GB_S)
    needed = moved / PUBLISHED_MS / 1e6
    return (
        f"ring of {ranks}: 2 x {ranks - 1}/{ranks} x {buffer_bytes / 1e9:.4g} GB ="
        f" {moved / 1e9:.4g} GB a link;"
        f" {times}; {PUBLISHED_MS} ms need {needed:.4g} GB/s"
    )
