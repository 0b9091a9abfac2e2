"""Run on a GPU machine all that its owner can show, into one file: `nox -s gpu`, or `python -m tools.gpu`.

A loop over `invoke run` of every recipe at scale `node`, behind `pytest -m gpu` and the checks of each stack.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import MachineError
from twinrun.foundation.redaction import HiddenNames
from twinrun.machine.inventory import detect

ROOT = Path(__file__).resolve().parents[1]
# Of one recipe, and of a stack that is installed and checked, or of tests that compile what they test.
MINUTES, PREPARING = 20.0, 60.0
# A run that is told to stop ends its ranks and says where they are.
GRACE_SECONDS = 60
INVOKE = (sys.executable, "-m", "invoke")
TESTS = (sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", "recipes")


def perform(command: Sequence[str], minutes: float) -> dict[str, Any]:
    """Run a command with its messages on standard error; return how it ended and the JSON that it printed."""
    say(f"== {shlex.join(command[1:])}  (at most {minutes:g} min)")
    began, late = time.monotonic(), False
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        try:
            printed, _ = process.communicate(timeout=minutes * 60)
        except subprocess.TimeoutExpired:
            late = True
            process.send_signal(signal.SIGINT)
            try:
                printed, _ = process.communicate(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        said.seek(0)
        lines = said.read().splitlines()[-40:]
    say("\n".join(lines))
    try:
        answer = json.loads(printed)
    except ValueError:
        answer = printed[-2000:]
    ended = {"exit_code": process.returncode, "seconds": round(time.monotonic() - began, 1), "late": late}
    return {"command": command[1:], **ended, "said": lines, "printed": answer}


def say(line: str) -> None:
    """Tell whoever watches."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """List the commands, or run them and write the file to send; return the worst exit code of a run."""
    parser = argparse.ArgumentParser(prog="nox -s gpu --", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="plan each run, print its command, and stop")
    parser.add_argument(
        "--stack", help="folder of images/stacks; of each recipe the one for this GPU if left out"
    )
    parser.add_argument("--engine", help="docker, apptainer, venv or host, as `invoke run` takes it")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="limit of each run; 20 if left out")
    parser.add_argument("--recipe", action="append", help="a recipe's folder; repeatable; all if left out")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu.zip", help="the file; runs/gpu.zip")
    given = parser.parse_args(arguments)
    machine = detect(ROOT)
    if not machine.devices:
        say(f"this machine has no GPU that this process may use: {machine.probe}\nhint: invoke doctor")
        return MachineError.exit_code
    known = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("recipes/*/recipe.toml"))
    engine = ("--engine", given.engine) if given.engine else ()
    options = (*(("--stack", given.stack) if given.stack else ()), *engine)
    runs = {
        one: ("run", one, "--scale", "node", "--json", "--yes", *options) for one in given.recipe or known
    }
    plans = {one: perform((*INVOKE, *run, "--dry"), PREPARING) for one, run in runs.items()}
    taken = [one for one, plan in plans.items() if plan["exit_code"] == 0]
    for one, plan in plans.items():
        end = shlex.join(("invoke", *runs[one])) if one in taken else f"left out: {(plan['said'] or [''])[0]}"
        print(f"{one}: {end}")
    if given.dry or not taken:
        return 0 if taken else max(plan["exit_code"] for plan in plans.values())
    steps = [perform((*INVOKE, "doctor", "--json"), PREPARING), perform(TESTS, PREPARING)]
    for stack in dict.fromkeys(plans[one]["printed"]["plan"]["stack"] for one in taken):
        steps.append(perform((*INVOKE, "doctor", "--stack", stack, *engine, "--json"), PREPARING))
    done = {one: perform((*INVOKE, *runs[one]), given.minutes) for one in taken}
    records = [step["printed"]["record"] for step in done.values() if "record" in step["printed"]]
    hosts = [json.loads(Path(one).read_text())["allocation"]["nodes"] for one in records]
    hide = HiddenNames(host for nodes in hosts for host in nodes)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(given.out, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for one, step in done.items():
            record = step["printed"].get("record") if isinstance(step["printed"], dict) else None
            sent = Path(folder, f"{Path(one).name}.json")
            if record:
                form = ("report", str(Path(record).parent), "--form", "--out", str(sent))
                steps.append(perform((*INVOKE, *form), PREPARING))
            if sent.is_file():
                file.write(sent, f"submissions/{sent.name}")
        file.writestr("summary.json", json.dumps(hide.value([*steps, *done.values()]), indent=1))
    say(f"to send: {given.out}; nothing has left this machine")
    return int(max(step["exit_code"] for step in done.values()))


if __name__ == "__main__":
    sys.exit(main())
