"""`invoke kernels`: what compiled code predicts of the recipes' kernels."""

from __future__ import annotations

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.terminal import say
from twinrun.predict.kernel_times import kernel_times


def kernels(arch: str, *, as_json: bool) -> None:
    """Print the predicted times of an architecture's kernels; raises InputError for one that has none."""
    known = dict.fromkeys(one.arch for one in kernel_times())
    if not arch:
        raise InputError("an architecture is missing", place="--arch", allowed=list(known))
    require_known(arch, known, "unknown architecture", place="--arch")
    rows = [one for one in kernel_times() if one.arch == arch]
    if as_json:
        print_json([one.model_dump() for one in rows])
        return
    cells = [("kernel", "batch x heads x length x size", "ms, predicted", "90 % interval", "bound by")]
    cells += [
        (
            one.kernel + (" causal" if one.causal else ""),
            "x".join(map(str, one.shape)),
            f"{one.ms:g}",
            f"{one.low:g} to {one.high:g}",
            one.bound,
        )
        for one in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
