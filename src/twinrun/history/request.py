"""What a bisection is asked: two ends of the software, a run of both, and where the answer is kept."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from twinrun.foundation.cache import runs_folder
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.history.bisect import Bisection
from twinrun.history.path import ChangePath, at_once, between, digest_of, path_between, resolver, side_of
from twinrun.history.state_runs import CommandRunner, RecipeRunner, RunQuestion
from twinrun.planning.project import Project
from twinrun.runs.prepared import demand_room
from twinrun.runs.selection import Request, select

# What is measured, and its unit.
_QUESTIONS = {
    "fails": ("the rate of failing runs", "1 for a run that fails"),
    "parity": ("the rate of runs outside the bound of the loss", "1 for a curve outside the bound"),
}


def bisection_of(
    project: Project,
    good: str,
    bad: str,
    question: RunQuestion,
    *,
    recipe: str | None,
    run: str | None = None,
    vendor: str | None = None,
    scale: str | None = None,
    set: tuple[str, ...] = (),  # noqa: A002 - the option's name
    out: Path | None = None,
    dry: bool = False,
    whole: bool = False,
    say: Callable[[str], None],
) -> Bisection:
    """Return what `twinrun bisect` and `twinrun compare --rerun` do, as typed.

    Args:
        run: a command in place of a recipe.
        whole: everything that differs is one step.

    Raises:
        InputError: both a recipe and a command, or none; else as `select`, `side_of` and `path_between` do.
    """
    if (recipe is None) == (run is None):
        raise InputError("what runs", place="RECIPE", found=recipe, allowed="a recipe, or --run 'COMMAND'")
    sides = side_of(project, good), side_of(project, bad)
    stacks = [project.stack(one.stack) for one in sides if one.stack]
    name = question.metric or "the number"
    if recipe:
        vendor = vendor or (project.stack(sides[0].stack).stack.vendor if sides[0].stack else None)
        asked = Request(recipe=recipe, vendor=vendor, scale=scale, set=set, dry=dry)
        found = select(project, replace(asked, stack=sides[0].stack, engine="venv"))
        plan, stack, name = found.plan, found.stack.stack, question.metric or found.workload.headline[0]
        stacks.insert(0, found.stack)
        python, subject, ran = stack.interpreter(), plan.recipe, plan.sha256()
        asked = replace(asked, recipe=plan.recipe, vendor=stack.vendor, scale=plan.scale)
        kind: Any = partial(RecipeRunner, project=project, request=asked, stack=stack.name)
    else:
        words = tuple(shlex.split(run or ""))
        python, subject = f"{sys.version_info.major}.{sys.version_info.minor}", "command"
        kind, ran = partial(CommandRunner, words=words), shlex.join(words)
    key = [ran, question.model_dump(mode="json"), *(digest_of(side.packages) for side in sides)]
    digest = sha256_of_bytes(canonical_json(key).encode())[:12]
    folder = (out or runs_folder(project.root)).absolute() / subject / f"bisect-{digest}"
    demand_room(folder, 0, option="--out")
    file = folder / "path.json"
    if whole:
        path = at_once(*sides)
    elif file.is_file():
        # As the resolver gave it when this bisection began.
        path = load_json(file, ChangePath)
    else:
        path = path_between(*sides, resolves=resolver(python, *(one.stack for one in stacks)))
        write_atomically(file, path.model_dump_json() + "\n")
    metric = project.metrics.get(name)
    measured = (metric.title, metric.unit) if metric else (name, "as measured")
    noun, unit = _QUESTIONS.get(question.kind, measured)
    return Bisection(
        runner=kind(subject=ran if run else subject, folder=folder, question=question, say=say),
        path=path,
        finer=partial(between, python=python),
        names=(good, bad),
        noun=noun,
        unit=unit,
    )
