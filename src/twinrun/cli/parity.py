"""`invoke parity`: two loss curves of records or logs, or two traces, held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, sha256_of_bytes, sha256_of_file
from twinrun.foundation.terminal import say
from twinrun.parity.answer import CurveAnswer, answer_of, judge_logs
from twinrun.parity.logs import LoggedCurve
from twinrun.parity.readers import read_log
from twinrun.parity.traces import judge_traces, read_trace
from twinrun.planning.project import Project
from twinrun.report.comparison import parity_view, write_parity_page
from twinrun.report.terminal import show
from twinrun.results.parity import METRIC, CurveParity, curves_of, held_between
from twinrun.results.reading import read_record
from twinrun.results.record import Record

# A record begins with its version, which stands in the first bytes whatever else it has.
_HEAD = 4096


class ParityRequest(NamedTuple):
    """What beside the logs was asked for."""

    bound: float | None
    series: str
    points: str
    out: Path | None


def parity(
    root: Path, a: Path, b: Path, *, controls: Sequence[Path], asked: ParityRequest, as_json: bool
) -> int:
    """Say whether two curves are one: 0 one curve, 1 they differ, 3 cannot say."""
    if asked.bound is not None and not 0 < asked.bound < 1:
        raise InputError("no share", place="--bound", found=asked.bound, allowed="more than 0, less than 1")
    project = Project(root)
    paths = (a, b, *controls)
    if asked.series and all(map(_is_record, paths)):
        raise InputError("of logs alone", place="--series", found=asked.series, hint="leave it out")
    if all(map(_is_record, paths)) and asked.bound is None:
        records = [read_record(path, project) for path in paths]
        return _records(project, records, asked=asked, as_json=as_json)
    for name, given in (("--points", asked.points), ("--out", asked.out)):
        if given:
            raise InputError("of records alone", place=name, found=given, hint="leave it out")
    curves = [one for path in paths for one in _curves(path, project, asked.series, all_=path in paths[2:])]
    repeats = [*(one for path in paths[:2] for one in _own_controls(path, project)), *curves[2:]]
    found = judge_logs(
        *curves[:2], controls=repeats, bound=asked.bound, metric=project.metrics[METRIC], copied=_copied(a, b)
    )
    if as_json:
        taken = [one.model_dump(mode="json", exclude={"steps", "values"}) for one in (*curves[:2], *repeats)]
        print_json(_shown(found) | {"logs": taken})
    else:
        say(found.sentence)
        for name, one in zip("AB", curves, strict=False):
            say(f"{name}: {one.in_words()}")
        for one in repeats:
            say(f"control: {one.in_words()}")
        _say_compared(found)
    return found.code


def traces(a: Path, b: Path, *, controls: Sequence[Path], as_json: bool) -> int:
    """Say at which step and layer two traces begin to differ: 0 nowhere, 1 there, 3 cannot say."""
    runs, repeats = [], list(controls)
    for path in (a, b):
        run, own = _traced(path)
        runs.append(read_trace(run))
        repeats += own if path == a else []
    found = judge_traces(*runs, controls=[read_trace(one) for one in repeats])
    if as_json:
        print_json(found.model_dump(mode="json") | {"code": found.code})
    else:
        say(found.sentence)
    return found.code


def _traced(path: Path) -> tuple[Path, list[Path]]:
    """Return the trace of a run folder and those of its control runs; a file is a trace itself."""
    if not path.is_dir():
        return path, []
    found = sorted(path.rglob("run.trace"))
    if len(found) != 1:
        hint = "`invoke run RECIPE --trace` writes one a point; of several, name the file"
        raise InputError("expected one trace", place=str(path), found=[str(one) for one in found], hint=hint)
    return found[0], sorted(found[0].parent.glob("control-*.trace"))


def _copied(a: Path, b: Path) -> bool:
    """Say whether two paths are one file or folder, or files with the same bytes."""
    if a.samefile(b):
        return True
    files = a.is_file() and b.is_file()
    return files and a.stat().st_size == b.stat().st_size and sha256_of_file(a) == sha256_of_file(b)


def _shown(found: CurveAnswer) -> dict[str, Any]:
    return found.model_dump(mode="json") | {"code": found.code}


def _say_compared(found: CurveAnswer) -> None:
    for line in found.compared:
        say(f"compared: {line}")


def _is_record(path: Path) -> bool:
    """Say whether a path is a record, or a folder with one, by its first bytes; nothing is read whole."""
    file = path / "record.json" if path.is_dir() else path
    try:
        with open_regular(file, links=True) as stream:
            head = stream.read(_HEAD)
    except OSError:
        return False
    return b'"schema_version"' in head and head.lstrip()[:1] == b"{"


def _curves(path: Path, project: Project, series: str, *, all_: bool) -> list[LoggedCurve]:
    """Return the curve of a log, or those of a record: the last of its whole ones, or all as controls."""
    if not _is_record(path):
        return [read_log(path, series=series)]
    found = curves_of(read_record(path, project))
    if not found:
        raise InputError(f"the record has no {METRIC} by step", place=str(path))
    runs = found if all_ else found[-1:]
    return [_as_logged(path, name, values) for name, values, _ in runs]


def _own_controls(path: Path, project: Project) -> list[LoggedCurve]:
    """Return the control runs that a record has of its last curve."""
    if not _is_record(path):
        return []
    *_, (name, _, controls) = curves_of(read_record(path, project))
    return [
        _as_logged(path, f"{name}, control {number}", one) for number, one in enumerate(controls, start=1)
    ]


def _as_logged(path: Path, name: str, values: Sequence[float]) -> LoggedCurve:
    return LoggedCurve(
        source=str(path),
        format="a record",
        series=name,
        steps=tuple(range(1, len(values) + 1)),
        values=tuple(values),
        unit=0.0,
        digest=sha256_of_bytes(repr(tuple(values)).encode()),
    )


def _records(project: Project, records: Sequence[Record], *, asked: ParityRequest, as_json: bool) -> int:
    """Hold the curves of records against each other, and draw them."""
    named = [name.strip() for name in asked.points.split(",")] if asked.points else []
    claims = project.recipe(records[0].plan.recipe).published.claim
    found = held_between(
        *records[:2], points=named, metric=project.metrics[METRIC], controls=records[2:], claims=claims
    )
    answers = [_answer(one) for one in found]
    marks = "-".join(record.digest()[:8] for record in records[:2])
    page = asked.out or project.root / "runs" / f"parity-{marks}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_parity_page(page, found, a=records[0], b=records[1])
    if as_json:
        print_json({"report": str(page), "parities": [_shown(one) for one in answers]})
    else:
        for one, held in zip(answers, found, strict=True):
            say(f"{held.b.name} against {held.a.name}: {one.sentence}")
            _say_compared(one)
        show(parity_view(found))
        say(f"report: {page}")
    # One curve that differs decides for all; one that nothing tells of leaves the answer open.
    codes = {one.code for one in answers}
    return 1 if 1 in codes else max(codes, default=3)


def _answer(held: CurveParity) -> CurveAnswer:
    a, b = held.a, held.b
    known = {**a.origins, **b.origins}
    same = [f"{name}: {'others' if name in held.parity.differs else 'the same'}" for name in sorted(known)]
    settings = "others" if "configuration" in held.parity.differs else "the same"
    steps = range(1, min(len(a.values), len(b.values)) + 1)
    compared = (
        f"configuration: {settings}",
        *same,
        f"{len(steps)} steps of {len(a.values)} and {len(b.values)}",
    )
    return answer_of(held.parity, steps, a.values, b.values, compared=compared)
