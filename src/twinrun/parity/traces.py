"""Where two runs begin to differ: the first step and layer of their traces outside what control runs show."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.parity.answer import CODES, CurveAnswerOutcome
from twinrun.workloads.curve_distance import LEAST_CONTROLS

TRACE_FORMAT = "twinrun-trace/1"
# A digest is a sum in fp32: closer than this, two are the same. A quarter of it is taken for nothing.
FINEST = 1e-6
# Standard errors beyond which a digest is outside. Tens of thousands are looked at, and a run is far or near
# as a whole.
REACH = 7.0
# No digest is outside that is not this many times as far as the farthest control run.
LEAST_RATIO = 4.0
# A step may be a line of a large model: thousands of layers, a hundred bytes each.
_LONGEST = 1 << 26

Digests = dict[str, tuple[float, ...]]
"""By name `weights LAYER`, `forward LAYER` or `backward LAYER`, in the order of a step: norm, projections."""


class Trace(NamedTuple):
    """The digests of a run."""

    source: str
    seed: int
    steps: dict[int, Digests]


class Onset(Frozen):
    """Where two runs begin to differ."""

    outcome: CurveAnswerOutcome
    sentence: str
    step: int | None = None
    phase: str | None = None
    """`weights`, before the step; `forward`; or `backward`."""
    layer: str | None = None
    errors: float | None = None
    """Standard errors above the middle of the control runs; null where one of the two is not finite."""

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return CODES[self.outcome]


def read_trace(path: Path) -> Trace:
    """Return the trace in a file; raises InputError for none."""
    source = str(path)
    try:
        with open_regular(path, links=True) as raw:
            lines = iter(lambda: _line(raw), b"")
            header = json.loads(next(lines, b"") or b"null")
            if not isinstance(header, dict) or header.get("format") != TRACE_FORMAT:
                raise ValueError(f"it does not begin with {TRACE_FORMAT}")
            steps = dict(_steps(lines))
            return Trace(source=source, seed=int(header["seed"]), steps=steps)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "`invoke run RECIPE --trace` or twinrun.parity.Tracer writes one"
        raise InputError("not a trace", place=source, found=found, allowed=TRACE_FORMAT, hint=hint) from None


def _line(stream: Any) -> bytes:
    parts = []
    while part := stream.readline(_LONGEST):
        parts.append(part)
        if part.endswith(b"\n"):
            break
        if len(part) >= _LONGEST:
            raise ValueError("a line without an end")
    return b"".join(parts)


def _steps(lines: Iterator[bytes]) -> Iterator[tuple[int, Digests]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            # The line that a run was writing when it ended.
            return
        digests = {
            name: tuple(math.nan if one is None else float(one) for one in values)
            for name, values in row["digests"].items()
        }
        yield int(row["step"]), digests


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
        if one.seed != a.seed:
            raise InputError(
                "another seed of the projections", place=one.source, found=one.seed, allowed=a.seed
            )
    steps = sorted(set(a.steps).intersection(b.steps, *(one.steps for one in controls)))
    if not steps:
        return Onset(outcome="cannot say", sentence="Cannot say: no step is in all traces.")
    repeats = [one for one in controls if any(one.steps[step] != a.steps[step] for step in steps)]
    if len(repeats) < LEAST_CONTROLS:
        return Onset(
            outcome="cannot say",
            sentence=f"Cannot say: an envelope needs {LEAST_CONTROLS} traces of control runs that differ from"
            f" A, there are {len(repeats)}.",
        )
    table = _distances(a, repeats, steps)
    spread = _pooled_spread(table)
    for step in steps:
        for name, digest in a.steps[step].items():
            if (other := b.steps[step].get(name)) is None:
                return _onset(step, name, "is in A alone", len(repeats), None)
            far = _apart(digest, other)
            own = table.get((step, name))
            if own is None:
                continue
            errors = _errors(far, own, spread)
            if errors > REACH and far > max(FINEST, LEAST_RATIO * max(own)):
                what = f"is {far:.2g} apart" if math.isfinite(far) else "is not finite in one of them"
                return _onset(step, name, what, len(repeats), errors)
    cells = sum(len(a.steps[step]) for step in steps)
    sentence = (
        f"One curve: none of {cells:,} digests over {plural(len(steps), 'step')} is farther apart than"
        f" {plural(len(repeats), 'control run')} show of rounding."
    )
    return Onset(outcome="one curve", sentence=sentence)


def _onset(step: int, name: str, what: str, controls: int, errors: float | None) -> Onset:
    phase, _, layer = name.partition(" ")
    far = "" if errors is None or math.isinf(errors) else f", {errors:.1f} standard errors above"
    where = {
        "weights": "before the step",
        "forward": "in the forward pass",
        "backward": "in the backward pass",
    }
    sentence = (
        f"They differ from step {step} on, first at `{layer}` {where.get(phase, phase)}, which {what}{far}"
        f" what {plural(controls, 'control run')} show of rounding."
    )
    known = errors if errors is not None and math.isfinite(errors) else None
    return Onset(outcome="differ", sentence=sentence, step=step, phase=phase, layer=layer, errors=known)


def _distances(
    a: Trace, controls: Sequence[Trace], steps: Sequence[int]
) -> dict[tuple[int, str], list[float]]:
    """Return how far each control run is from A, by step and name, of digests that all of them have."""
    found = {}
    for step in steps:
        for name, digest in a.steps[step].items():
            others = [one.steps[step].get(name) for one in controls]
            if all(one is not None for one in others):
                found[step, name] = [_apart(digest, one) for one in others if one is not None]
    return found


def _apart(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest difference of two digests, over the norm or the projection, whichever is larger."""
    if len(a) != len(b):
        return math.inf
    if not all(map(math.isfinite, (*a, *b))):
        return 0.0 if [math.isfinite(one) for one in a] == [math.isfinite(one) for one in b] else math.inf
    norm = max(abs(a[0]), 1e-30)
    return max(abs(one - other) / max(norm, abs(one)) for one, other in zip(a, b, strict=True))


def _logarithm(distance: float) -> float:
    return math.log(max(distance, FINEST / 4))


def _pooled_spread(table: dict[tuple[int, str], list[float]]) -> float:
    """Return the standard deviation of the logarithms around the means of their digests, pooled."""
    logarithms = [[_logarithm(one) for one in own] for own in table.values() if all(map(math.isfinite, own))]
    # Digests that no control run moves say nothing of the spread.
    moved = [one for one in logarithms if max(one) > min(one)]
    if not moved:
        return 0.1
    return max(math.sqrt(statistics.mean(statistics.variance(one) for one in moved)), 0.1)


def _errors(far: float, own: Sequence[float], spread: float) -> float:
    if not math.isfinite(far):
        return math.inf
    if not all(map(math.isfinite, own)):
        return 0.0
    middle = statistics.mean(map(_logarithm, own))
    return (_logarithm(far) - middle) / (spread * math.sqrt(1 + 1 / len(own)))
