"""What a change of a benchmark's setting is likely to do."""

from __future__ import annotations

from twinrun.workloads.settings import factor

FACTORS = (
    factor("kernels", "large", "some", "other code, or another code object"),
    factor("settings.*", "large", "some", "another shape, or other inputs"),
    factor("bench.*", "some", "small", "what is timed, and how often"),
    factor("peak rate *", "some", "none", "clocks, power limits, another memory"),
)
