"""Checks that run inside an image: those of images/checks/ that apply to its stack, and the stack's own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from twinrun import engines
from twinrun.architecture import misfit, refuse_misfit
from twinrun.cache import cache_root
from twinrun.discovery import load_part
from twinrun.engine import PYTHON, Command, Engine, Site, run_to_end
from twinrun.environment import inspect, lock_differences
from twinrun.errors import RunError
from twinrun.hardware import Machine, Vendor, detect, load_gpus, load_vendors
from twinrun.kernels import PROCESSOR, kernel_variables, package_folders
from twinrun.manifest import Frozen
from twinrun.process import last_lines
from twinrun.stack import LoadedStack, load_stack, normalise, pins

COMMON = Path("images") / "checks"
# A check may print a table of all kernels.
SHOWN_LINES = 500


class Outcome(Frozen):
    """What one check found."""

    check: str
    passed: bool
    told: str
    """What it printed, shortened to the last lines."""


class StackChecks:
    """A stack, provisioned in an engine with the devices of its vendor, or with none."""

    def __init__(self, root: Path, name: str, *, engine: str | None, say: Callable[[str], None]) -> None:
        """Provision the engine; raises InputError or MachineError."""
        self._root = root
        self._stack = stack = load_stack(root, name)
        machine, vendors = detect(root), load_vendors(root)
        vendor = vendors[stack.stack.vendor]
        self.devices = len(machine.devices) if machine.vendor == vendor.name else 0
        if not self.devices:
            vendor = next(one for one in vendors.values() if not one.probe)
        self.engine_name = engine or _usual_engine(stack, vendor)
        part = load_part(engines, self.engine_name)
        # An image has the kernels; elsewhere they are compiled from the project.
        carried = () if part.RUNS_IMAGES else package_folders(root, stack.stack.kernels)
        self.site = _site(root, name, carried)
        if part.RUNS_IMAGES:
            _refuse(root, stack, machine, vendor)
        self.engine: Engine = part.open_engine(stack=stack, vendor=vendor, site=self.site, say=say)
        archs = stack.stack.archs if self.devices else ()
        self._variables = kernel_variables(
            self.site, archs=archs or (PROCESSOR,), engine=self.engine, say=say
        )

    def __iter__(self) -> Iterator[Outcome]:
        """Run every check."""
        yield self._versions()
        yield from map(self._run, applicable(self._root, self._stack))

    def _versions(self) -> Outcome:
        """Compare what is installed with the lock; of the interpreter as it is, differences are only told."""
        found = lock_differences(inspect(self.engine), self._stack, self._root)
        told = "\n".join(f"{name} {difference}" for name, difference in found.items())
        kept = f"as locked, {len(self._stack.locked(self._root))} entries"
        return Outcome(check="versions", passed=not found or self.engine_name == "host", told=told or kept)

    def _run(self, path: Path) -> Outcome:
        requirements = (self._root / self._stack.folder / "requirements.in").read_text(encoding="utf-8")
        variables = {
            "TWINRUN_DEVICES": str(self.devices),
            "TWINRUN_REQUIREMENTS": " ".join(pins(requirements)),
            "TWINRUN_KERNEL_ARCHS": " ".join(self._stack.stack.archs),
            **self._variables,
        }
        command = Command(arguments=(PYTHON, self.engine.inside(path)), variables=variables)
        log = self.site.run / f"{path.stem}.log"
        log.unlink(missing_ok=True)
        status = run_to_end(self.engine, command, log=log)
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return Outcome(check=path.stem, passed=not status, told="\n".join(lines[-SHOWN_LINES:]))


def run_checks(
    root: Path, name: str, *, engine: str | None, say: Callable[[str], None]
) -> tuple[Outcome, ...]:
    """Run every check of the stack called `name`, on GPUs if this machine has its vendor's.

    Raises:
        InputError: no such stack or engine.
        MachineError: the engine cannot run here, or the image is not built for these GPUs.
        RunError: a check failed; names all that did.
    """
    checks = StackChecks(root, name, engine=engine, say=say)
    where = f"{checks.devices} GPU(s)" if checks.devices else "CPU"
    say(f"{name} on {where}, engine {checks.engine_name} {checks.engine.image_digest or ''}".rstrip())
    outcomes = []
    for outcome in checks:
        say(f"{outcome.check}: {'ok' if outcome.passed else 'failed'}{last_lines(outcome.told, SHOWN_LINES)}")
        outcomes.append(outcome)
    failed = [outcome.check for outcome in outcomes if not outcome.passed]
    if failed:
        hint = f"the whole logs are in {checks.site.run}"
        raise RunError(f"{len(failed)} of {len(outcomes)} checks failed", place=name, found=failed, hint=hint)
    return tuple(outcomes)


def applicable(root: Path, stack: LoadedStack) -> list[Path]:
    """Return the checks of a stack: the common ones whose needs its lock or kernels meet, and its own."""
    unverified = (normalise(pin.package()) for pin in stack.stack.unverified)
    has = {*stack.locked(root), *unverified, *stack.stack.kernels}
    needs = {path: _needs(path) for path in sorted((root / COMMON).glob("*.py"))}
    common = [path for path, wanted in needs.items() if wanted is not None and has.issuperset(wanted)]
    return [*common, *sorted((root / stack.folder / "checks").glob("*.py"))]


def _needs(path: Path) -> Sequence[str] | None:
    """Return what a common check says that it needs; None for a module that checks only import."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "NEEDS" for target in targets):
            assert isinstance(node, ast.Assign)
            needs: Sequence[str] = ast.literal_eval(node.value)
            return needs
    return None


def _site(root: Path, name: str, packages: tuple[Path, ...]) -> Site:
    """Return the folders of a stack's checks, made where they are missing."""
    site = Site(root=root, run=root / "runs" / "checks" / name, data=cache_root() / "data", packages=packages)
    for folder in (site.run, site.data):
        folder.mkdir(parents=True, exist_ok=True)
    return site


def _usual_engine(stack: LoadedStack, vendor: Vendor) -> str:
    """Return docker when the image can be run here, else venv."""
    return "venv" if load_part(engines, "docker").unusable(stack=stack, vendor=vendor) else "docker"


def _refuse(root: Path, stack: LoadedStack, machine: Machine, vendor: Vendor) -> None:
    built = stack.stack.archs
    unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=load_gpus(root))
    refuse_misfit(image=stack.image(), built=built, unfit=unfit)
