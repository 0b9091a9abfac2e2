"""A training and its layout as predictions know them: who holds and computes what."""

from __future__ import annotations

from twinrun.predict.parallel_layout import ParallelLayout, Recomputation, Shards
from twinrun.protocol.layout import DEEPSPEED, Arithmetic, Layout
from twinrun.protocol.training import Training

BYTES: dict[Arithmetic, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
STAGES: tuple[Shards, ...] = ("none", "optimizer", "gradients", "parameters")


def parallel_layout(training: Training, layout: Layout | None, *, microbatch: int) -> ParallelLayout:
    """Return how a training is shared; of a layout, what it says beside the training."""
    width = BYTES[training.precision]
    # The plain loop keeps all whatever was asked for.
    again: Recomputation = training.trainer != "plain" and training.activation_checkpointing
    if layout is None or layout.framework != DEEPSPEED:
        sharded = (layout.sharding if layout else training.sharding) == "full"
        return ParallelLayout(
            global_batch=training.global_batch,
            microbatch=microbatch,
            shards="parameters" if sharded else "none",
            recomputation=again,
            parameter_bytes=BYTES[training.parameter_type],
            reduced_bytes=width,
            kept_whole=sharded and training.reduction == "step",
            fp8=training.precision == "fp8",
        )
    # ZeRO keeps what it trains in 16 bits, and the fp32 copy with the optimizer.
    parameter_bytes = width if layout.zero else BYTES[training.parameter_type]
    return ParallelLayout(
        global_batch=training.global_batch,
        microbatch=microbatch,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        experts=layout.experts or 1,
        shards=STAGES[layout.zero],
        offload=layout.offload,
        recomputation=again,
        parameter_bytes=parameter_bytes,
        masters=bool(layout.zero),
        reduced_bytes=width,
        gradient_bytes=width if layout.zero else 4,
        kept_whole=layout.zero == len(STAGES) - 1,
    )
