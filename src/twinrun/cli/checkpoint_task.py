"""The command `invoke checkpoint`."""

from __future__ import annotations

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

from twinrun.cli.exit_codes import exit_on_error
from twinrun.cli.options import count


@task(
    help={
        "action": "verify (every byte against its digest), list, or convert (to or from Hugging Face format)",
        "place": "folder or s3://bucket/prefix with the checkpoints of a run, or a folder of transformers",
        "step": "one checkpoint; all when left out, and the newest to convert",
        "out": "where a conversion writes: a folder, or s3://bucket/prefix for a checkpoint",
        "json": "print JSON",
    }
)
def checkpoint(
    context: Context,
    action: str,
    place: str,
    step: str = "",
    out: str = "",
    json: bool = False,
) -> None:
    """Verify, list or convert the checkpoints of a run."""
    with exit_on_error():
        # A command pays only for what it imports.
        from twinrun.cli import checkpoint as command

        steps = count(step, "--step")
        code = command.checkpoint(action, place, step=steps, out=out or None, as_json=json)
    raise Exit(code=code)
