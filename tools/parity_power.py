"""How large a fault is seen after how many steps with how many control runs: `python tools/parity_power.py`.

Two losses of one training differ by noise that grows with the steps, each run by a factor of its own.
Middle and spread of fp32 and bf16 are those of docs/concepts/parity.csv. A fault adds a relative
difference that grows evenly to its size at the last step. The judge is that of `invoke parity`. A cell
is the smallest fault of the list that is found in 95 of 100 pairs.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from twinrun.workloads.curve_distance import FIRST, envelope_of

# Middle of the distances of control runs over 200 steps, and the deviation of their logarithms between runs.
NOISE = {"fp32": (1.6e-7, 0.12), "bf16": (7.0e-4, 0.14), "scattered": (1e-6, 1.2)}
FAULTS = [size * ten for ten in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2) for size in (1, 2, 5)]
PAIRS = 100


def distances(
    draw: np.random.Generator, noise: tuple[float, float], steps: int, fault: float
) -> tuple[float, float]:
    """Return the largest differences over the first steps and over all, of one run with a fault."""
    middle, spread = noise
    place = np.arange(1, steps + 1)
    # The largest of some hundred draws is about 2.7 deviations away.
    deviation = middle / 2.7 * np.sqrt(place / 200) * math.exp(spread * draw.standard_normal())
    apart = np.abs(deviation * draw.standard_normal(steps) + fault * place / steps)
    return float(apart[:FIRST].max()), float(apart.max())


def found(
    draw: np.random.Generator, noise: tuple[float, float], steps: int, controls: int, fault: float
) -> float:
    """Return the share of pairs that are told apart."""
    hits = 0
    for _ in range(PAIRS):
        made = [distances(draw, noise, steps, 0.0) for _ in range(controls)]
        envelopes = [envelope_of(one) for one in zip(*made, strict=True)]
        far = distances(draw, noise, steps, fault)
        hits += any(one > envelope for one, envelope in zip(far, envelopes, strict=True))
    return hits / PAIRS


def main() -> int:
    """Print the table in Markdown."""
    print("| noise | control runs | 50 steps | 200 steps | 1,000 steps | false alarms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, noise in NOISE.items():
        for controls in (8, 12):
            draw = np.random.default_rng(7)
            cells = []
            for steps in (50, 200, 1000):
                seen = (one for one in FAULTS if found(draw, noise, steps, controls, one) >= 0.95)
                least = next(seen, None)
                cells.append("more" if least is None else f"{least:.0e}")
            alarms = np.mean([found(draw, noise, 200, controls, 0.0) for _ in range(10)])
            print(f"| {name} | {controls} | {' | '.join(cells)} | {100 * alarms:.2f} % |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
