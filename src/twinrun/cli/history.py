"""`twinrun history` and `twinrun bisect`: figures over software stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import LONG_SECONDS, Shown, agreed, demand_without, tell
from twinrun.foundation.cache import project_root, runs_folder
from twinrun.foundation.errors import RunInterruptedError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.text import duration, number, plural, size
from twinrun.history.bisect import EXIT, Bisection, effect_in_words, folder_of
from twinrun.history.inference import Failures, Quantities
from twinrun.history.pages import history_table, write_bisect_page, write_history_page
from twinrun.history.path import ChangePath, at_once, between, path_between, resolver
from twinrun.history.rerun import rerun
from twinrun.history.search import runs_expected
from twinrun.history.series import read_history, series_of
from twinrun.history.sides import BisectSide, side_of
from twinrun.history.state_runs import KEPT, RunQuestion, StateRunner
from twinrun.planning.project import Project
from twinrun.report.tables import View
from twinrun.runs.prepared import demand_room
from twinrun.runs.selection import Request, Selection, select

StoppableResult = TypeVar("StoppableResult")
Scale = Literal["smoke", "node", "paper"]
_QUESTIONS = {
    "fails": ("the rate of failing runs", "1 for a run that fails"),
    "parity": ("the rate of runs outside the bound of the loss", "1 for a curve outside the bound"),
}


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
    scale: Scale | None = None,
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
    kind: Literal["metric", "fails", "parity"] = "fails" if fails else "parity" if parity else "metric"
    ends: dict[str, Any] = {"good": good, "bad": bad, "kind": kind, "point": point, "metric": metric}
    request = SearchRequest(recipe=recipe, vendor=vendor, scale=scale, set=set, out=out, **ends)
    search = Search.of(request, dry=dry)
    demand_room(search.folder, 0, option="--out")
    path = search.path()
    text, seconds = search.cost(path)
    steps = [f"step {place}: {step.label}" for place, step in enumerate(path.steps, start=1)]
    for line in (
        *steps,
        *map("not bisected: {}".format, path.fixed),
        f"cost: {text}",
        f"folder: {search.folder}",
    ):
        tell(line)
    if dry:
        return None
    if not yes and (seconds is None or seconds > LONG_SECONDS):
        agreed(text, place="twinrun bisect", hint="--yes starts it")
    found = _stoppable(search.bisection(path).finish)
    page = write_bisect_page(search.folder / "bisect.html", found)
    said = [found.sentence, *map("not bisected: {}".format, found.fixed), f"report: {page}"]
    return Shown(
        view=lambda: "\n".join(said),
        data=lambda: found.model_dump(mode="json") | {"report": str(page)},
        code=EXIT[found.outcome],
    )


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """`twinrun bisect`, or `twinrun compare --rerun`, as typed."""

    recipe: str
    good: str
    bad: str
    kind: Literal["metric", "fails", "parity"] = "metric"
    point: str | None = None
    metric: str | None = None
    vendor: str | None = None
    scale: Scale | None = None
    set: tuple[str, ...] = ()
    out: Path | None = None


def rerun_sides(request: SearchRequest) -> Shown:
    """Run both sides in turns on this machine, A twice; 1 where B differs by more than chance and A does."""
    search = Search.of(request, options=("A", "B"))
    found = _stoppable(partial(rerun, search.bisection(at_once(*search.sides))))
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


def _stoppable(finish: Callable[[], StoppableResult]) -> StoppableResult:
    try:
        return finish()
    except KeyboardInterrupt:
        hint = "the same command goes on from here"
        raise RunInterruptedError("stopped; finished runs are kept", hint=hint) from None


@dataclass(frozen=True, kw_only=True)
class Search:
    """Two ends of the software, a run that is asked of both, and the folder that keeps what was found."""

    project: Project
    request: SearchRequest
    question: RunQuestion
    sides: tuple[BisectSide, BisectSide]
    selection: Selection
    folder: Path

    @classmethod
    def of(
        cls, request: SearchRequest, *, dry: bool = False, options: tuple[str, str] = ("--good", "--bad")
    ) -> Search:
        """Return the search that was asked for; raises as `select` and `side_of` do."""
        project = Project(project_root())
        good, bad = (
            side_of(project, text, option=option)
            for text, option in zip((request.good, request.bad), options, strict=True)
        )
        asked = Request(
            recipe=request.recipe,
            vendor=request.vendor or (project.stack(good.stack).stack.vendor if good.stack else None),
            stack=good.stack,
            engine="venv",
            scale=request.scale,
            settings=request.set,
            dry=dry,
        )
        selection = select(project, asked)
        question = RunQuestion(kind=request.kind, point=request.point, metric=request.metric)
        pins = [
            {pin: sorted(h) for one in side.packages.values() for pin, h in one.items()}
            for side in (good, bad)
        ]
        key = {
            "recipe": selection.plan.recipe,
            "plan": selection.plan.sha256(),
            "question": question.model_dump(mode="json"),
            "sides": [
                [side.commit, side.variables, own] for side, own in zip((good, bad), pins, strict=True)
            ],
        }
        folder = folder_of((request.out or runs_folder(project.root)).absolute() / selection.plan.recipe, key)
        sides = (good, bad)
        return cls(
            project=project,
            request=request,
            question=question,
            sides=sides,
            selection=selection,
            folder=folder,
        )

    def path(self) -> ChangePath:
        """Return the path as the resolver gave it when this bisection began."""
        file, bad = self.folder / "path.json", self.sides[1]
        if not file.is_file():
            stacks = [
                self.selection.stack.stack,
                *([self.project.stack(bad.stack).stack] if bad.stack else []),
            ]
            path = path_between(*self.sides, resolves=resolver(*stacks))
            write_atomically(file, path.model_dump_json() + "\n")
        return load_json(file, ChangePath)

    def cost(self, path: ChangePath) -> tuple[str, float | None]:
        """Return what it is expected to take, and its seconds at most where every point has an estimate."""
        scale = Quantities() if self.question.kind == "metric" else Failures()
        least, most = runs_expected(scale, steps=len(path.steps))
        known = [point.seconds for point in self.selection.plan.points]
        seconds = None if None in known else most * sum(one or 0.0 for one in known)
        time = f"up to {duration(seconds)}" if seconds else "nobody knows how long a run takes here"
        sizes = self.selection.stack.stack.environment
        disk = f"{size(sizes.disk * (KEPT + 2))} of disk" if sizes else f"{KEPT + 2} environments on the disk"
        return f"{least} to {most} runs, more inside a package; {time}; {disk}", seconds

    def bisection(self, path: ChangePath) -> Bisection:
        """Return the bisection of a path."""
        stack, plan = self.selection.stack.stack, self.selection.plan
        asked = Request(recipe=plan.recipe, vendor=stack.vendor, scale=plan.scale, settings=self.request.set)
        runner = StateRunner(
            project=self.project,
            request=asked,
            stack=stack.name,
            question=self.question,
            folder=self.folder,
            say=tell,
            unset=tuple(sorted({name for side in self.sides for name in side.variables or {}})),
        )
        name = self.question.metric or self.selection.workload.headline[0]
        metric = self.project.metrics.get(name)
        measured = (metric.title, metric.unit) if metric else (name, "as measured")
        noun, unit = _QUESTIONS.get(self.question.kind, measured)
        return Bisection(
            runner=runner,
            path=path,
            finer=partial(between, stack=stack, root=self.project.root),
            names=(self.request.good, self.request.bad),
            noun=noun,
            unit=unit,
            say=tell,
        )
