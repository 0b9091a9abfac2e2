"""What `twinrun run --dry` prints, and the first lines of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from twinrun.foundation.text import GIB, duration, number, plain, plural
from twinrun.planning.project import Project
from twinrun.results.outlook import outlook
from twinrun.runs.prepared import Prepared
from twinrun.runs.selection import ASKED, Selection
from twinrun.workloads.workload import Point

# With the run folder and a first point, the first screen of a run is ten lines.
_LINES = 8


def choice_lines(selection: Selection) -> Iterator[str]:
    """Yield what was chosen and why, in few lines: what a user typed needs no reason."""
    typed = [f"{one.name} {one.value}" for one in selection.choices if one.because == ASKED]
    chosen = [one for one in selection.choices if one.because != ASKED]
    first = [f"{'asked for':9} {', '.join(typed)}"] if typed else []
    apart = len(selection.differences)
    last = (
        [f"differs   from the publication in {plural(apart, 'setting')}; --dry lists them"] if apart else []
    )
    room = _LINES - len(first) - len(last)
    yield from first
    shown = chosen if len(chosen) <= room else [*chosen[: room - 2], chosen[-1]]
    for one in shown:
        yield f"{one.name:9} {one.value}  ({one.because})"
    if rest := [one for one in chosen if one not in shown]:
        yield f"{'also':9} {', '.join(f'{one.name} {one.value}' for one in rest)}"
    yield from last


def everything(prepared: Prepared) -> dict[str, object]:
    """Return the plan, the choices, what stands against it, and every command with its variables."""
    plan, selection = prepared.plan, prepared.selection
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "claims": [one.model_dump() for one in outlook(plan, prepared.project)],
        "folders": {name: str(folder) for name, folder in prepared.folders.items()},
        "checkpoints": {name: one._asdict() for name, one in prepared.checkpoints.items()},
        "refusals": [str(one) for one in prepared.refusals],
        **prepared.printed(),
    }


def page(prepared: Prepared) -> RenderableType:
    """Return what was chosen, the points, how the run differs, and what starts the first point's ranks."""
    selection = prepared.selection
    recipe = selection.recipe.recipe
    chosen = _plain_table("chosen", "", "because")
    for choice in selection.choices:
        chosen.add_row(choice.name, Text(choice.value), Text(choice.because))
    parts: list[RenderableType] = [Text(f"{recipe.title}\n{recipe.question}\n"), chosen]
    parts += [Text(""), _points(selection), *_unsaid(selection)]
    if selection.differences:
        parts += [Text(""), _differences(selection)]
    parts += [Text(""), _claims(prepared.project, selection)]
    parts += [Text(""), Text(_starts(prepared), overflow="fold"), Text("")]
    parts.append(Text("Nothing was started. --dry --json prints the whole plan, with lines for a shell."))
    return Group(*parts)


def _plain_table(*heads: str) -> Table:
    return Table(*heads, box=None, padding=(0, 2, 0, 0), caption_justify="left")


def _claims(project: Project, selection: Selection) -> Table:
    """Return for each claim that it will be answered, or which condition will be missing."""
    table = _plain_table("claim", "answered", "because it lacks")
    for one in outlook(selection.plan, project):
        table.add_row(one.claim, one.how if one.answered else "no", Text("" if one.answered else one.how))
    return table


def _points(selection: Selection) -> Table:
    table = _plain_table("point", "nodes", "devices a node", "time", "predicted step", "device memory")
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
    table = _plain_table("differs", "here", "published")
    for one in selection.differences:
        if one.stated:
            table.add_row(one.field, Text(plain(one.found)), Text(plain(one.published)))
    silent = [f"{one.field} {plain(one.found)}" for one in selection.differences if not one.stated]
    if silent:
        table.caption = Text(f"Other than the recipe's, where the publication is silent: {', '.join(silent)}")
    return table


def _starts(prepared: Prepared) -> str:
    """Return what is given to the scheduler, or started on the first node, for the first point."""
    rendered, point = prepared.printed(), prepared.plan.points[0].id
    scripts, commands = rendered.get("scripts"), rendered.get("commands")
    if isinstance(scripts, dict):
        return f"The scheduler gets for {point}:\n{scripts[point]['script']}"
    assert isinstance(commands, dict)
    return f"Ranks of {point} are started by:\n{shlex.join(commands[point][0]['arguments'])}"
