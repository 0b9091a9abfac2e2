"""Curves of records beside those of logs: read alike, and answered in the same words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular
from twinrun.parity.answer import CurveAnswer, cannot_say, cause_of, differ, one_curve
from twinrun.parity.logs import LoggedCurve, LossStep, curve_of
from twinrun.parity.population import signed_distances
from twinrun.parity.readers import read_log
from twinrun.planning.project import Project
from twinrun.results.parity import METRIC, CurveParity, curves_of
from twinrun.results.reading import read_record

# A record begins with its version, which stands in the first bytes whatever else it has.
_HEAD = 4096


def is_record(path: Path) -> bool:
    """Say whether a path is a record, or a folder with one, by its first bytes; nothing is read whole."""
    try:
        with open_regular(path / "record.json" if path.is_dir() else path, links=True) as stream:
            # Files of the kernel that have nothing to say yet give None.
            head = stream.read(_HEAD) or b""
    except OSError:
        return False
    return b'"schema_version"' in head and head.lstrip()[:1] == b"{"


def read_curves(
    path: Path, project: Project, *, series: str = "", pattern: str = ""
) -> tuple[list[LoggedCurve], list[LoggedCurve]]:
    """Return the curves of a log or of a record's whole points, and the control runs of the last.

    Raises:
        InputError: it is neither, or has no loss by step.
    """
    if not is_record(path):
        return [read_log(path, series=series, pattern=pattern)], []
    if not (found := curves_of(read_record(path, project))):
        raise InputError(f"the record has no {METRIC} by step", place=str(path))
    name, last = found[-1]
    named = [(point, one.values) for point, one in found]
    named += [(f"{name}, control {number}", one) for number, one in enumerate(last.controls, start=1)]
    told: dict[str, Any] = {"source": str(path), "form": "a record", "exact": True}
    curves = [
        curve_of((LossStep(*one, -1) for one in enumerate(values, start=1)), series=series, **told)
        for series, values in named
    ]
    return curves[: len(found)], curves[len(found) :]


def answer_between(held: CurveParity) -> CurveAnswer:
    """Return what two curves of records say of each other, with what they have in common."""
    a, b, parity = held.a, held.b, held.parity
    steps = range(1, min(len(a.values), len(b.values)) + 1)
    over = [window for window in parity.windows if window.share > 1]
    found = cannot_say(parity.reason)
    if parity.outcome == "inside":
        found = one_curve(parity.reason)
    elif parity.outcome == "start":
        found = differ(1, parity.reason)
    # A control run beyond the bound leaves the envelope cut: nothing is said of a curve outside it.
    elif over and parity.outcome in {"outside", "other-run"}:
        first = min(over, key=lambda one: one.steps)
        apart = signed_distances(a.values[: first.steps], b.values[: first.steps])
        outside = (step for step, one in enumerate(apart, start=1) if abs(one) > first.envelope)
        found = differ(next(outside, first.step), parity.reason)
    fields = ("configuration", *sorted({**a.origins, **b.origins}))
    same = [f"{name}: {'others' if name in parity.differs else 'the same'}" for name in fields]
    same.append(f"{len(steps)} steps of {len(a.values)} and {len(b.values)}")
    ends = (one.values[: len(steps)] for one in (a, b))
    cause = cause_of(steps, *ends, onset=found.step) if found.step is not None else None
    return found.model_copy(update={"compared": tuple(same), "parity": parity, "cause": cause})
