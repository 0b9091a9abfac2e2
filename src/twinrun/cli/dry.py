"""What `invoke run --dry` prints: the plan on a page, or all of it as JSON."""

from __future__ import annotations

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinrun.foundation.text import duration, number, plain
from twinrun.planning.project import Project
from twinrun.runs.dry import commands_of
from twinrun.runs.selection import Selection
from twinrun.workloads.workload import Point

GIB = 1 << 30


def everything(project: Project, selection: Selection) -> dict[str, object]:
    """Return the plan, the choices, and every command with its variables."""
    plan = selection.plan
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "attested": [
            wheel.model_dump(mode="json") for wheel in selection.stack.attested_wheels(project.root)
        ],
        **commands_of(project, selection),
    }


def page(project: Project, selection: Selection) -> RenderableType:
    """Return what was chosen, the points, how the run differs, and what starts the first point's ranks."""
    recipe, plan = selection.recipe.recipe, selection.plan
    parts: list[RenderableType] = [Text(f"{recipe.title}\n{recipe.question}\n"), _choices(selection)]
    parts += [Text(""), _points(selection), *_unsaid(selection)]
    if plan.differences:
        parts += [Text(""), _differences(selection)]
    if wheels := selection.stack.attested_wheels(project.root):
        parts += [Text(""), Text("\n".join(map(str, wheels)))]
    parts += [Text(""), Text(_starts(project, selection), overflow="fold"), Text("")]
    parts.append(
        Text("Nothing was started. --dry --json prints the whole plan, with lines to paste into a shell.")
    )
    return Group(*parts)


def _choices(selection: Selection) -> Table:
    table = Table("chosen", "", "because", box=None, pad_edge=False)
    for choice in selection.choices:
        table.add_row(choice.name, Text(choice.value), Text(choice.because))
    return table


def _points(selection: Selection) -> Table:
    heads = ("point", "nodes", "devices a node", "time", "predicted: a step", "memory of a device")
    table = Table(*heads, box=None, pad_edge=False)
    for point in selection.plan.points:
        seconds = "not estimated" if point.seconds is None else f"about {duration(point.seconds)}"
        counts = (f"{point.nodes:,}", f"{point.devices_per_node:,}")
        table.add_row(point.id, *counts, seconds, *_predicted(point))
    return table


def _predicted(point: Point) -> tuple[str, str]:
    """Return time and memory of the first attempt."""
    if not point.predicted:
        return "-", "-"
    first = point.predicted[0]
    memory = f"{number(first.memory_bytes / GIB)} GiB"
    if first.seconds is None or first.covers is None:
        return "cannot say", memory
    low, high = map(number, first.covers)
    return f"{number(first.seconds)} s ({low} to {high})", memory


def _unsaid(selection: Selection) -> list[Text]:
    """Return why the time of a step cannot be said."""
    reasons = (one.unknown for point in selection.plan.points for one in point.predicted[:1])
    return [Text(f"Cannot say: {reason}.") for reason in dict.fromkeys(reasons) if reason]


def _differences(selection: Selection) -> Table:
    table = Table("differs", "here", "published", box=None, pad_edge=False)
    for one in selection.plan.differences:
        table.add_row(one.field, Text(plain(one.found)), Text(plain(one.published)))
    return table


def _starts(project: Project, selection: Selection) -> str:
    """Return what is given to the scheduler, or started on the first node, for the first point."""
    rendered, point = commands_of(project, selection), selection.plan.points[0].id
    scripts, commands = rendered.get("scripts"), rendered.get("commands")
    if isinstance(scripts, dict):
        return f"The scheduler gets for {point}:\n{scripts[point]['script']}"
    assert isinstance(commands, dict)
    return f"Ranks of {point} are started by:\n{shlex.join(commands[point][0]['arguments'])}"
