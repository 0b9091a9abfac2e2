"""Checks of a stack, run in its image or environment: those of images/checks/ that apply, and its own."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.execution.engines import load_engine
from twinrun.execution.environment import inspect, lock_differences
from twinrun.execution.kernels import PROCESSOR, kernel_variables, package_folders
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import RunError, RunInterruptedError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import last_lines
from twinrun.machine.architecture import misfit, refuse_misfit
from twinrun.machine.inventory import detect
from twinrun.manifests.stack import LoadedStack, load_stack, normalise, pins
from twinrun.manifests.vendor import Vendor, load_gpus, load_vendors
from twinrun.protocol.machine import Machine

COMMON = Path("images") / "checks"
# A check may print a table of all kernels.
SHOWN_LINES = 500


class CheckResult(Frozen):
    """Result of one check."""

    check: str
    passed: bool
    output: str
    """The last lines of what it printed."""


class StackChecks:
    """A stack, provisioned in an engine with the devices of its vendor, or with none."""

    def __init__(self, root: Path, name: str, *, engine: str | None, say: Callable[[str], None]) -> None:
        """Provision the engine; raises InputError or MachineError."""
        self._root, self._say = root, say
        self._stack = stack = load_stack(root, name)
        machine, vendors = detect(root), load_vendors(root)
        vendor = vendors[stack.stack.vendor]
        self.devices = len(machine.devices) if machine.vendor == vendor.name else 0
        if not self.devices:
            vendor = next(one for one in vendors.values() if not one.probe)
        # Docker where the image can run here.
        unusable = engine or load_engine("docker").unusable(stack=stack, vendor=vendor)
        self.engine_name = engine or ("venv" if unusable else "docker")
        part = load_engine(self.engine_name)
        # An image has the kernels; elsewhere they are compiled from the project.
        packages = () if part.RUNS_IMAGES else package_folders(root, stack.stack.kernels)
        self.workspace = _workspace(root, name, packages)
        if part.RUNS_IMAGES:
            _check_architecture(root, stack, machine, vendor)
        self.engine: Engine = part.open_engine(stack=stack, vendor=vendor, workspace=self.workspace, say=say)
        archs = stack.stack.archs if self.devices else ()
        self._variables = kernel_variables(
            self.workspace, archs=archs or (PROCESSOR,), engine=self.engine, say=say
        )

    def __iter__(self) -> Iterator[CheckResult]:
        """Run every check."""
        # First, and from outside: whatever runs in a changed environment may say anything.
        checks: dict[str, Callable[[], CheckResult]] = {"files": self._files, "versions": self._versions}
        for path in applicable(self._root, self._stack):
            checks[path.stem] = functools.partial(self._run, path)
        for number, (name, check) in enumerate(checks.items(), start=1):
            self._say(f"{name}: running, {number} of {len(checks)}")
            yield check()

    def _versions(self) -> CheckResult:
        """Compare the installed packages with the lock; engine `host` passes whatever differs."""
        differences = lock_differences(inspect(self.engine), self._stack, self._root)
        lines = [f"{name} {difference}" for name, difference in differences.items()]
        as_locked = f"as locked, {len(self._stack.locked(self._root))} entries"
        passed = not differences or self.engine_name == "host"
        return CheckResult(check="versions", passed=passed, output="\n".join(lines) or as_locked)

    def _files(self) -> CheckResult:
        """Hold every entry of an environment against its installation."""
        changed = self.engine.changed_files(whole=True)
        lines = [f"{name}: {what}" for name, what in changed.items()]
        return CheckResult(check="files", passed=not changed, output="\n".join(lines) or "as installed")

    def _run(self, path: Path) -> CheckResult:
        requirements = (self._root / self._stack.folder / "requirements.in").read_text(encoding="utf-8")
        variables = {
            "TWINRUN_DEVICES": str(self.devices),
            "TWINRUN_REQUIREMENTS": " ".join(pins(requirements)),
            "TWINRUN_KERNEL_ARCHS": " ".join(self._stack.stack.archs),
            **self._variables,
        }
        command = Command(arguments=(PYTHON, self.engine.inside(path)), variables=variables)
        log = self.workspace.run / f"{path.stem}.log"
        log.unlink(missing_ok=True)
        status = run_to_end(
            self.engine,
            command,
            log=log,
            waiting=lambda seconds: self._say(f"{path.stem}: running for {seconds} s"),
        )
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return CheckResult(check=path.stem, passed=not status, output="\n".join(lines[-SHOWN_LINES:]))


def run_checks(
    root: Path, name: str, *, engine: str | None, say: Callable[[str], None]
) -> tuple[CheckResult, ...]:
    """Run every check of the stack called `name`, on GPUs if this machine has its vendor's.

    Raises:
        InputError: no such stack or engine.
        MachineError: the engine cannot run here, or the image is not built for these GPUs.
        RunError: a check failed; names all that did.
        Interrupted: Ctrl-C; names the checks that ended.
    """
    results: list[CheckResult] = []
    try:
        checks = StackChecks(root, name, engine=engine, say=say)
        where = f"{checks.devices} GPU(s)" if checks.devices else "CPU"
        say(f"{name} on {where}, engine {checks.engine_name} {checks.engine.image_digest or ''}".rstrip())
        for result in checks:
            results.append(result)
            say(f"{_status(result)}{last_lines(result.output, SHOWN_LINES)}")
    except KeyboardInterrupt:
        raise _interrupted(name, results) from None
    failed = [result.check for result in results if not result.passed]
    if failed:
        hint = f"the whole logs are in {checks.workspace.run}"
        raise RunError(f"{len(failed)} of {len(results)} checks failed", place=name, found=failed, hint=hint)
    return tuple(results)


def _interrupted(name: str, results: Sequence[CheckResult]) -> RunInterruptedError:
    """Return the error that says which checks of the stack called `name` ended before the stop."""
    ended = ", ".join(map(_status, results)) or "none"
    hint = "nothing of it is running any more; the same command starts with the first check"
    return RunInterruptedError(f"stopped; checks that ended: {ended}", place=name, hint=hint)


def _status(result: CheckResult) -> str:
    return f"{result.check}: {'ok' if result.passed else 'failed'}"


def applicable(root: Path, stack: LoadedStack) -> list[Path]:
    """Return the checks of a stack: the common ones whose NEEDS its lock or kernels have, and its own."""
    unverified = (normalise(pin.package()) for pin in stack.stack.unverified)
    available = {*stack.locked(root), *unverified, *stack.stack.kernels}
    needs = {path: _needs(path) for path in sorted((root / COMMON).glob("*.py"))}
    common = [path for path, needed in needs.items() if needed is not None and available.issuperset(needed)]
    return [*common, *sorted((root / stack.folder / "checks").glob("*.py"))]


def _needs(path: Path) -> Sequence[str] | None:
    """Return NEEDS of a common check; None for a module that checks import."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "NEEDS" for target in targets):
            assert isinstance(node, ast.Assign)
            needs: Sequence[str] = ast.literal_eval(node.value)
            return needs
    return None


def _workspace(root: Path, name: str, packages: tuple[Path, ...]) -> Workspace:
    """Return the folders of a stack's checks, made where they are missing."""
    workspace = Workspace(
        root=root, run=root / "runs" / "checks" / name, data=cache_root() / "data", packages=packages
    )
    for folder in (workspace.run, workspace.data):
        folder.mkdir(parents=True, exist_ok=True)
    return workspace


def _check_architecture(root: Path, stack: LoadedStack, machine: Machine, vendor: Vendor) -> None:
    built = stack.stack.archs
    unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=load_gpus(root))
    refuse_misfit(image=stack.image(), built=built, unfit=unfit)
