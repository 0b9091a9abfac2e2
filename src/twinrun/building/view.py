"""A plan and its outcome as lines and tables for people."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.building.command import Outcome
from twinrun.building.plan import BuildPlan
from twinrun.building.progress import megabytes


def plan_lines(plan: BuildPlan) -> list[str]:
    """Return what a build is about to do."""
    base = f"{plan.base.name}  {(plan.carried_base or plan.base.sha256 or 'unknown')[:12]}"
    counts: dict[str, int] = {}
    for parcel in plan.parcels:
        counts[parcel.folder.partition("/")[0]] = counts.get(parcel.folder.partition("/")[0], 0) + 1
    lines = [
        f"image     {plan.image}  ({plan.stack.stack.platform})",
        f"base      {base}{'  carried in' if plan.carried_base else ''}",
        f"layers    {', '.join(plan.stages)}",
        f"files     {', '.join(f'{count} {folder}' for folder, count in counts.items())}",
    ]
    compiled = [*plan.kernels, *(source.name for source in plan.stack.stack.sources)]
    if compiled or plan.stack.stack.archs:
        # Kernels are emulated on the processor of the image, see the Dockerfile.
        targets = [*plan.stack.stack.archs, *(["the processor"] if plan.kernels else [])]
        lines.append(f"compiled  {', '.join(compiled) or 'nothing'}  (for {', '.join(targets)})")
    if plan.unverified:
        lines.append(f"on trust  {', '.join(plan.unverified)}")
    return lines


def layers_table(outcome: Outcome) -> Group:
    """Return the layers of an image, and where it is."""
    table = Table("layer", "digest", "size", box=None)
    for layer in outcome.built.layers:
        size = "as it was" if layer.bytes is None else megabytes(layer.bytes)
        table.add_row(layer.name, layer.diff_id.removeprefix("sha256:")[:12], Text(size, justify="right"))
    built = outcome.built
    lines = [f"{built.image}  {built.id}{'' if built.fresh else '  (nothing had changed)'}"]
    lines.append(f"log, manifest and contents: {outcome.folder}")
    lines += [f"pushed: {outcome.pushed}"] if outcome.pushed else []
    lines += [f"saved: {outcome.saved}"] if outcome.saved else []
    return Group(table, *(Text(line, overflow="fold") for line in lines))
