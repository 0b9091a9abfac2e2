"""Print the jobs of GPU runners as JSON, a stack on an architecture each: `python -m tools.matrix`.

Runners carry two labels: the name of their vendor in images/vendors/, and that of their architecture.
Labels that are given leave the jobs of other runners out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from twinrun.foundation.errors import TwinrunError, require_known
from twinrun.planning.project import Project

ROOT = Path(__file__).resolve().parents[1]


def jobs(project: Project) -> Iterator[dict[str, str]]:
    """Yield stack, vendor and architecture of each job: all for which a stack of some recipe is compiled."""
    used = {
        name
        for loaded in project.recipes().values()
        for name in (*loaded.recipe.stacks.current.values(), *loaded.recipe.stacks.also)
    }
    for name in sorted(used):
        stack = project.stack(name).stack
        for arch in stack.archs:
            yield {"stack": name, "vendor": stack.vendor, "arch": arch}


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Print the matrix and return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("labels", nargs="*", metavar="LABEL", help="a vendor or an architecture")
    labels = parser.parse_args(arguments).labels
    try:
        rows = list(jobs(Project(root)))
        known = sorted({row[key] for row in rows for key in ("vendor", "arch")})
        for label in labels:
            require_known(label, known, "no runner has this label", place="python -m tools.matrix")
    except TwinrunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    chosen = [row for row in rows if not labels or {row["vendor"], row["arch"]} & {*labels}]
    print(json.dumps({"include": chosen}, separators=(",", ":")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
