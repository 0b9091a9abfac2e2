"""`twinrun parity`, `history` and `bisect`: loss curves held together, and figures over software stacks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import Shown, resumable, tell
from twinrun.cli.program import Dry, Out, Scale, Share, demand_one, demand_with, demand_without, unasked
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.text import number, plural
from twinrun.history.bisect import EXIT, effect_in_words
from twinrun.history.pages import history_table, write_bisect_page, write_history_page
from twinrun.history.request import bisection_of
from twinrun.history.search import runs_expected
from twinrun.history.series import read_history, series_of
from twinrun.history.state_runs import RunQuestion
from twinrun.parity.answer import CurveAnswer, Precision, judge_logs
from twinrun.parity.records import answer_between, is_record, read_curves
from twinrun.parity.traces import judge_trace_files
from twinrun.planning.project import Project
from twinrun.report import comparison, tables
from twinrun.results.parity import held_between
from twinrun.results.reading import read_record


def parity(
    a: Path,
    b: Path,
    /,
    *,
    controls: Annotated[tuple[Path, ...], Parameter(consume_multiple=True)] = (),
    bound: Share = None,
    precision: Precision | None = None,
    series: str | None = None,
    pattern: str | None = None,
    points: str | None = None,
    trace: bool = False,
    out: Path | None = None,
) -> Shown:
    """Say whether two loss curves are one but for rounding: 0 one curve, 1 they differ, 3 cannot say.

    Args:
        a: record, run folder, log or its address: lines, CSV, JSON, TensorBoard, W&B; with --trace a trace
        b: another
        controls: logs, records or traces of runs that repeat A and sum in other orders
        bound: largest relative difference that counts as rounding, for example 1e-3
        precision: arithmetic of both runs; the first losses tell when left out
        series: name of the loss inside the logs; the usual names when left out
        pattern: of lines, a regular expression with the groups step and loss
        points: of records, one point of A and one of B; those of one name when left out
        trace: say at which step and layer two traces begin to differ instead
        out: of records, the HTML file
    """
    of_logs = {"precision": precision, "series": series, "pattern": pattern}
    of_records = {"points": points, "out": out}
    demand_without("trace", trace, bound=bound, **of_records, **of_logs)
    if trace:
        onset = judge_trace_files(a, b, controls)
        return Shown(onset.sentence, {**dict(onset), "code": onset.code}, onset.code)
    paths, project = (a, b, *controls), Project(project_root())
    records = all(map(is_record, paths))
    demand_with("logs", not records, **of_logs)
    demand_with("records", records and bound is None, **of_records)
    if records and bound is None:
        return _records(project, paths, points, out)
    curves = [read_curves(path, project, series=series or "", pattern=pattern or "") for path in paths]
    (first, second), own = (one[-1] for one, _ in curves[:2]), [*curves[0][1], *curves[1][1]]
    repeats = [*own, *(one for several, _ in curves[2:] for one in several)]
    same = a == b or (a.is_file() and b.is_file() and sha256_of_file(a) == sha256_of_file(b))
    found = judge_logs(first, second, controls=repeats, bound=bound, precision=precision, copied=same)
    named = [("A", first), ("B", second), *(("control", one) for one in repeats)]
    logs = [one.model_dump(mode="json", exclude={"steps", "values"}) for _, one in named]
    view = _said(found, *(f"{name}: {one.in_words()}" for name, one in named))
    return Shown(view, {**dict(found), "code": found.code, "logs": logs}, found.code)


def _said(found: CurveAnswer, *logs: str, of: str = "") -> str:
    cause = [f"likely: {found.cause}"] if found.cause else []
    return "\n".join([of + found.sentence, *cause, *logs, *(f"compared: {one}" for one in found.compared)])


def _records(project: Project, paths: tuple[Path, ...], points: str | None, out: Path | None) -> Shown:
    """Hold the curves of records against each other, and draw them."""
    a, b, *controls = (read_record(path, project) for path in paths)
    named = [name.strip() for name in points.split(",")] if points else []
    found = held_between(a, b, points=named, controls=controls)
    answers = [answer_between(one) for one in found]
    digests = "-".join(one.record.sha256[:8] for one in (a, b))
    page = out or runs_folder(project.root) / f"parity-{digests}.html"
    comparison.write_parity_page(page, found, a=a, b=b)
    names = [f"{held.b.name} against {held.a.name}: " for held in found]
    said = [_said(one, of=name) for one, name in zip(answers, names, strict=True)]
    # One curve that differs decides for all; one that nothing tells of leaves the answer open.
    codes = {one.code for one in answers}
    data = {"report": page, "parities": [{**dict(one), "code": one.code} for one in answers]}
    code = 1 if 1 in codes else max(codes, default=3)
    return Shown(Group(*said, comparison.parity_view(found), f"report: {page}"), data, code)


def history(recipe: str, /, *, point: str | None = None, metric: str | None = None, out: Out = None) -> Shown:
    """Show a recipe's figures over software stacks: what changed by more than the noise, and what differs.

    Args:
        recipe: folder of the recipe
        point: one point of the records; all when left out
        metric: row of metrics.toml; those that stand for the workload when left out
        out: the HTML file
    """
    project, runs = Project(project_root()), runs_folder(project_root())
    found = series_of(project, read_history(project, recipe, runs=runs), point=point, metric=metric)
    name = project.recipe(recipe).recipe.name
    page = write_history_page(out or runs / f"history-{name}.html", name, found)
    changes = [f"{one.name}: {change.effect_in_words}" for one in found for change in one.changes]
    view = Group(tables.View(history_table(found)), *changes, f"report: {page}")
    return Shown(view, {"report": page, "series": found})


def bisect(
    recipe: str | None = None,
    /,
    *,
    good: str,
    bad: str,
    run: str | None = None,
    number: str | None = None,
    point: str | None = None,
    metric: str | None = None,
    fails: bool = False,
    parity: bool = False,
    vendor: str | None = None,
    scale: Scale = None,
    set: tuple[str, ...] = (),
    out: Out = None,
    dry: Dry = False,
    yes: bool = False,
) -> Shown | None:
    """Find which change of the software made a figure worse, made runs fail or changed the loss.

    It ends with 0 where the change was found, 1 where it was not confirmed, 3 where no change was seen.

    Args:
        recipe: folder of the recipe; left out with --run
        good: the end before the change: a stack, a file requirements.lock, or a record
        bad: the end after it
        run: a command in place of a recipe, which finds the packages of a lock first on its path
        number: of a command, a regular expression; its last match, or group, is the number. Without it a
            run counts as failing by its exit code
        point: the point that is measured, where the recipe has several
        metric: row of metrics.toml, or a measurement by its name; the first that stands for the workload
        fails: ask instead which change makes runs fail, also if only some of them do
        parity: ask instead which change takes the loss out of the bound of its claim
        vendor: folder of images/vendors; what the machine has when left out
        scale: smoke, node or paper
        set: key=value as `run` takes it; may be given many times
        out: folder for the bisection instead of runs/
        dry: print the path and the cost and stop
        yes: start the bisection
    """
    for place, read, text in (("--run", shlex.split, run), ("--number", re.compile, number)):
        try:
            read(text or "")
        except (ValueError, re.error) as error:
            raise InputError(f"cannot be read: {error}", place=place, found=text) from None
    fails = fails or bool(run and not number)
    demand_one(fails=fails, parity=parity, metric=metric, number=number)
    demand_with("--run", bool(run), number=number)
    kind: Any = "fails" if fails else "parity" if parity else "metric"
    question = RunQuestion(kind=kind, point=point, metric=metric, number=number)
    demand_without("run", run, vendor=vendor, scale=scale, set=set, metric=metric, point=point, parity=parity)
    typed: dict[str, Any] = {"run": run, "vendor": vendor, "scale": scale, "set": set, "out": out, "dry": dry}
    work = bisection_of(Project(project_root()), good, bad, question, recipe=recipe, say=tell, **typed)
    least, most = runs_expected(work.scale, steps=len(work.path.steps))
    text = f"{least} to {most} runs, more inside a package, and an environment for each state"
    steps = [f"step {place}: {step.label}" for place, step in enumerate(work.path.steps, start=1)]
    fixed = [f"not bisected: {one}" for one in work.path.fixed]
    tell("\n".join([*steps, *fixed, f"cost: {text}", f"folder: {work.runner.folder}"]))
    if dry:
        return None
    if not yes:
        raise unasked(text, place="twinrun bisect")
    with resumable(work.runner.subject):
        found = work.finish()
    page = write_bisect_page(work.runner.folder / "bisect.html", found)
    said = [found.sentence, *map("not bisected: {}".format, found.fixed), f"report: {page}"]
    return Shown("\n".join(said), {**dict(found), "report": page}, EXIT[found.outcome])


def rerun_sides(
    a: str, b: str, *, recipe: str | None, point: str | None, metric: str | None, **typed: Any
) -> Shown:
    """Run both sides in turns on this machine, A twice; 1 where B differs by more than chance and A does."""
    if not recipe:
        raise InputError("which recipe runs is not said", place="--rerun", hint="add --recipe recipes/NAME")
    question = RunQuestion(kind="metric", point=point, metric=metric)
    work = bisection_of(Project(project_root()), a, b, question, recipe=recipe, say=tell, whole=True, **typed)
    with resumable(recipe):
        found, again = work.rerun()
    differs = found.apart and abs(found.effect.value) > abs(again.effect.value)
    rows = (("A", found.good, None), ("A again", again.bad, again), ("B", found.bad, found))
    lines = [
        f"{name:8} {number(sum(values) / len(values))} {work.unit}, {plural(len(values), 'run')}"
        + (f"; {effect_in_words(held.effect)} than A" if held else "")
        for name, values, held in rows
    ]
    more = "more" if differs else "no more"
    lines.append(f"B differs from A by {more} than chance and this machine's own noise explain.")
    data = {"difference": found, "noise": again, "differs": differs, "folder": work.runner.folder}
    return Shown("\n".join(lines), data, int(differs))
