"""What a bisection is asked: two ends of the software, a run of both, and where the answer is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from twinrun.foundation.cache import runs_folder
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.text import duration, size
from twinrun.history.bisect import Bisection, folder_of
from twinrun.history.inference import Failures, Quantities
from twinrun.history.path import ChangePath, between, path_between, resolver
from twinrun.history.search import runs_expected
from twinrun.history.sides import BisectSide, side_of
from twinrun.history.state_runs import KEPT, RunQuestion, StateRunner
from twinrun.planning.project import Project
from twinrun.runs.selection import Request, Selection, select

_QUESTIONS = {
    "fails": ("the rate of failing runs", "1 for a run that fails"),
    "parity": ("the rate of runs outside the bound of the loss", "1 for a curve outside the bound"),
}


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """`twinrun bisect`, or `twinrun compare --rerun`, as typed."""

    recipe: str
    good: str
    bad: str
    options: tuple[str, str] = ("--good", "--bad")
    """Where the ends were named."""
    question: RunQuestion
    vendor: str | None = None
    scale: Literal["smoke", "node", "paper"] | None = None
    set: tuple[str, ...] = ()
    out: Path | None = None
    dry: bool = False


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was asked, with both ends and the run that is asked of them."""

    project: Project
    request: SearchRequest
    sides: tuple[BisectSide, BisectSide]
    selection: Selection
    folder: Path

    @classmethod
    def of(cls, project: Project, request: SearchRequest) -> Search:
        """Return the search that was asked for; raises as `select` and `side_of` do."""
        good = side_of(project, request.good, option=request.options[0])
        bad = side_of(project, request.bad, option=request.options[1])
        asked = Request(
            recipe=request.recipe,
            vendor=request.vendor or (project.stack(good.stack).stack.vendor if good.stack else None),
            stack=good.stack,
            engine="venv",
            scale=request.scale,
            set=request.set,
            dry=request.dry,
        )
        selection = select(project, asked)
        name, digest = selection.plan.recipe, selection.plan.sha256()
        ends = [
            [
                side.commit,
                side.variables,
                {pin: sorted(hashes) for one in side.packages.values() for pin, hashes in one.items()},
            ]
            for side in (good, bad)
        ]
        question = request.question.model_dump(mode="json")
        key = {"recipe": name, "plan": digest, "question": question, "sides": ends}
        folder = folder_of((request.out or runs_folder(project.root)).absolute() / name, key)
        return cls(project=project, request=request, sides=(good, bad), selection=selection, folder=folder)

    def path(self) -> ChangePath:
        """Return the path as the resolver gave it when this bisection began."""
        file, bad = self.folder / "path.json", self.sides[1]
        if not file.is_file():
            stacks = [self.selection.stack, *([self.project.stack(bad.stack)] if bad.stack else [])]
            path = path_between(*self.sides, resolves=resolver(*(one.stack for one in stacks)))
            write_atomically(file, path.model_dump_json() + "\n")
        return load_json(file, ChangePath)

    def cost(self, path: ChangePath) -> tuple[str, float | None]:
        """Return what it is expected to take, and its seconds at most where every point has an estimate."""
        scale = Quantities() if self.request.question.kind == "metric" else Failures()
        least, most = runs_expected(scale, steps=len(path.steps))
        known = [point.seconds for point in self.selection.plan.points]
        seconds = None if None in known else most * sum(one or 0.0 for one in known)
        time = f"up to {duration(seconds)}" if seconds else "nobody knows how long a run takes here"
        sizes = self.selection.stack.stack.environment
        disk = f"{size(sizes.disk * (KEPT + 2))} of disk" if sizes else f"{KEPT + 2} environments on the disk"
        return f"{least} to {most} runs, more inside a package; {time}; {disk}", seconds

    def bisection(self, path: ChangePath, *, say: Callable[[str], None]) -> Bisection:
        """Return the bisection of a path."""
        stack, plan, question = self.selection.stack.stack, self.selection.plan, self.request.question
        settings = self.request.set
        runner = StateRunner(
            project=self.project,
            request=Request(recipe=plan.recipe, vendor=stack.vendor, scale=plan.scale, set=settings),
            stack=stack.name,
            question=question,
            folder=self.folder,
            say=say,
            unset=tuple(sorted({name for side in self.sides for name in side.variables or {}})),
        )
        name = question.metric or self.selection.workload.headline[0]
        metric = self.project.metrics.get(name)
        measured = (metric.title, metric.unit) if metric else (name, "as measured")
        noun, unit = _QUESTIONS.get(question.kind, measured)
        return Bisection(
            runner=runner,
            path=path,
            finer=partial(between, stack=stack, root=self.project.root),
            names=(self.request.good, self.request.bad),
            noun=noun,
            unit=unit,
            say=say,
        )
