"""Build plan and build result as lines and a table for the terminal."""

from __future__ import annotations

from collections import Counter

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.images.building.command import BuildResult
from twinrun.images.building.plan import BuildPlan
from twinrun.images.building.progress import megabytes


def plan_lines(plan: BuildPlan) -> list[str]:
    """Return the lines that `invoke build` prints before it starts."""
    counts = Counter(artifact.folder.partition("/")[0] for artifact in plan.artifacts)
    lines = [
        f"image     {plan.image}  ({plan.stack.stack.platform})",
        f"base      {plan.stack.stack.base.suite if plan.stack.stack.base else ''}  {plan.base[:12]}",
        f"layers    {', '.join(plan.stages)}",
        f"files     {', '.join(f'{count} {folder}' for folder, count in counts.items())}",
    ]
    if plan.kernels or plan.stack.stack.archs:
        # The Dockerfile compiles kernels for the emulation on the processor too.
        targets = [*plan.stack.stack.archs, *(["the processor"] if plan.kernels else [])]
        lines.append(f"compiled  {', '.join(plan.kernels) or 'nothing'}  (for {', '.join(targets)})")
    if plan.unverified:
        lines.append(f"on trust  {', '.join(plan.unverified)}")
    return lines


def result_table(result: BuildResult) -> Group:
    """Return the layers of an image, and where it is."""
    table = Table("layer", "digest", "size", box=None)
    for layer in result.built.layers:
        size = "as it was" if layer.bytes is None else megabytes(layer.bytes)
        table.add_row(layer.name, layer.diff_id.removeprefix("sha256:")[:12], Text(size, justify="right"))
    built = result.built
    lines = [f"{built.image}  {built.id}{'' if built.fresh else '  (nothing had changed)'}"]
    lines.append(f"log, manifest and contents: {result.folder}")
    lines += [f"pushed: {result.pushed}"] if result.pushed else []
    lines += [f"saved: {result.saved}"] if result.saved else []
    return Group(table, *(Text(line, overflow="fold") for line in lines))
