"""What a change of a training setting is likely to do."""

from __future__ import annotations

from twinrun.workloads.settings import factor

# How a step is computed, not what: rounding aside, these leave the loss as it is.
ROUNDING_ONLY = {
    *("microbatch", "sharding", "attention", "activation_checkpointing", "compile", "warmup_steps"),
    *("reduction", "kernels", "layout", "controls", "summation"),
}

FACTORS = (
    factor("model", "large", "large", "arithmetic for each token, and the size of its matrices"),
    factor("shape.*", "some", "large", "part of the model"),
    factor("training.precision", "large", "some", "16 bits are several times faster and round more"),
    factor("training.global_batch", "some", "large", "work between optimizer steps; another optimisation"),
    factor("training.activation_checkpointing", "large", "none", "a third more arithmetic"),
    factor("training.attention", "large", "small", "the written-out formula keeps the whole matrix"),
    factor("training.kernels", "large", "small", "another scan and convolution"),
    factor("training.layout", "some", "small", "another order in memory around the scan"),
    factor("training.parameter_type", "some", "large", "updates below 16 bits are lost"),
    factor("training.position_weighting", "none", "large", "another loss"),
    factor("training.trainer", "large", "small", "another training loop around the same model"),
    factor("training.controls", "none", "none", "the run itself stays as it is"),
    factor("training.summation", "large", "small", "a fixed tree instead of running sums and an all-reduce"),
    factor("training.compile", "large", "small", "compiled blocks fuse kernels"),
    factor("training.sharding", "some", "small", "gathers of parameters in every step"),
    factor("training.seed", "none", "large", "another initialisation and another order of the data"),
    factor("training.optimizer.*", "none", "large", "another optimisation"),
    factor("training.data", "none", "large", "other text"),
    factor("training.microbatch", "some", "small", "size of one forward pass"),
    factor("training.*", "small", "small", "length of the run and of its warm-up"),
    factor("microbatch", "some", "small", "size of one forward pass"),
    factor("attention backend", "some", "small", "another kernel for attention"),
    factor("layout.*", "large", "small", "another way to share the work"),
    factor("parallelism", "some", "small", "another exchange of gradients and parameters"),
    factor("data hash", "none", "large", "other tokens"),
    factor("order hash", "none", "large", "other samples in a step"),
    factor("data.*", "none", "large", "another source of tokens"),
)
