"""Recipes as regression tests of ReFrame: `reframe --checkpath reframe_recipes.py --run`.

twinrun judges: a test fails where a claim or a check fails. Every number that was judged becomes a
performance variable, and the published value is its reference in ReFrame's logs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import run_before, sanity_function, variable

FAILURES = ("not-reproduced", "fails-here", "failed")


@rfm.simple_test
class PublishedExperiment(rfm.RunOnlyRegressionTest):
    """One recipe on the nodes of a partition, whose scheduler starts this command on the first of them."""

    recipe = variable(str, value="cluster-acceptance")
    """Name or folder of a recipe; `--parameterize recipe=A,B` makes a test of each."""
    scale = variable(str, value="node")
    engine = variable(str, value="venv")
    options = variable(str, value="")
    """Further options of `twinrun run`, as typed."""

    descr = "a published experiment, run again and judged"
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    executable = "twinrun"
    time_limit = "2h"

    @run_before("run")
    def compose_command(self) -> None:
        """Ask for the recipe; standard output is the run's summary alone."""
        self.executable_opts = [
            *("run", self.recipe, "--scale", self.scale, "--engine", self.engine),
            *("--out", "runs", "--yes", "--json", *self.options.split()),
        ]

    def summary(self) -> dict[str, Any]:
        """Return what `--json` printed."""
        found: dict[str, Any] = json.loads(Path(self.stagedir, str(self.stdout)).read_text(encoding="utf-8"))
        return found

    @sanity_function
    def nothing_failed(self) -> Any:
        """Hold every claim and every check; a run that was refused says why on its standard error."""
        written = Path(self.stagedir, str(self.stdout)).read_text(encoding="utf-8")
        if not written.strip():
            said = Path(self.stagedir, str(self.stderr)).read_text(encoding="utf-8")
            return sn.assert_true(written, msg=said[-2000:])
        found = self.summary()
        failed = [one["claim"] for one in found["verdicts"] if one["final"] in FAILURES]
        failed += [
            one["id"] for point in found["points"] for one in point["checks"] if one["outcome"] == "fail"
        ]
        return sn.assert_false(failed, msg=f"{found['headline']} {', '.join(failed)}")

    @run_before("performance")
    def take_numbers(self) -> None:
        """Make each judged number a performance variable, with the published value as its reference."""
        references: dict[str, tuple[float, None, None, str]] = {}
        for verdict in self.summary()["verdicts"]:
            said = verdict["here"] or verdict
            if said["measured"] is not None and math.isfinite(said["measured"]):
                name = verdict["claim"]
                self.perf_variables[name] = sn.make_performance_function(
                    sn.defer(said["measured"]), said["unit"]
                )
                references[name] = (said["published"], None, None, said["unit"])
        self.reference = {"*": references}
