"""Checks of a stack, run in its image or environment: those of images/checks/ that apply, and its own."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.execution.engines import load_engine
from twinrun.execution.environment import (
    PROCESSOR,
    inspect,
    kernel_variables,
    lock_differences,
    package_folders,
)
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import RunError, RunInterruptedError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import last_lines
from twinrun.machine.inventory import detect, misfit, refuse_misfit
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.stack import LoadedStack, load_stack, pins
from twinrun.manifests.vendor import load_vendors

COMMON = Path("images") / "checks"
# A check may print a table of all kernels.
SHOWN_LINES = 500


class CheckResult(Frozen):
    """Result of one check."""

    check: str
    passed: bool
    output: str
    """The last lines of what it printed."""

    def __str__(self) -> str:
        return f"{self.check}: {'ok' if self.passed else 'failed'}"


def run_checks(
    root: Path, name: str, *, engine: str | None, say: Callable[[str], None]
) -> tuple[CheckResult, ...]:
    """Run every check of the stack called `name`, on GPUs if this machine has its vendor's.

    Raises:
        InputError: no such stack or engine.
        MachineError: the engine cannot run here, or the image is not built for these GPUs.
        RunError: a check failed; names all that did.
        RunInterruptedError: Ctrl-C; names the checks that ended.
    """
    results: list[CheckResult] = []
    workspace = Workspace(root=root, run=root / "runs" / "checks" / name, data=cache_root() / "data")
    try:
        for result in _results(workspace, load_stack(root, name), asked=engine, say=say):
            results.append(result)
            say(f"{result}{last_lines(result.output, SHOWN_LINES)}")
    except KeyboardInterrupt:
        ended = ", ".join(map(str, results)) or "none"
        hint = "nothing of it is running any more; the same command starts with the first check"
        raise RunInterruptedError(f"stopped; checks that ended: {ended}", place=name, hint=hint) from None
    if failed := [result.check for result in results if not result.passed]:
        hint = f"the whole logs are in {workspace.run}"
        raise RunError(f"{len(failed)} of {len(results)} checks failed", place=name, found=failed, hint=hint)
    return tuple(results)


def _results(
    workspace: Workspace, stack: LoadedStack, *, asked: str | None, say: Callable[[str], None]
) -> Iterator[CheckResult]:
    """Provision an engine with the devices of the stack's vendor, or with none, and run every check."""
    root, machine, vendors = workspace.root, detect(workspace.root), load_vendors(workspace.root)
    vendor = vendors[stack.stack.vendor]
    devices = len(machine.devices) if machine.vendor == vendor.name else 0
    if not devices:
        vendor = next(one for one in vendors.values() if not one.probe)
    # Docker where the image can run here.
    name = asked or ("venv" if load_engine("docker").unusable(stack=stack, vendor=vendor) else "docker")
    part = load_engine(name)
    # An image has the kernels; elsewhere they are compiled from the project.
    packages = () if part.RUNS_IMAGES else package_folders(root, stack.stack.kernels)
    workspace = workspace.model_copy(update={"packages": packages})
    for folder in (workspace.run, workspace.data):
        folder.mkdir(parents=True, exist_ok=True)
    if part.RUNS_IMAGES:
        built = stack.stack.archs
        unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=known_gpus(root))
        refuse_misfit(image=stack.image(), built=built, unfit=unfit)
    engine = part.open_engine(stack=stack, vendor=vendor, workspace=workspace, say=say)
    where = f"{devices} GPU(s)" if devices else "CPU"
    say(f"{stack.stack.name} on {where}, engine {name} {engine.image_digest or ''}".rstrip())
    # First, and from outside: whatever runs in a changed environment may say anything.
    changed = engine.changed_files()
    lines = [f"{file}: {what}" for file, what in changed.items()]
    yield CheckResult(check="files", passed=not changed, output="\n".join(lines) or "as installed")
    differences = lock_differences(inspect(engine), stack, root)
    lines = [f"{package} {difference}" for package, difference in differences.items()]
    said = "\n".join(lines) or f"as locked, {len(stack.locked(root))} entries"
    # Engine `host` passes whatever differs.
    yield CheckResult(check="versions", passed=not differences or name == "host", output=said)
    archs = (devices and stack.stack.archs) or (PROCESSOR,)
    requirements = (root / stack.folder / "requirements.in").read_text(encoding="utf-8")
    variables = {
        "TWINRUN_DEVICES": str(devices),
        "TWINRUN_REQUIREMENTS": " ".join(pins(requirements)),
        "TWINRUN_KERNEL_ARCHS": " ".join(stack.stack.archs),
        **kernel_variables(workspace, archs=archs, engine=engine, say=say),
    }
    paths = applicable(root, stack, image=part.RUNS_IMAGES)
    # The two above are checks too.
    for number, path in enumerate(paths, start=3):
        say(f"{path.stem}: running, {number} of {len(paths) + 2}")
        command = Command(arguments=(PYTHON, engine.inside(path)), variables=variables)
        yield _run(path.stem, command, engine, workspace, say)


def _run(
    name: str, command: Command, engine: Engine, workspace: Workspace, say: Callable[[str], None]
) -> CheckResult:
    log = workspace.run / f"{name}.log"
    log.unlink(missing_ok=True)
    status = run_to_end(
        engine, command, log=log, waiting=lambda seconds: say(f"{name}: running for {seconds} s")
    )
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return CheckResult(check=name, passed=not status, output="\n".join(lines[-SHOWN_LINES:]))


def applicable(root: Path, stack: LoadedStack, *, image: bool = True) -> list[Path]:
    """Return the checks of a stack: the common ones whose NEEDS its locks or kernels have, and its own.

    Args:
        image: they run in the image, which has the system packages too.
    """
    system = stack.system_packages(root) if image else None
    names = [one.name for one in system.root] if system else []
    available = {*stack.locked(root), *stack.stack.kernels, *names}
    needs = {path: _needs(path) for path in sorted((root / COMMON).glob("*.py"))}
    common = [path for path, needed in needs.items() if needed is not None and available.issuperset(needed)]
    return [*common, *sorted((root / stack.folder / "checks").glob("*.py"))]


def _needs(path: Path) -> tuple[str, ...] | None:
    """Return NEEDS of a common check; None for a module that checks import."""
    found = re.search(r"(?ms)^NEEDS(?:: [^=]*)? = (\(.*?\))", path.read_text(encoding="utf-8"))
    return tuple(ast.literal_eval(found[1])) if found else None
