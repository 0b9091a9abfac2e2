"""A plan's commands as text, with placeholders for what only a run knows."""

from __future__ import annotations

from twinrun import launchers
from twinrun.discovery import load_part
from twinrun.errors import MachineError
from twinrun.job import BenchPlan, Plan

RUN = "{run}"


def rendered_commands(plan: Plan | BenchPlan, *, cores: int) -> dict[str, dict[str, object]]:
    """Return, for each point, the argument list and variables its launcher would start."""
    launcher = load_part(launchers, plan.launcher)
    rendered: dict[str, dict[str, object]] = {}
    for point in plan.points:
        try:
            command = launcher.render(
                plan,
                point,
                script=plan.script,
                job=f"{RUN}/points/{point.id}/job.json",
                logs=f"{RUN}/log/{point.id}",
                cores=cores,
            )
        except MachineError as error:
            rendered[point.id] = {"not rendered": f"{error.message}: {error.found}"}
            continue
        rendered[point.id] = {"arguments": list(command.arguments), "variables": command.variables}
    return rendered
