"""Identifiers of the formulas that numbers are named after; an identifier is part of the number.

`model-flops/6N+12LDS` reproduces the 380 rows of LLM Foundry's benchmark tables
(github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/benchmarking/README.md).
`bus-bandwidth/all-reduce` is 2 (n - 1) / n times the bytes of a buffer over n ranks, a second, as the
PERFORMANCE.md of nccl-tests counts it.
"""

from __future__ import annotations

MODEL_FLOPS = "model-flops/6N+12LDS"
BUS_BANDWIDTH = "bus-bandwidth/all-reduce"

FORMULAS = (MODEL_FLOPS, BUS_BANDWIDTH)
