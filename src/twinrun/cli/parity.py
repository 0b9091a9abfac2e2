"""`twinrun parity`: two loss curves of records or logs, or two traces, held against each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import Shown, demand_without
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, sha256_of_bytes, sha256_of_file
from twinrun.parity.answer import CurveAnswer, answer_of, judge_logs
from twinrun.parity.logs import LoggedCurve
from twinrun.parity.readers import read_log
from twinrun.parity.traces import judge_traces, read_trace
from twinrun.planning.project import Project
from twinrun.report.comparison import parity_view, write_parity_page
from twinrun.results.judged import Judged
from twinrun.results.parity import METRIC, CurveParity, curves_of, held_between
from twinrun.results.reading import read_record

# A record begins with its version, which stands in the first bytes whatever else it has.
_HEAD = 4096


def parity(
    a: Path,
    b: Path,
    /,
    *,
    controls: Annotated[tuple[Path, ...], Parameter(allow_repeating=True, consume_multiple=True)] = (),
    bound: float | None = None,
    series: str | None = None,
    points: str | None = None,
    trace: bool = False,
    out: Path | None = None,
) -> Shown:
    """Say whether two loss curves are one but for rounding: 0 one curve, 1 they differ, 3 cannot say.

    Args:
        a: record, run folder or log: lines, CSV, JSON, TensorBoard, W&B; with --trace a trace
        b: another
        controls: logs, records or traces of runs that repeat A and sum in other orders; eight or more
        bound: largest relative difference that counts as rounding, for example 1e-3
        series: name of the loss inside the logs; the usual names when left out
        points: of records, one point of A and one of B; those of one name when left out
        trace: say at which step and layer two traces begin to differ instead
        out: of records, the HTML file
    """
    demand_without("--trace", trace, bound=bound, series=series, points=points, out=out)
    if trace:
        return _traces(a, b, controls)
    if bound is not None and not 0 < bound < 1:
        raise InputError("no share", place="--bound", found=bound, allowed="more than 0, less than 1")
    paths, project = (a, b, *controls), Project(project_root())
    records = all(map(_is_record, paths))
    if records and series:
        raise InputError("of logs alone", place="--series", found=series, hint="leave it out")
    if records and bound is None:
        return _records(project, [read_record(path, project) for path in paths], points, out)
    for name, given in (("--points", points), ("--out", out)):
        if given:
            raise InputError("of records alone", place=name, found=given, hint="leave it out")
    curves = [_curves(path, project, series or "") for path in paths]
    repeats = [*curves[0][1], *curves[1][1], *(one for held, _ in curves[2:] for one in held)]
    first, second = curves[0][0][-1], curves[1][0][-1]
    same = a.samefile(b) or (a.is_file() and b.is_file() and sha256_of_file(a) == sha256_of_file(b))
    found = judge_logs(
        first, second, controls=repeats, bound=bound, metric=project.metrics[METRIC], copied=same
    )
    logs = [
        f"A: {first.in_words()}",
        f"B: {second.in_words()}",
        *(f"control: {one.in_words()}" for one in repeats),
    ]
    taken = [one.model_dump(mode="json", exclude={"steps", "values"}) for one in (first, second, *repeats)]
    return Shown(
        view=lambda: "\n".join([found.sentence, *logs, *_compared(found)]),
        data=lambda: found.model_dump(mode="json") | {"code": found.code, "logs": taken},
        code=found.code,
    )


def _compared(found: CurveAnswer) -> list[str]:
    return [f"compared: {line}" for line in found.compared]


def _traces(a: Path, b: Path, controls: Sequence[Path]) -> Shown:
    """Say at which step and layer two traces begin to differ: 0 nowhere, 1 there, 3 cannot say."""
    (first, own), (second, _) = map(_traced, (a, b))
    repeats = [read_trace(one) for one in (*controls, *own)]
    found = judge_traces(read_trace(first), read_trace(second), controls=repeats)
    data = found.model_dump(mode="json") | {"code": found.code}
    return Shown(view=lambda: found.sentence, data=lambda: data, code=found.code)


def _traced(path: Path) -> tuple[Path, list[Path]]:
    """Return the trace of a run folder and those of its control runs; a file is a trace itself."""
    if not path.is_dir():
        return path, []
    found = sorted(path.rglob("run.trace"))
    if len(found) != 1:
        hint = "`twinrun run RECIPE --trace` writes one a point; of several, name the file"
        raise InputError("expected one trace", place=str(path), found=[str(one) for one in found], hint=hint)
    return found[0], sorted(found[0].parent.glob("control-*.trace"))


def _is_record(path: Path) -> bool:
    """Say whether a path is a record, or a folder with one, by its first bytes; nothing is read whole."""
    try:
        with open_regular(path / "record.json" if path.is_dir() else path, links=True) as stream:
            # Files of the kernel that have nothing to say yet give None.
            head = stream.read(_HEAD) or b""
    except OSError:
        return False
    return b'"schema_version"' in head and head.lstrip()[:1] == b"{"


def _curves(path: Path, project: Project, series: str) -> tuple[list[LoggedCurve], list[LoggedCurve]]:
    """Return the curves of a log or of a record's whole points, and the control runs of the last."""
    if not _is_record(path):
        return [read_log(path, series=series)], []
    found = curves_of(read_record(path, project))
    if not found:
        raise InputError(f"the record has no {METRIC} by step", place=str(path))
    *_, (name, _, controls) = found
    repeats = [_as_logged(path, f"{name}, control {n}", one) for n, one in enumerate(controls, start=1)]
    return [_as_logged(path, name, values) for name, values, _ in found], repeats


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


def _records(project: Project, records: Sequence[Judged], points: str | None, out: Path | None) -> Shown:
    """Hold the curves of records against each other, and draw them."""
    named = [name.strip() for name in points.split(",")] if points else []
    claims = project.recipe(records[0].plan.recipe).published.claim
    found = held_between(
        *records[:2], points=named, metric=project.metrics[METRIC], controls=records[2:], claims=claims
    )
    answers = [_answer(one) for one in found]
    marks = "-".join(record.record.digest()[:8] for record in records[:2])
    page = out or runs_folder(project.root) / f"parity-{marks}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    write_parity_page(page, found, a=records[0], b=records[1])
    said = [
        "\n".join([f"{held.b.name} against {held.a.name}: {one.sentence}", *_compared(one)])
        for one, held in zip(answers, found, strict=True)
    ]
    # One curve that differs decides for all; one that nothing tells of leaves the answer open.
    codes = {one.code for one in answers}
    shown = [one.model_dump(mode="json") | {"code": one.code} for one in answers]
    return Shown(
        view=lambda: Group(*said, parity_view(found), f"report: {page}"),
        data=lambda: {"report": str(page), "parities": shown},
        code=1 if 1 in codes else max(codes, default=3),
    )


def _answer(held: CurveParity) -> CurveAnswer:
    a, b = held.a, held.b
    same = [
        f"{name}: {'others' if name in held.parity.differs else 'the same'}"
        for name in sorted({**a.origins, **b.origins})
    ]
    settings = "others" if "configuration" in held.parity.differs else "the same"
    steps = range(1, min(len(a.values), len(b.values)) + 1)
    counted = f"{len(steps)} steps of {len(a.values)} and {len(b.values)}"
    compared = (f"configuration: {settings}", *same, counted)
    return answer_of(held.parity, steps, a.values, b.values, compared=compared)
