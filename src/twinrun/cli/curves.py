"""`twinrun parity`, `history` and `bisect`: loss curves held together, and figures over software stacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import LONG_SECONDS, Shown, agreed, demand_without, tell
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.text import number, plural
from twinrun.history.bisect import EXIT, effect_in_words
from twinrun.history.pages import history_table, write_bisect_page, write_history_page
from twinrun.history.path import at_once
from twinrun.history.request import Search, SearchRequest
from twinrun.history.rerun import rerun
from twinrun.history.series import read_history, series_of
from twinrun.history.state_runs import RunQuestion
from twinrun.parity.answer import CurveAnswer, Precision, judge_logs
from twinrun.parity.records import answer_between, is_record, read_curves
from twinrun.parity.traces import judge_trace_files
from twinrun.planning.project import Project
from twinrun.report.comparison import parity_view, write_parity_page
from twinrun.report.tables import View
from twinrun.results.parity import METRIC, held_between
from twinrun.results.reading import read_record
from twinrun.runs.prepared import demand_room

Found = TypeVar("Found")


def parity(
    a: Path,
    b: Path,
    /,
    *,
    controls: Annotated[tuple[Path, ...], Parameter(allow_repeating=True, consume_multiple=True)] = (),
    bound: float | None = None,
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
    demand_without("--trace", trace, bound=bound, points=points, out=out, **of_logs)
    if trace:
        onset = judge_trace_files(a, b, controls)
        data = onset.model_dump(mode="json") | {"code": onset.code}
        return Shown(view=lambda: onset.sentence, data=lambda: data, code=onset.code)
    if bound is not None and not 0 < bound < 1:
        raise InputError("no share", place="--bound", found=bound, allowed="more than 0, less than 1")
    paths, project = (a, b, *controls), Project(project_root())
    records = all(map(is_record, paths))
    for name, asked in of_logs.items():
        if records and asked:
            raise InputError("of logs alone", place=f"--{name}", found=asked, hint="leave it out")
    if records and bound is None:
        return _records(project, paths, points, out)
    for name, given in (("--points", points), ("--out", out)):
        if given:
            raise InputError("of records alone", place=name, found=given, hint="leave it out")
    curves = [read_curves(path, project, series=series or "", pattern=pattern or "") for path in paths]
    (first, second), own = (one[-1] for one, _ in curves[:2]), [*curves[0][1], *curves[1][1]]
    repeats = [*own, *(one for several, _ in curves[2:] for one in several)]
    same = a == b or (a.is_file() and b.is_file() and sha256_of_file(a) == sha256_of_file(b))
    found = judge_logs(first, second, controls=repeats, bound=bound, precision=precision, copied=same)
    named = {"A": first, "B": second}.items()
    logs = [f"{name}: {one.in_words()}" for name, one in (*named, *(("control", one) for one in repeats))]
    taken = [one.model_dump(mode="json", exclude={"steps", "values"}) for one in (first, second, *repeats)]
    return Shown(
        view=lambda: "\n".join(
            [found.sentence, *(["likely: " + found.cause] if found.cause else []), *logs, *_compared(found)]
        ),
        data=lambda: found.model_dump(mode="json") | {"code": found.code, "logs": taken},
        code=found.code,
    )


def _compared(found: CurveAnswer) -> list[str]:
    return [f"compared: {line}" for line in found.compared]


def _records(project: Project, paths: tuple[Path, ...], points: str | None, out: Path | None) -> Shown:
    """Hold the curves of records against each other, and draw them."""
    a, b, *controls = (read_record(path, project) for path in paths)
    named = [name.strip() for name in points.split(",")] if points else []
    claims, metric = project.recipe(a.plan.recipe).published.claim, project.metrics[METRIC]
    found = held_between(a, b, points=named, metric=metric, controls=controls, claims=claims)
    answers = [answer_between(one) for one in found]
    page = (
        out
        or runs_folder(project.root) / f"parity-{'-'.join(one.record.digest()[:8] for one in (a, b))}.html"
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    write_parity_page(page, found, a=a, b=b)
    said = [
        "\n".join(
            [
                f"{held.b.name} against {held.a.name}: {one.sentence}",
                *(["likely: " + one.cause] if one.cause else []),
                *_compared(one),
            ]
        )
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


def history(
    recipe: str,
    /,
    *,
    point: str | None = None,
    metric: str | None = None,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
) -> Shown:
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
    return Shown(
        view=lambda: Group(View(history_table(found)), *changes, f"report: {page}"),
        data=lambda: {"report": str(page), "series": [one.model_dump(mode="json") for one in found]},
    )


def bisect(
    recipe: str,
    /,
    *,
    good: str,
    bad: str,
    point: str | None = None,
    metric: str | None = None,
    fails: bool = False,
    parity: bool = False,
    vendor: str | None = None,
    scale: Literal["smoke", "node", "paper"] | None = None,
    set: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    dry: Annotated[bool, Parameter(alias="-n")] = False,
    yes: bool = False,
) -> Shown | None:
    """Find which change of the software made a figure worse, made runs fail or changed the loss.

    It ends with 0 where the change was found, 1 where it was not confirmed, 3 where no change was seen.

    Args:
        recipe: folder of the recipe
        good: the end before the change: a stack, a file requirements.lock, or a record
        bad: the end after it
        point: the point that is measured, where the recipe has several
        metric: row of metrics.toml, or a measurement by its name; the first that stands for the workload
        fails: ask instead which change makes runs fail, also if only some of them do
        parity: ask instead which change takes the loss out of the bound of its claim
        vendor: folder of images/vendors; what the machine has when left out
        scale: smoke, node or paper
        set: key=value as `run` takes it; may be given many times
        out: folder for the bisection instead of runs/
        dry: print the path and the cost and stop
        yes: start without a question
    """
    demand_without("--fails", fails, parity=parity, metric=metric)
    demand_without("--parity", parity, metric=metric)
    question = RunQuestion(
        kind="fails" if fails else "parity" if parity else "metric", point=point, metric=metric
    )
    asked = SearchRequest(
        recipe=recipe,
        good=good,
        bad=bad,
        question=question,
        vendor=vendor,
        scale=scale,
        set=set,
        out=out,
        dry=dry,
    )
    search = Search.of(Project(project_root()), asked)
    demand_room(search.folder, 0, option="--out")
    path = search.path()
    text, seconds = search.cost(path)
    for place, step in enumerate(path.steps, start=1):
        tell(f"step {place}: {step.label}")
    fixed = [f"not bisected: {one}" for one in path.fixed]
    for line in (*fixed, f"cost: {text}", f"folder: {search.folder}"):
        tell(line)
    if dry:
        return None
    if not yes and (seconds is None or seconds > LONG_SECONDS):
        agreed(text, place="twinrun bisect", hint="--yes starts it")
    found = _stoppable(search.bisection(path, say=tell).finish)
    page = write_bisect_page(search.folder / "bisect.html", found)
    said = [found.sentence, *map("not bisected: {}".format, found.fixed), f"report: {page}"]
    return Shown(
        view=lambda: "\n".join(said),
        data=lambda: found.model_dump(mode="json") | {"report": str(page)},
        code=EXIT[found.outcome],
    )


def rerun_sides(
    a: str, b: str, *, recipe: str | None, point: str | None, metric: str | None, **typed: Any
) -> Shown:
    """Run both sides in turns on this machine, A twice; 1 where B differs by more than chance and A does."""
    if not recipe:
        raise InputError("which recipe runs is not said", place="--rerun", hint="add --recipe recipes/NAME")
    question = RunQuestion(kind="metric", point=point, metric=metric)
    asked = SearchRequest(recipe=recipe, good=a, bad=b, options=("A", "B"), question=question, **typed)
    search = Search.of(Project(project_root()), asked)
    work = search.bisection(at_once(*search.sides), say=tell)
    found = _stoppable(lambda: rerun(work))
    rows = (("A", found.a, None), ("A again", found.again, found.noise), ("B", found.b, found.difference))
    lines = [
        f"{name:8} {number(sum(values) / len(values))} {found.unit}, {plural(len(values), 'run')}"
        + (f"; {effect_in_words(held.effect)} than A, p = {held.chance:.2g}" if held else "")
        for name, values, held in rows
    ]
    judged = "more than" if found.differs else "no more than"
    lines.append(f"B differs from A by {judged} chance and this machine's own noise explain.")
    data = found.model_dump(mode="json") | {"differs": found.differs, "folder": str(search.folder)}
    return Shown(view=lambda: "\n".join(lines), data=lambda: data, code=int(found.differs))


def _stoppable(finish: Callable[[], Found]) -> Found:
    try:
        return finish()
    except KeyboardInterrupt:
        hint = "the same command goes on from here"
        raise RunInterruptedError("stopped; finished runs are kept", hint=hint) from None
