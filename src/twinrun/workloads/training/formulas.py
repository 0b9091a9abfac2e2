"""What ZeRO leaves a rank to hold and lets it send, by its paper (arXiv:1910.02054, sections 5 and 7).

Both are for each parameter that the first rank's part of the model has: P that are no experts' over N ranks,
experts over those ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twinrun.protocol.layout import Layout
from twinrun.protocol.measurements import Fact
from twinrun.protocol.training import Reduction

# Master weights and the two moments of Adam, always in fp32.
OPTIMIZER_BYTES = 12


def state_bytes(layout: Layout, facts: Mapping[str, Fact], precision: str) -> float | None:
    """Return the bytes of parameters, gradients and optimizer state for each parameter, between two steps.

    With 16-bit parameters 2 + 12 / N and, with parameters and gradients split, 16 / N; fp32 has 4 for
    each 2. Without ZeRO there is no second copy: parameters and moments, and gradients where they are kept;
    FSDP2 splits these and keeps no gradients.
    """
    width = 4 if precision == "fp32" else 2

    def per_parameter(ranks: int) -> float:
        if layout.framework == "torch":
            return 16 if layout.plain else 12 / ranks
        if not layout.zero:
            return 12
        split = (2 * width if layout.zero == 3 else 0) + OPTIMIZER_BYTES
        return (0 if layout.zero == 3 else width) + split / ranks

    return _mean(facts, per_parameter)


def traffic(
    layout: Layout, facts: Mapping[str, Fact], *, microbatches: int, reduction: Reduction = "microbatch"
) -> float | None:
    """Return the numbers that a rank sends in a step for each parameter; None where activations are sent too.

    An all-reduce is 2 (N - 1) / N of its message, a gather or a reduce-scatter half of that. Without ZeRO
    gradients are all-reduced once a step; ZeRO-1 reduces them to their owners once and gathers the new
    parameters, ZeRO-2 reduces after each microbatch; ZeRO-3 also gathers parameters in each pass, two of a
    microbatch, and none afterwards. So does FSDP2, which with the reduction `step` gathers and reduces once.
    """
    if layout.replicas > 1 or layout.experts is not None or facts.get("first rank's expert parameters"):
        return None
    if layout.sharding == "full":
        messages = 2 if reduction == "step" else 3 * microbatches
    else:
        messages = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[layout.zero]
    ranks = int(facts["first rank's data ranks"] or 1)
    return messages * (ranks - 1) / ranks


def _mean(facts: Mapping[str, Fact], per_parameter: Callable[[int], float]) -> float:
    """Return the mean over parameters that are no experts' and those of experts, each over their ranks."""
    total = weighted = 0.0
    for kind, group in (("parameters", "data ranks"), ("expert parameters", "expert ranks")):
        count = int(facts[f"first rank's {kind}"] or 0)
        total += count
        weighted += count * per_parameter(int(facts[f"first rank's {group}"] or 1))
    return weighted / total
