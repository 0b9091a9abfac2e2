"""Run on a GPU machine all that its owner can show, into one file: `nox -s gpu`, or `python -m tools.gpu`.

Where no image can run and no environment be installed, `--engine host` takes this process's interpreter.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.steps import Step, StepResult, perform
from twinrun.execution.engines import load_engine
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.redaction import HiddenNames
from twinrun.foundation.text import duration
from twinrun.machine.inventory import detect
from twinrun.planning.project import Project
from twinrun.protocol.machine import Machine
from twinrun.report.form import send
from twinrun.results.finished_run import read_run
from twinrun.runs.selection import Request, select

ROOT = Path(__file__).resolve().parents[1]
MINUTES = 20
MOST_MINUTES = 1440
# An image or environment is gigabytes from the network, and its kernels compile for minutes.
PROVISION_MINUTES = 60


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """A recipe at `node` scale on this machine."""

    recipe: str
    stack: str
    minutes: float | None
    """Estimated; None where nothing is known of it."""
    refused: str | None
    """Why it is left out; None where it runs."""


def planned(project: Project, options: argparse.Namespace) -> Iterator[RecipePlan]:
    """Yield what each recipe would run, or why it is left out."""
    for recipe in options.recipe or [f"recipes/{name}" for name in project.recipe_names]:
        request = Request(
            recipe=recipe, stack=options.stack, engine=options.engine or "venv", scale="node", dry=True
        )
        try:
            selection = select(project, request)
        except TwinrunError as error:
            yield RecipePlan(recipe=recipe, stack="", minutes=None, refused=error.message)
            continue
        seconds = [point.seconds for point in selection.plan.points if point.seconds is not None]
        minutes = sum(seconds) / 60 if seconds else None
        too_long = minutes is not None and minutes > options.minutes
        refused = f"about {duration((minutes or 0) * 60)}; --minutes N allows more" if too_long else None
        yield RecipePlan(recipe=recipe, stack=selection.plan.stack, minutes=minutes, refused=refused)


def machine_of(root: Path) -> Machine:
    """Return this machine; raises MachineError where no GPU of any vendor is found."""
    machine = detect(root)
    if not machine.devices:
        raise MachineError(
            "this machine has no GPU, or none that this process may use",
            place="nox -s gpu",
            found=machine.probe,
            allowed="a machine where a probe of images/vendors names its GPUs",
            hint="run `invoke doctor`; it says what is missing in one line each",
        )
    return machine


def building(machine: Machine, stack: str) -> Step:
    """Return the build of a stack's image, which not every machine can make."""
    command = ("build", "--vendor", machine.vendor, "--stack", stack, "--json")
    usual = (0, MachineError.exit_code)
    return Step(name=f"build {stack}", command=command, minutes=PROVISION_MINUTES, usual=usual)


def checking(stack: str, engine: str) -> Step:
    """Return the checks of a stack, kernels against their reference among them."""
    command = ("doctor", "--stack", stack, "--engine", engine, "--json")
    return Step(name=f"check {stack}", command=command, minutes=PROVISION_MINUTES)


def running(plan: RecipePlan, engine: str, *, minutes: float) -> Step:
    """Return the run of a recipe."""
    options = ("--stack", plan.stack, "--engine", engine, "--scale", "node", "--json")
    return Step(name=f"run {Path(plan.recipe).name}", command=("run", plan.recipe, *options), minutes=minutes)


