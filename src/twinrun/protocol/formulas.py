"""Identifiers of the formulas that numbers are named after; an identifier is part of the number.

`model-flops/6N+12LDS` reproduces the 380 rows of LLM Foundry's benchmark tables
(github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/benchmarking/README.md).
`model-flops/6M+27LSD` is 6 for each weight of a matrix product, and 9 forward and 18 backward for each
of layers, states and features of the residual stream (github:lightonai/composer@9745ebc8d2a7:mamba/mamba.py).
`bus-bandwidth/all-reduce` is 2 (n - 1) / n times the bytes of a buffer over n ranks, a second, as the
PERFORMANCE.md of nccl-tests counts it.
"""

from __future__ import annotations

MODEL_FLOPS = "model-flops/6N+12LDS"
MAMBA_FLOPS = "model-flops/6M+27LSD"
BUS_BANDWIDTH = "bus-bandwidth/all-reduce"

FORMULAS = (MODEL_FLOPS, MAMBA_FLOPS, BUS_BANDWIDTH)
