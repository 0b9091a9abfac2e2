"""Where two runs begin to differ: the first step and layer of their traces outside what control runs show."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from twinrun.foundation.errors import InputError, require_equal
from twinrun.foundation.files import open_regular
from twinrun.foundation.text import plural
from twinrun.parity.answer import CurveAnswer
from twinrun.workloads.curve_distance import LEAST_CONTROLS

TRACE_FORMAT = "twinrun-trace/1"
# A digest is a sum in fp32: closer than this, two are the same. A quarter of it is taken for nothing.
FINEST = 1e-6
# Standard errors beyond which a digest is outside. Tens of thousands are looked at, and a run is far or near
# as a whole.
REACH = 7.0
# No digest is outside that is not this many times as far as the farthest control run.
LEAST_RATIO = 4.0
_WHERE = {"weights": "before the step", "forward": "in the forward pass", "backward": "in the backward pass"}

Digests = dict[str, tuple[float, ...]]
"""By name `weights LAYER`, `forward LAYER` or `backward LAYER`, in the order of a step: norm, projections."""


class Trace(NamedTuple):
    """The digests of a run."""

    source: str
    seed: int
    steps: dict[int, Digests]


class Onset(CurveAnswer):
    """Where two runs begin to differ."""

    phase: str | None = None
    """`weights`, before the step; `forward`; or `backward`."""
    layer: str | None = None


def read_trace(path: Path) -> Trace:
    """Return the trace in a file; raises InputError for none."""
    source = str(path)
    try:
        with open_regular(path, links=True) as raw, io.BufferedReader(cast("io.RawIOBase", raw)) as lines:
            header = json.loads(lines.readline() or b"null")
            if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
                raise ValueError(f"it does not begin with {TRACE_FORMAT}")
            # The last line may be one that the run was writing when it ended.
            rows = [json.loads(line) for line in lines if line.endswith(b"\n")]
            steps = {int(row["step"]): _digests(row["digests"]) for row in rows}
            return Trace(source=source, seed=int(header["seed"]), steps=steps)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "`invoke run RECIPE --trace` or twinrun.parity.Tracer writes one"
        raise InputError("not a trace", place=source, found=found, allowed=TRACE_FORMAT, hint=hint) from None


def _digests(row: dict[str, Any]) -> Digests:
    return {name: tuple(math.nan if one is None else float(one) for one in row[name]) for name in row}


def judge_trace_files(a: Path, b: Path, controls: Sequence[Path]) -> Onset:
    """Hold the traces at two places against each other; a folder of a run has control runs of its own."""
    (first, *own), (second, *_) = map(_trace_files, (a, b))
    return judge_traces(read_trace(first), read_trace(second), controls=[*map(read_trace, (*controls, *own))])


def _trace_files(path: Path) -> list[Path]:
    """Return the trace of a run folder and those of its control runs; a file is a trace itself."""
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("run.trace"))
    if len(found) != 1:
        hint = "`twinrun run RECIPE --trace` writes one a point; of several, name the file"
        raise InputError("expected one trace", place=str(path), found=[str(one) for one in found], hint=hint)
    return [*found, *sorted(found[0].parent.glob("control-*.trace"))]


def judge_traces(a: Trace, b: Trace, *, controls: Sequence[Trace]) -> Onset:
    """Return the first step and layer at which B is farther from A than control runs of A are.

    Raises:
        InputError: the traces have other seeds.
    """
    for one in (b, *controls):
        require_equal(one.seed, a.seed, "another seed of the projections", place=one.source)
    steps = sorted(set(a.steps).intersection(b.steps, *(one.steps for one in controls)))
    repeats = [one for one in controls if any(one.steps[step] != a.steps[step] for step in steps)]
    if not steps or len(repeats) < LEAST_CONTROLS:
        needed = f"an envelope needs {LEAST_CONTROLS} traces of control runs that differ from A"
        reason = f"{needed}, there are {len(repeats)}" if steps else "no step is in all traces"
        return Onset(outcome="cannot say", sentence=f"Cannot say: {reason}.")
    cells = [(step, name) for step in steps for name in a.steps[step]]
    table = {
        (step, name): [_apart(a.steps[step][name], one.steps[step].get(name, ())) for one in repeats]
        for step, name in cells
    }
    spread, shown = _pooled_spread(table.values()), plural(len(repeats), "control run")
    for step, name in cells:
        far, own = _apart(a.steps[step][name], b.steps[step].get(name, ())), table[step, name]
        # What no control run has says nothing.
        if not all(map(math.isfinite, own)):
            continue
        middle = statistics.mean(map(_logarithm, own))
        errors = (_logarithm(far) - middle) / (spread * math.sqrt(1 + 1 / len(own)))
        if errors > REACH and far > max(FINEST, LEAST_RATIO * max(own)):
            phase, _, layer = name.partition(" ")
            what = "is in one alone, or not finite in one,"
            if math.isfinite(far):
                what = f"is {far:.2g} apart, {errors:.1f} standard errors above"
            return Onset(
                outcome="differ",
                sentence=f"They differ from step {step} on, first at `{layer}` {_WHERE.get(phase, phase)},"
                f" which {what} what {shown} show of rounding.",
                step=step,
                phase=phase,
                layer=layer,
            )
    sentence = (
        f"One curve: none of {len(cells):,} digests over {plural(len(steps), 'step')} is farther apart than"
        f" {shown} show of rounding."
    )
    return Onset(outcome="one curve", sentence=sentence)


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference of two digests, over the norm or the projection, whichever is larger."""
    if len(a) != len(b) or list(map(math.isfinite, a)) != list(map(math.isfinite, b)):
        return math.inf
    norm, pairs = max(abs(a[0]), 1e-30), zip(a, b, strict=True)
    return max(abs(x - y) / max(norm, abs(x)) for x, y in pairs) if all(map(math.isfinite, a)) else 0.0


def _logarithm(distance: float) -> float:
    return math.log(max(distance, FINEST / 4))


def _pooled_spread(table: Iterable[list[float]]) -> float:
    """Return the standard deviation of the logarithms around the means of their digests, pooled."""
    logarithms = [[_logarithm(one) for one in own] for own in table if all(map(math.isfinite, own))]
    # Digests that no control run moves say nothing of the spread.
    moved = [statistics.variance(one) for one in logarithms if max(one) > min(one)]
    return max(math.sqrt(statistics.mean(moved)), 0.1) if moved else 0.1
