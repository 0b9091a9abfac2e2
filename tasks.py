"""The commands of twinrun: `invoke --list` shows them, `invoke --help run` explains one."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import task

ROOT = Path(__file__).resolve().parent


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn our errors and Ctrl-C into a message and an exit code, without a traceback."""
    from twinrun.errors import Interrupted, TwinrunError

    # A scheduler ends a job with SIGTERM, a closed terminal with SIGHUP: the same orderly stop as Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup the signal is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except TwinrunError as error:
        print(error, file=sys.stderr)
        raise Exit(code=error.exit_code) from None
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        raise Exit(code=Interrupted.exit_code) from None


@task(
    iterable=["set"],
    help={
        "recipe": "folder of the recipe, for example recipes/mpt7b-scaling",
        "vendor": "folder of images/vendors; what the machine has when left out",
        "stack": "folder of images/stacks; the recipe's current one when left out",
        "engine": "docker, venv or host",
        "launcher": "who starts the ranks",
        "scale": "smoke, node or paper",
        "set": "key=value, a field of the recipe's training table; may be given many times",
        "out": "folder for the run instead of runs/",
        "resume": "go on with the newest unfinished run of the same plan",
        "dry": "print the plan and stop",
        "json": "print a summary as JSON on stdout and nothing else there",
    },
)
def run(
    context: Context,
    recipe: str,
    vendor: str = "",
    stack: str = "",
    engine: str = "",
    launcher: str = "",
    scale: str = "",
    set: list[str] | None = None,
    out: str = "",
    resume: bool = False,
    dry: bool = False,
    json: bool = False,
) -> None:
    """Run a published experiment and judge its claims."""
    with told():
        from twinrun import commands

        request = commands.Request(
            recipe=recipe,
            vendor=vendor or None,
            stack=stack or None,
            engine=engine or None,
            launcher=launcher or None,
            scale=scale or None,
            settings=tuple(set or ()),
            dry=dry,
        )
        code = commands.run(ROOT, request, out=Path(out) if out else None, resume=resume, as_json=json)
    raise Exit(code=code)


@task(help={"a": "record.json or run folder", "b": "the other one", "json": "print JSON"})
def compare(context: Context, a: str, b: str, json: bool = False) -> None:
    """Explain what differs between two records."""
    with told():
        from twinrun import commands

        commands.compare(Path(a), Path(b), as_json=json)


@task(help={"what": "folder of a recipe or of a run, or a record", "out": "HTML file"})
def report(context: Context, what: str, out: str = "") -> None:
    """Write the HTML report of a run, or of a recipe's committed records."""
    with told():
        from twinrun import commands

        commands.report(ROOT, what, out=Path(out) if out else None)


@task(help={"json": "print JSON"})
def doctor(context: Context, json: bool = False) -> None:
    """Check what this machine offers: GPUs, engines, disk, permissions."""
    with told():
        from twinrun import commands

        code = commands.doctor(ROOT, as_json=json)
    raise Exit(code=code)


@task(
    help={
        "stack": "one stack; all when left out",
        "index": "URL of a further package index, for wheels only it carries",
        "upgrade": "let packages move that the requirements do not pin",
        "check": "change nothing; exit 1 when a lock would change",
    }
)
def lock(
    context: Context, stack: str = "", index: str = "", upgrade: bool = False, check: bool = False
) -> None:
    """Resolve the Python packages of stacks to versions and hashes."""
    with told():
        from twinrun import commands

        code = commands.lock(ROOT, stack or None, index=index or None, upgrade=upgrade, check=check)
    raise Exit(code=code)


@task(
    help={
        "name": "a data set of the recipe, for example c4",
        "recipe": "folder of the recipe",
        "engine": "where it is tokenised: venv, docker or host",
        "files": "how many files of the data set to take; all when left out",
        "endpoint": "server to fetch from instead of the public hub",
    }
)
def data(
    context: Context,
    name: str,
    recipe: str = "recipes/mpt7b-scaling",
    engine: str = "venv",
    files: int = 0,
    endpoint: str = "",
) -> None:
    """Fetch, verify and tokenise a data set; goes on where it was stopped."""
    with told():
        from twinrun import commands

        commands.data(
            ROOT, name, recipe=recipe, engine=engine, files=files or None, endpoint=endpoint or None
        )


@task
def schemas(context: Context) -> None:
    """Write the JSON Schemas of the manifests that editors complete and check with."""
    with told():
        from twinrun import commands

        commands.schemas(ROOT)
