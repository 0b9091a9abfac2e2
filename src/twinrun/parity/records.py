"""Curves of records beside those of logs: read alike, and answered in the same words."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, sha256_of_bytes
from twinrun.parity.answer import CurveAnswer, answer_of
from twinrun.parity.logs import LoggedCurve
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
    path: Path, project: Project, *, series: str = ""
) -> tuple[list[LoggedCurve], list[LoggedCurve]]:
    """Return the curves of a log or of a record's whole points, and the control runs of the last.

    Raises:
        InputError: it is neither, or has no loss by step.
    """
    if not is_record(path):
        return [read_log(path, series=series)], []
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
