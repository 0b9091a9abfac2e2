"""Commands about stacks and machines: build, lock, doctor, and the schemas of their manifests."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun.cli.console import demand_with, print_json
from twinrun.foundation.errors import InputError, RunInterruptedError
from twinrun.foundation.terminal import say

if TYPE_CHECKING:
    from twinrun.images.lock import PinFinding


def build(root: Path, options: Mapping[str, Any], *, dry: bool, as_json: bool) -> None:
    """Build the image of a stack and print its layers and ID; with `dry` the plan alone.

    Raises:
        RunInterruptedError: Ctrl-C; the engine keeps the steps that ended.
    """
    from twinrun.images.buildkit import BuildProgress
    from twinrun.images.command import BuildRequest, plan_lines, plan_request, result_table, run_build
    from twinrun.report.terminal import show
    from twinrun.runs.preconditions import demand_room

    request = BuildRequest(**options)
    plan = plan_request(root, request)
    if request.save:
        folder = request.save.parent if request.save.suffix == ".tar" else request.save
        demand_room(folder, 0, option="--save")
    if dry:
        print_json(plan.summary()) if as_json else say("\n".join(plan_lines(plan)))
        return
    with BuildProgress() as progress:
        for line in plan_lines(plan):
            progress.say(line)
        try:
            result = run_build(root, plan, request, progress)
        except KeyboardInterrupt:
            hint = "the same command goes on after the last step that ended"
            raise RunInterruptedError("stopped", place=plan.image, hint=hint) from None
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        show(result_table(result))


def lock(
    root: Path, stack: str, *, index: str | None, upgrade: bool, only: Sequence[str], check: bool
) -> int:
    """Refresh the locks of `stack`, or of all when empty; with `check` print findings and write nothing."""
    from twinrun.images.lock import check as check_locks
    from twinrun.images.lock import exit_code, refresh, stack_names

    def tell(line: str) -> None:
        say(line, file=sys.stderr, flush=True)

    findings: list[PinFinding] = []
    for name in stack_names(root, stack or None):
        if check:
            found = check_locks(root, name, index=index, only=only, say=tell)
            findings += found
            lines = [f"{name}: {len(found) or 'no'} findings", *map(str, found)]
        else:
            changes = refresh(root, name, index=index, upgrade=upgrade, only=only, say=tell)
            changed = (f"{change.lock}: {change}" for change in changes)
            lines = [f"{name}: {len(changes) or 'nothing'} changed", *changed]
        say("\n  ".join(lines))
    return exit_code(findings)


def doctor(
    root: Path,
    *,
    as_json: bool,
    stack: str | None,
    engine: str | None,
    cluster: str | None = None,
    proof: bool = False,
) -> int:
    """Print what this machine, or a site, offers; 3 when something needed is broken.

    Args:
        stack: run the checks of this stack instead.

    Raises:
        InputError: options exclude each other, or there is no such stack or site.
    """
    if cluster:
        from twinrun.cli import sites

        return sites.doctor(root, cluster, as_json=as_json, proof=proof)
    demand_with("--cluster", False, proof=proof)
    if stack:
        return _check_stack(root, stack, engine=engine, as_json=as_json)
    if engine:
        hint = "add --stack STACK, or leave --engine out: without a stack every engine is looked for"
        raise InputError(
            "only the checks of a stack have an engine", place="--engine", found=engine, hint=hint
        )
    from twinrun.foundation.terminal import VisibleConsole
    from twinrun.machine.doctor import diagnose
    from twinrun.report.terminal import diagnosis_lines

    diagnosis = diagnose(root)
    if as_json:
        print_json(diagnosis.model_dump(mode="json"))
        return diagnosis.exit_code
    console = VisibleConsole()
    for line in diagnosis_lines(diagnosis, width=console.width if console.is_terminal else None):
        console.print(line, soft_wrap=True)
    return diagnosis.exit_code


def _check_stack(root: Path, stack: str, *, engine: str | None, as_json: bool) -> int:
    """Run the checks of a stack, telling each as it ends."""
    from twinrun.images.checks import run_checks

    def tell(line: str) -> None:
        say(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    outcomes = run_checks(root, stack, engine=engine, say=tell)
    if as_json:
        print_json([outcome.model_dump() for outcome in outcomes])
    return 0


def schemas(root: Path) -> None:
    """Write the JSON Schemas of the manifests and print their paths."""
    from twinrun.cli.schemas import write_schemas

    for path in write_schemas(root):
        say(path.relative_to(root))
