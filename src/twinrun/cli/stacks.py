"""`twinrun build` and `twinrun lock`: the image of a stack, and its pins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from twinrun.cli.console import Dry, Shown, resumable, tell, written
from twinrun.foundation.cache import project_root
from twinrun.images import lock as locks
from twinrun.images.command import (
    BuildProgress,
    BuildRequest,
    plan_lines,
    plan_request,
    result_lines,
    run_build,
    write_context,
)
from twinrun.runs.prepared import demand_room

_NOTHING = BuildRequest()


def build(*, request: Annotated[BuildRequest, Parameter("*")] = _NOTHING, dry: Dry = False) -> Shown:
    """Build the image of a stack from its locks.

    Args:
        dry: print the plan and stop; with --json all of it
    """
    paths = {name: path.absolute() for name, path in vars(request).items() if isinstance(path, Path)}
    root, request = project_root(), replace(request, **paths)  # type: ignore[arg-type]
    plan = plan_request(root, request)
    if request.save:
        folder = request.save.parent if request.save.suffix == ".tar" else request.save
        demand_room(folder, 0, option="--save")
    lines = plan_lines(plan)
    if dry:
        return Shown("\n".join(lines), plan.summary())
    with BuildProgress() as progress, resumable(plan.image):
        for line in lines:
            progress.say(line)
        if request.context:
            return written(write_context(root, plan, request, progress.say))
        result = run_build(root, plan, request, progress.say)
    return Shown("\n".join(result_lines(result)), result)


def lock(
    *,
    stack: str | None = None,
    index: str | None = None,
    upgrade: bool = False,
    only: tuple[Literal["python", "system"], ...] = (),
    check: bool = False,
) -> Shown:
    """Resolve every pin of stacks: packages to hashes, the root file system made of them to a digest.

    Args:
        stack: one stack; all when left out
        index: URL in place of the framework's own package index, which --check asks
        upgrade: let packages move that nothing pins
        only: python or system; may be given many times
        check: write nothing; say which pins an index does not have, and exit 1 then
    """
    root, rows, findings = project_root(), dict[str, list[str]](), list[locks.PinFinding]()
    none, many = ("no findings", "findings") if check else ("nothing changed", "changed")
    for name in locks.stack_names(root, stack):
        if check:
            found = locks.check(root, name, index=index, only=only, say=tell)
            rows[name], findings = [str(one) for one in found], [*findings, *found]
        else:
            rows[name] = list(locks.refresh(root, name, upgrade=upgrade, only=only, say=tell))
    lines = [
        "\n  ".join([f"{name}: {f'{len(several)} {many}' if several else none}", *several])
        for name, several in rows.items()
    ]
    return Shown("\n".join(lines), rows, locks.exit_code(findings))
