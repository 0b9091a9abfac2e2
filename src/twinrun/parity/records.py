"""Curves of records beside those of logs: read alike, and answered in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, sha256_of_bytes
from twinrun.foundation.text import plural
from twinrun.parity.answer import CurveAnswer, cannot_say
from twinrun.parity.causes import cause_of
from twinrun.parity.logs import LoggedCurve
from twinrun.parity.population import signed_distances
from twinrun.parity.readers import read_log
from twinrun.planning.project import Project
from twinrun.results.parity import METRIC, CurveParity, curves_of
from twinrun.results.reading import read_record
from twinrun.workloads.curve_distance import Parity, Window

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
    repeats = [(f"{name}, control {number}", one) for number, one in enumerate(last.controls, start=1)]
    curves, further = (
        [
            LoggedCurve(
                source=str(path),
                format="a record",
                series=series,
                steps=tuple(range(1, len(values) + 1)),
                values=values,
                unit=0.0,
                digest=sha256_of_bytes(repr(values).encode()),
            )
            for series, values in several
        ]
        for several in ([(name, one.values) for name, one in found], repeats)
    )
    return curves, further


def answer_between(held: CurveParity) -> CurveAnswer:
    """Return what two curves of records say of each other, with what they have in common."""
    a, b, differs = held.a, held.b, held.parity.differs
    fields = ("configuration", *sorted({**a.origins, **b.origins}))
    steps = range(1, min(len(a.values), len(b.values)) + 1)
    same = [f"{name}: {'others' if name in differs else 'the same'}" for name in fields]
    counted = f"{len(steps)} steps of {len(a.values)} and {len(b.values)}"
    return answer_of(held.parity, steps, a.values, b.values, compared=(*same, counted))


def answer_of(
    held: Parity, steps: Sequence[int], a: Sequence[float], b: Sequence[float], *, compared: tuple[str, ...]
) -> CurveAnswer:
    """Return the answer that follows from a parity of two records, `steps` being those of `a` and `b`."""
    over = [window for window in held.windows if window.share > 1]
    found: CurveAnswer
    if held.outcome == "inside" and (window := held.worst):
        sentence = (
            f"One curve: over {plural(window.steps, 'step')} at most {window.distance:.2g} apart, where one"
            f" more of {plural(len(window.controls), 'control run')} would be up to {window.envelope:.2g}."
        )
        found = CurveAnswer(outcome="one curve", sentence=sentence, errors=window.errors)
    elif held.outcome == "start":
        sentence = f"They differ from the first step on: {held.reason}."
        found = CurveAnswer(outcome="differ", sentence=sentence, step=steps[0])
    # A control run beyond the bound leaves the envelope cut: nothing is said of a curve outside it.
    elif over and held.outcome in {"outside", "other-run"}:
        place = min(_first_outside(a, b, window) for window in over)
        far = max(over, key=lambda one: one.errors)
        because = "".join(f"; {name} {sides}" for name, sides in held.differs.items())
        sentence = (
            f"They differ from step {steps[place]} on: {far.distance:.2g} apart at step"
            f" {steps[far.step - 1]}, which is {far.errors:.1f} standard errors above the middle of"
            f" {plural(len(far.controls), 'control run')}, of which a further one would be up to"
            f" {far.envelope:.2g}{because}."
        )
        found = CurveAnswer(outcome="differ", sentence=sentence, step=steps[place], errors=far.errors)
    else:
        found = cannot_say(held.reason)
    cause = cause_of(steps, a, b, onset=found.step) if found.step is not None else None
    return found.model_copy(update={"compared": compared, "parity": held, "cause": cause})


def _first_outside(a: Sequence[float], b: Sequence[float], window: Window) -> int:
    apart = signed_distances(a[: window.steps], b[: window.steps])
    return next((place for place, one in enumerate(apart) if abs(one) > window.envelope), window.step - 1)