class GpuSession:
    """One session on one machine: its steps in their order, and the file that they leave."""

    def __init__(self, project: Project, machine: Machine, options: argparse.Namespace) -> None:
        self._project = project
        self._machine = machine
        self._options = options
        self._plans = list(planned(project, options))
        self._engines: dict[str, str] = {}
        self._results: list[StepResult] = []

    def listing(self) -> Iterator[str]:
        """Yield a line for each step, without running any."""
        names = Counter(device.name for device in self._machine.devices)
        yield f"machine   {', '.join(f'{count} x {name}' for name, count in names.items())}"
        yield from (f"step      {step.line()}" for step in self._steps(dry=True))
        for plan in self._plans:
            if plan.refused:
                yield f"left out  {plan.recipe}: {plan.refused}"
        runs = [plan.minutes for plan in self._plans if not plan.refused]
        known = [minutes for minutes in runs if minutes]
        if known:
            yield f"time      about {duration(sum(known) * 60)} for the {len(known)} runs with an estimate"
        if unknown := len(runs) - len(known):
            most = duration(unknown * self._options.minutes * 60)
            yield f"time      up to {most} for the {unknown} runs without one, by their limits"
        yield f"file      {self._options.out}; you send it yourself, and nothing else leaves this machine"

    def run(self) -> int:
        """Run every step, write the file, and return an exit code."""
        try:
            for step in self._steps(dry=False):
                say(f"== {step.line()}")
                self._results.append(perform(step, root=self._project.root))
                say(f"== {self._results[-1].line()}")
        except KeyboardInterrupt:
            self._write()
            return RunInterruptedError.exit_code
        self._write()
        if any(not result.usual for result in self._results):
            return RunError.exit_code
        return int(any(result.exit_code for result in self._results if result.name.startswith("run")))

    def _steps(self, *, dry: bool) -> Iterator[Step]:
        """Yield the steps; the engine of each stack follows from how its build ended."""
        yield Step(name="doctor", command=("doctor", "--json"), minutes=2, usual=(0, MachineError.exit_code))
        taken = [plan for plan in self._plans if not plan.refused]
        for stack in dict.fromkeys(plan.stack for plan in taken):
            engine = self._options.engine
            if not engine:
                yield building(self._machine, stack)
                engine = "docker" if dry or not self._results[-1].exit_code else "venv"
            self._engines[stack] = engine
            yield checking(stack, engine)
            # What could not be provisioned once is not tried again for each recipe.
            if not dry and self._results[-1].exit_code in (InputError.exit_code, MachineError.exit_code):
                del self._engines[stack]
        for plan in taken:
            if plan.stack in self._engines:
                yield running(plan, self._engines[plan.stack], minutes=self._options.minutes)

    def _write(self) -> None:
        """Write the file to send: steps, what doctor and checks said, and each run without names."""
        out: Path = self._options.out
        hide = HiddenNames([platform.node()])
        summary = {
            "schema_version": 1,
            "gpus": Counter(device.name for device in self._machine.devices),
            "driver": self._machine.driver,
            "steps": [hide.value(result.model_dump(mode="json")) for result in self._results],
            "left_out": {plan.recipe: plan.refused for plan in self._plans if plan.refused},
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.part")
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive,
        ):
            archive.writestr("not-sent.json", as_json(self._add_submissions(archive, Path(folder))))
            archive.writestr("summary.json", as_json(summary))
        part.replace(out)
        say(f"to send: {out}")

    def _add_submissions(self, archive: zipfile.ZipFile, folder: Path) -> dict[str, str]:
        """Add the submission of each run to the archive; return the runs that cannot be sent, and why."""
        refused = {}
        for run in filter(None, (result.run_folder() for result in self._results)):
            file = folder / f"{run.parent.name}.json"
            try:
                sent = send(read_run(run, self._project), file)
                archive.write(sent, f"submissions/{file.name}")
            except TwinrunError as error:
                refused[run.parent.name] = error.message
        return refused


def say(line: str) -> None:
    """Tell whoever watches."""
    print(line, file=sys.stderr, flush=True)


def as_json(content: object) -> str:
    """Return the text of a file of the archive."""
    return f"{json.dumps(content, indent=1)}\n"


def minutes(text: str) -> float:
    """Return a limit that was typed; raises ValueError, which argparse tells."""
    value = float(text)
    if not 0 < value <= MOST_MINUTES:
        raise ValueError(text)
    return value


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the options; argparse ends with 2 on what it does not know."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="print each command with its limit, and stop")
    parser.add_argument(
        "--stack", help="folder of images/stacks; of each recipe the one for this GPU when left out"
    )
    parser.add_argument(
        "--engine", help="docker, apptainer, venv or host; docker where the image can be built when left out"
    )
    parser.add_argument(
        "--minutes",
        type=minutes,
        default=MINUTES,
        help=f"limit of each run in minutes; {MINUTES} when left out",
    )
    parser.add_argument(
        "--recipe", action="append", help="a recipe's folder; may be given many times; all when left out"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "gpu.zip",
        help="the file to send; runs/gpu.zip when left out",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Run the session, or list its steps, and return its exit code."""
    options = parsed(arguments)
    try:
        project = Project(root)
        if options.engine:
            load_engine(options.engine)
        if options.stack:
            project.stack(options.stack)
        for recipe in options.recipe or ():
            project.recipe(recipe)
        session = GpuSession(project, machine_of(root), options)
        if options.dry:
            print("\n".join(session.listing()))
            return 0
        return session.run()
    except TwinrunError as error:
        say(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
