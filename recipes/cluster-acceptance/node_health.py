"""One line and an exit status for the program that watches a node: `python node_health.py RUN`.

0 is well, 1 a problem, 2 not known, as Node Problem Detector asks. With `--drain` it is what Slurm's
HealthCheckProgram runs.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import sys
from pathlib import Path

from twinrun.foundation.errors import TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.text import visible
from twinrun.protocol.checks import HEALTH_FILE, TEXTFILE, Health, textfile

WELL, PROBLEM, NOT_KNOWN = 0, 1, 2
_LINE_LETTERS = 200
_DRAIN_SECONDS = 20


def main(arguments: list[str]) -> int:
    """Say what the last checks found at a node, and return the exit status."""
    options = _parser().parse_args(arguments)
    file = options.run / HEALTH_FILE if options.run.is_dir() else options.run
    try:
        health = load_json(file, Health)
        if options.textfile:
            write_atomically(options.textfile / TEXTFILE, textfile(health))
        status, line = verdict(health, options.node, hours=options.hours)
    except TwinrunError as error:
        status, line = NOT_KNOWN, f"no result of checks: {error.message}"
    if status == PROBLEM and options.drain:
        line = _drained(options.node, line)
    sys.stdout.write(f"{visible(line)[:_LINE_LETTERS]}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python recipes/cluster-acceptance/node_health.py", description=__doc__
    )
    parser.add_argument("run", type=Path, help="run folder of cluster-acceptance, or its health.json")
    parser.add_argument("--node", default=platform.node(), help="name of the node; this one when left out")
    parser.add_argument("--hours", type=float, default=168.0, help="age after which a result says nothing")
    parser.add_argument("--textfile", type=Path, metavar="DIR", help="folder of node-exporter's textfiles")
    parser.add_argument("--drain", action="store_true", help="let Slurm drain a node with a problem")
    return parser


def verdict(health: Health, node: str, *, hours: float) -> tuple[int, str]:
    """Return the exit status for a node, and the line that says why: check, device, reason and remedy."""
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(health.created)
    found = [one for one in health.checks if one.node == node]
    if not found or age > datetime.timedelta(hours=hours):
        return NOT_KNOWN, f"{node}: not checked in the last {hours:g} hours"
    failed = [one for one in found if one.outcome == "fail"]
    if not failed:
        known = {one.check for one in found if one.outcome == "pass"}
        return WELL, f"{node}: {len(known)} checks passed"
    first = failed[0]
    where = f"{first.check} of device {first.device}" if first.device else first.check
    others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
    return PROBLEM, f"{where}{others}: {first.reason}; {first.remedy or 'no remedy is known'}"


def _drained(node: str, reason: str) -> str:
    """Ask Slurm to give the node no further job, and return the line with what it answered."""
    command = ["scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason=twinrun: {reason[:80]}"]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DRAIN_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{reason}; not drained: {error}"
    return f"{reason}; drained"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
