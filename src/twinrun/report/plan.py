"""What `twinrun run --dry` prints, and the first lines of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from twinrun.foundation.text import GIB, duration, number, plain, plural
from twinrun.planning.configuration import differences_of_plan
from twinrun.results.outlook import outlook
from twinrun.runs.prepared import Prepared
from twinrun.runs.selection import ASKED, Selection
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import Point

# With the run folder and a first point, the first screen of a run is ten lines.
_LINES = 8


def choice_lines(selection: Selection) -> Iterator[str]:
    """Yield what was chosen and why, in few lines: what a user typed needs no reason."""
    typed = [f"{one.name} {one.value}" for one in selection.choices if one.because == ASKED]
    chosen = [one for one in selection.choices if one.because != ASKED]
    apart = len(differences_of_plan(selection.recipe, selection.plan))
    room = _LINES - bool(typed) - bool(apart)
    shown = chosen if len(chosen) <= room else [*chosen[: room - 2], chosen[-1]]
    if typed:
        yield f"{'asked for':9} {', '.join(typed)}"
    yield from (f"{one.name:9} {one.value}  ({one.because})" for one in shown)
    if rest := [f"{one.name} {one.value}" for one in chosen if one not in shown]:
        yield f"{'also':9} {', '.join(rest)}"
    if apart:
        yield f"differs   from the publication in {plural(apart, 'setting')}; --dry lists them"


def everything(prepared: Prepared) -> dict[str, object]:
    """Return the plan, the choices, what stands against it, and every command with its variables."""
    plan, selection = prepared.plan, prepared.selection
    return {
        "plan_sha256": plan.sha256(),
        "plan": plan.model_dump(mode="json"),
        "choices": [choice.model_dump() for choice in selection.choices],
        "claims": [one.model_dump() for one in outlook(plan, prepared.project)],
        "folders": {name: str(folder) for name, folder in prepared.folders.items()},
        "checkpoints": {
            name: one.model_dump(include={"place", "source", "begin"})
            for name, one in prepared.checkpoints.items()
        },
        "refusals": [str(one) for one in prepared.refusals],
        **prepared.printed(),
    }


def page(prepared: Prepared) -> RenderableType:
    """Return what was chosen, the points, how the run differs, and what starts the first point's ranks."""
    selection, points = prepared.selection, prepared.plan.points
    recipe, unsaid = selection.recipe.recipe, [one.unknown for point in points for one in point.predicted[:1]]
    claims = [
        (one.claim, one.how if one.answered else "no", "" if one.answered else one.how)
        for one in outlook(prepared.plan, prepared.project)
    ]
    heads = ("point", "nodes", "devices a node", "time", "predicted step", "device memory")
    tables: list[RenderableType] = [
        plain_table(
            ("chosen", "", "because"), [(one.name, one.value, one.because) for one in selection.choices]
        ),
        Group(
            plain_table(heads, map(_point, points)),
            *(f"Cannot say: {reason}." for reason in dict.fromkeys(unsaid) if reason),
        ),
        *_differences(differences_of_plan(selection.recipe, prepared.plan)),
        plain_table(("claim", "answered", "because it lacks"), claims),
        Text(_starts(prepared), overflow="fold"),
    ]
    return Group(
        Text(f"{recipe.title}\n{recipe.question}\n"),
        *(Padding(one, (0, 0, 1, 0)) for one in tables),
        "Nothing was started. --dry --json prints the whole plan, with every command.",
    )


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table without lines, whose first column stays whole."""
    table = Table(box=None, padding=(0, 2, 0, 0), caption_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, no_wrap=not place)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _point(point: Point) -> tuple[str, ...]:
    """Return a point with its time, and with time and memory of the first attempt."""
    time = "not estimated" if point.seconds is None else f"about {duration(point.seconds)}"
    step = memory = "-"
    for first in point.predicted[:1]:
        step, memory = "cannot say", f"{number(first.memory_bytes / GIB)} GiB"
        if first.seconds is not None and first.covers is not None:
            step = f"{number(first.seconds)} s ({' to '.join(map(number, first.covers))})"
    return (point.id, f"{point.nodes:,}", f"{point.devices_per_node:,}", time, step, memory)


def _differences(found: Sequence[Difference]) -> Iterator[Table]:
    """Yield where a run differs from the publication, if anywhere."""
    if found:
        rows = [(one.field, plain(one.found), plain(one.published)) for one in found if one.stated]
        table = plain_table(("differs", "here", "published"), rows)
        silent = [f"{one.field} {plain(one.found)}" for one in found if not one.stated]
        text = f"Other than the recipe's, where the publication is silent: {', '.join(silent)}"
        table.caption = Text(text) if silent else None
        yield table


def _starts(prepared: Prepared) -> str:
    """Return what is given to the scheduler, or started on the first node, for the first point."""
    rendered, point = prepared.printed(), prepared.plan.points[0].id
    scripts, commands = rendered.get("scripts"), rendered.get("commands")
    if isinstance(scripts, dict):
        return f"The scheduler gets for {point}:\n{scripts[point]}"
    assert isinstance(commands, dict)
    return f"Ranks of {point} are started by:\n{shlex.join(commands[point][0]['arguments'])}"
