"""`invoke history`, `invoke bisect` and `invoke compare --rerun`: figures over software stacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.terminal import say
from twinrun.foundation.text import duration, number, plural, size
from twinrun.history.bisect import EXIT, Bisection, effect_in_words, folder_of
from twinrun.history.inference import Failures, Quantities
from twinrun.history.pages import history_table, write_bisect_page, write_history_page
from twinrun.history.path import ChangePath, Resolves, at_once, between, path_between, resolver
from twinrun.history.rerun import SideDifference
from twinrun.history.rerun import rerun as rerun_sides
from twinrun.history.search import runs_expected
from twinrun.history.series import read_history, series_of
from twinrun.history.sides import BisectSide, side_of
from twinrun.history.state_runs import KEPT, RunQuestion, StateRunner
from twinrun.planning.project import Project
from twinrun.report.tables import View
from twinrun.report.terminal import show
from twinrun.runs.preconditions import demand_room
from twinrun.runs.selection import Request, Selection, select

StoppableResult = TypeVar("StoppableResult")
# Without a question, as a run on a processor.
LONG_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """`invoke bisect`, or `invoke compare --rerun`, as typed."""

    recipe: str
    good: str
    bad: str
    question: RunQuestion
    scale: str | None = None
    vendor: str | None = None
    settings: tuple[str, ...] = ()
    out: Path | None = None
    dry: bool = False
    yes: bool = False


def kind_of(*, fails: bool, parity: bool) -> Literal["metric", "fails", "parity"]:
    """Return which question the options ask."""
    return "fails" if fails else "parity" if parity else "metric"


def asked(
    recipe: str,
    good: str,
    bad: str,
    *,
    kind: Literal["metric", "fails", "parity"] = "metric",
    point: str,
    metric: str,
    scale: str,
    set: Sequence[str] | None,  # noqa: A002 - as typed
    out: str,
    vendor: str = "",
    dry: bool = False,
    yes: bool = False,
) -> SearchRequest:
    """Return what was typed as a request; an option that was left out is None."""
    return SearchRequest(
        recipe=recipe,
        good=good,
        bad=bad,
        question=RunQuestion(kind=kind, point=point or None, metric=metric or None),
        scale=scale or None,
        vendor=vendor or None,
        settings=tuple(set or ()),
        out=Path(out) if out else None,
        dry=dry,
        yes=yes,
    )


def history(root: Path, recipe: str, *, point: str, metric: str, out: Path | None, as_json: bool) -> int:
    """Print the series of a recipe over stacks, and draw them."""
    project = Project(root)
    records = read_history(project, recipe, runs=root / "runs")
    found = series_of(project, records, point=point or None, metric=metric or None)
    name = project.recipe(recipe).recipe.name
    page = write_history_page(out or root / "runs" / f"history-{name}.html", name, found)
    if as_json:
        print_json({"report": str(page), "series": [one.model_dump(mode="json") for one in found]})
        return 0
    show(View(history_table(found)))
    for one in found:
        for change in one.changes:
            say(f"{one.name}: {change.effect_in_words}")
    say(f"report: {page}")
    return 0


def bisect(root: Path, request: SearchRequest, *, as_json: bool) -> int:
    """Search the change between two ends; 0 found, 1 unconfirmed, 3 no change seen."""
    project = Project(root)
    good, bad = _sides(project, request, options=("--good", "--bad"))
    selection = _selection(project, request, good)
    folder = _folder(root, request, good, bad, selection)
    demand_room(folder, 0, option="--out")
    others = [project.stack(bad.stack).stack] if bad.stack else []
    path = _path(folder, good, bad, resolver(selection.stack.stack, *others))
    _say_plan(path, folder, request, selection)
    if request.dry:
        return 0
    _agree(path, request, selection)
    bisection = _bisection(project, request, selection, folder, path, sides=(good, bad))
    record = _stoppable(bisection.finish)
    page = write_bisect_page(folder / "bisect.html", record)
    if as_json:
        print_json(record.model_dump(mode="json") | {"report": str(page)})
    else:
        say(record.sentence)
        for one in record.fixed:
            say(f"not bisected: {one}")
        say(f"report: {page}")
    return EXIT[record.outcome]


def rerun(root: Path, request: SearchRequest, *, as_json: bool) -> int:
    """Run both sides in turns on this machine, A twice; 1 where B differs by more than chance and A does."""
    if not request.recipe:
        raise InputError("which recipe runs is not said", place="--rerun", hint="add --recipe recipes/NAME")
    project = Project(root)
    a, b = _sides(project, request, options=("A", "B"))
    selection = _selection(project, request, a)
    folder = _folder(root, request, a, b, selection)
    bisection = _bisection(project, request, selection, folder, at_once(a, b), sides=(a, b))
    found = _stoppable(partial(rerun_sides, bisection))
    if as_json:
        print_json(found.model_dump(mode="json") | {"differs": found.differs, "folder": str(folder)})
        return int(found.differs)
    for name, values, held in (
        ("A", found.a, None),
        ("A again", found.again, found.noise),
        ("B", found.b, found.difference),
    ):
        middle = number(sum(values) / len(values))
        say(f"{name:8} {middle} {found.unit}, {plural(len(values), 'run')}{_held(held)}")
    judged = "more than" if found.differs else "no more than"
    say(f"B differs from A by {judged} chance and this machine's own noise explain.")
    return int(found.differs)


def _held(found: SideDifference | None) -> str:
    return f"; {effect_in_words(found.effect)} than A, p = {found.chance:.2g}" if found else ""


def _stoppable(finish: Callable[[], StoppableResult]) -> StoppableResult:
    try:
        return finish()
    except KeyboardInterrupt:
        hint = "the same command goes on from here"
        raise RunInterruptedError("stopped; finished runs are kept", hint=hint) from None


def _sides(
    project: Project, request: SearchRequest, *, options: tuple[str, str]
) -> tuple[BisectSide, BisectSide]:
    for option, text in zip(options, (request.good, request.bad), strict=True):
        if not text:
            raise InputError("an end is missing", place=option, allowed="a stack, a lock file or a record")
    good = side_of(project, request.good, option=options[0])
    return good, side_of(project, request.bad, option=options[1])


def _selection(project: Project, request: SearchRequest, good: BisectSide) -> Selection:
    """Return what a run of the good end would do here; raises as `select` does."""
    asked = Request(
        recipe=request.recipe,
        vendor=request.vendor or (project.stack(good.stack).stack.vendor if good.stack else None),
        stack=good.stack,
        engine="venv",
        scale=request.scale,
        settings=request.settings,
        dry=request.dry,
    )
    return select(project, asked)


def _folder(
    root: Path, request: SearchRequest, good: BisectSide, bad: BisectSide, selection: Selection
) -> Path:
    key = {
        "recipe": selection.plan.recipe,
        "plan": selection.plan.sha256(),
        "question": request.question.model_dump(mode="json"),
        "sides": [
            [
                side.commit,
                side.variables,
                {pin: sorted(h) for one in side.packages.values() for pin, h in one.items()},
            ]
            for side in (good, bad)
        ],
    }
    return folder_of((request.out or root / "runs").absolute() / selection.plan.recipe, key)


def _path(folder: Path, good: BisectSide, bad: BisectSide, resolves: Resolves) -> ChangePath:
    """Return the path as the resolver gave it when this bisection began."""
    file = folder / "path.json"
    if not file.is_file():
        path = path_between(good, bad, resolves=resolves)
        write_atomically(file, path.model_dump_json() + "\n")
    return load_json(file, ChangePath)


def _cost(path: ChangePath, request: SearchRequest, selection: Selection) -> tuple[str, float | None]:
    """Return what a bisection is expected to take, and its seconds at most where a run has an estimate."""
    scale = Quantities() if request.question.kind == "metric" else Failures()
    least, most = runs_expected(scale, steps=len(path.steps))
    known = [point.seconds for point in selection.plan.points if point.seconds is not None]
    seconds = most * sum(known) if known else None
    time = f"up to {duration(seconds)}" if seconds else "nobody knows how long a run takes here"
    sizes = selection.stack.stack.environment
    disk = f"{size(sizes.disk * (KEPT + 2))} of disk" if sizes else f"{KEPT + 2} environments on the disk"
    return f"{least} to {most} runs, more inside a package; {time}; {disk}", seconds


def _say_plan(path: ChangePath, folder: Path, request: SearchRequest, selection: Selection) -> None:
    for place, step in enumerate(path.steps, start=1):
        say(f"step {place}: {step.label}", file=sys.stderr)
    for one in path.fixed:
        say(f"not bisected: {one}", file=sys.stderr)
    say(f"cost: {_cost(path, request, selection)[0]}", file=sys.stderr)
    say(f"folder: {folder}", file=sys.stderr)


def _agree(path: ChangePath, request: SearchRequest, selection: Selection) -> None:
    """Ask whether a bisection that may take long is to start; raises as the question of `invoke run` does."""
    text, seconds = _cost(path, request, selection)
    if request.yes or (seconds is not None and seconds <= LONG_SECONDS):
        return
    if not sys.stdin.isatty():
        raise InputError(
            "a bisection of this length is started only after a question, and there is no terminal to ask on",
            place="invoke bisect",
            found=text,
            hint="--yes starts it",
        )
    sys.stderr.write(f"this takes {text}; start it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunInterruptedError("not started", hint="--yes starts it without a question")


def _bisection(
    project: Project,
    request: SearchRequest,
    selection: Selection,
    folder: Path,
    path: ChangePath,
    *,
    sides: tuple[BisectSide, BisectSide],
) -> Bisection:
    stack = selection.stack.stack
    asked = Request(
        recipe=selection.plan.recipe,
        vendor=stack.vendor,
        scale=selection.plan.scale,
        settings=request.settings,
    )
    tell = partial(say, file=sys.stderr)
    variables = {name for side in sides for name in side.variables or {}}
    runner = StateRunner(
        project=project,
        request=asked,
        stack=stack.name,
        question=request.question,
        folder=folder,
        say=tell,
        unset=tuple(sorted(variables)),
    )
    noun, unit = _noun(project, request.question, selection)
    return Bisection(
        runner=runner,
        path=path,
        finer=partial(between, stack=stack, root=project.root),
        names=(request.good, request.bad),
        noun=noun,
        unit=unit,
        say=tell,
    )


def _noun(project: Project, question: RunQuestion, selection: Selection) -> tuple[str, str]:
    """Return what is measured, and its unit."""
    if question.kind != "metric":
        return {"fails": ("the rate of failing runs", "1 for a run that fails")}.get(
            question.kind,
            ("the rate of runs outside the bound of the loss", "1 for a curve outside the bound"),
        )
    name = question.metric or selection.workload.headline[0]
    metric = project.metrics.get(name)
    return (metric.title, metric.unit) if metric else (name, "as measured")
