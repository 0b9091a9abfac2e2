"""`twinrun build` and `twinrun lock`: the image of a stack, and its pins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from twinrun.cli.console import Shown, tell
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import RunInterruptedError
from twinrun.images.command import (
    BuildProgress,
    BuildRequest,
    plan_lines,
    plan_request,
    result_lines,
    run_build,
    write_context,
)
from twinrun.images.lock import PinFinding, exit_code, refresh, stack_names
from twinrun.images.lock import check as check_locks
from twinrun.runs.prepared import demand_room


def build(
    *,
    stack: str | None = None,
    vendor: str | None = None,
    dry: Annotated[bool, Parameter(alias="-n")] = False,
    pull: str | None = None,
    push: str | None = None,
    save: Path | None = None,
    base: Path | None = None,
    wheelhouse: Path | None = None,
    index: str | None = None,
    context: Path | None = None,
) -> Shown:
    """Build the image of a stack from its locks.

    Args:
        stack: folder of images/stacks
        vendor: folder of images/vendors; alone it means the stack that the recipes use there
        dry: print the plan and stop; with --json all of it
        pull: repository@sha256:DIGEST of a registry to take the image from instead
        push: repository of a registry to push the image to
        save: FILE.tar to write the image to, or a folder for it and all that a build needs
        base: tar of the locked root file system, where mmdebstrap cannot make it
        wheelhouse: folder with all packages; nothing is downloaded then
        index: URL in place of the framework's own package index; $TWINRUN_INDEX when left out
        context: new folder to write for `docker build`; nothing is built then
    """
    typed = {name: value for name, value in locals().items() if name in BuildRequest.model_fields}
    paths = {name: value.absolute() for name, value in typed.items() if isinstance(value, Path)}
    root, request = project_root(), BuildRequest(**typed | paths)
    plan = plan_request(root, request)
    if request.save:
        folder = request.save.parent if request.save.suffix == ".tar" else request.save
        demand_room(folder, 0, option="--save")
    if dry:
        return Shown(view=lambda: "\n".join(plan_lines(plan)), data=plan.summary)
    with BuildProgress() as progress:
        for line in plan_lines(plan):
            progress.say(line)
        try:
            if request.context:
                written = write_context(root, plan, request, progress.say)
                return Shown(view=lambda: str(written), data=lambda: {"context": str(written)})
            result = run_build(root, plan, request, progress.say)
        except KeyboardInterrupt:
            hint = "the same command goes on after the last step that ended"
            raise RunInterruptedError("stopped", place=plan.image, hint=hint) from None
    return Shown(view=lambda: "\n".join(result_lines(result)), data=lambda: result.model_dump(mode="json"))


def lock(
    *,
    stack: str | None = None,
    index: str | None = None,
    upgrade: bool = False,
    only: Annotated[tuple[Literal["python", "system"], ...], Parameter(allow_repeating=True)] = (),
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
    root, rows, findings = project_root(), dict[str, list[str]](), list[PinFinding]()
    none, many = ("no findings", "findings") if check else ("nothing changed", "changed")
    for name in stack_names(root, stack):
        if check:
            found = check_locks(root, name, index=index, only=only, say=tell)
            rows[name], findings = [str(one) for one in found], [*findings, *found]
        else:
            rows[name] = list(refresh(root, name, upgrade=upgrade, only=only, say=tell))
    lines = [
        "\n  ".join([f"{name}: {f'{len(several)} {many}' if several else none}", *several])
        for name, several in rows.items()
    ]
    return Shown(view=lambda: "\n".join(lines), data=lambda: rows, code=exit_code(findings))
