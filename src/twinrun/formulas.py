"""Closed forms that numbers are named after; an identifier here is part of the datum.

`model-flops/6N+12LDS` reproduces the 380 rows of LLM Foundry's benchmark tables
(github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/benchmarking/README.md).
"""

from __future__ import annotations

from collections.abc import Callable

from twinrun.errors import InputError
from twinrun.training import ModelShape

MODEL_FLOPS = "model-flops/6N+12LDS"

# Bytes of fp32 parameters, gradients and the two moments of Adam, for each parameter.
STATE_BYTES_PER_PARAMETER = 16
# Gathered bf16 parameters and a whole fp32 sum of gradients, where both outlive a microbatch.
WHOLE_BYTES_PER_PARAMETER = 6
# Activations a block keeps for its backward pass, in bytes per token and feature of the residual
# stream, 16-bit: 34 without the attention matrix (Korthikanti et al. 2022, arXiv:2205.05198, eq. 2),
# and 3 for the work at hand: recorded peaks of MPT-1B, 3B and 7B ask for 35.6 to 37.6, and for 39.7 after a
# larger size was tried in vain. Logits are there a chunk of tokens at a time (train/models/mpt.py).
ACTIVATION_BYTES_PER_FEATURE = 37


def mpt_parameters(shape: ModelShape) -> int:
    """Count the parameters of an MPT: tied embeddings, learned positions, biases everywhere."""
    width, rows = shape.width, shape.vocabulary + shape.sequence
    attention = 4 * width * width + 4 * width
    feed_forward = 2 * shape.expansion * width * width + (shape.expansion + 1) * width
    norms = 4 * width
    return rows * width + shape.layers * (attention + feed_forward + norms) + 2 * width


PARAMETERS: dict[str, Callable[[ModelShape], int]] = {"mpt": mpt_parameters}


def parameters(shape: ModelShape) -> int:
    """Count the parameters of `shape` without building it.

    Raises:
        InputError: no closed form is known for the family.
    """
    if shape.family not in PARAMETERS:
        raise InputError("unknown model family", found=shape.family, allowed=sorted(PARAMETERS))
    return PARAMETERS[shape.family](shape)


def model_flops_per_token(shape: ModelShape) -> int:
    """Return `model-flops/6N+12LDS`, FLOP per token, forward and backward, no causal discount."""
    return 6 * parameters(shape) + 12 * shape.layers * shape.width * shape.sequence


def memory_bytes(
    shape: ModelShape, *, microbatch: int, shards: int, checkpointing: bool, whole: bool = False
) -> int:
    """Estimate the bytes one device needs to train `shape` with state split over `shards`.

    Args:
        whole: parameters and gradients are kept whole beside the shards from microbatch to microbatch.
    """
    tokens = microbatch * shape.sequence
    state = STATE_BYTES_PER_PARAMETER * parameters(shape) // shards
    if whole:
        state += WHOLE_BYTES_PER_PARAMETER * parameters(shape)
    kept = ACTIVATION_BYTES_PER_FEATURE * shape.width
    # With checkpointing a block keeps its 16-bit input; one block at a time is whole.
    blocks = shape.layers * 2 * shape.width + kept if checkpointing else shape.layers * kept
    return state + tokens * blocks
