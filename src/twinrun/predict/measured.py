"""Runs of somebody's own that a prediction learns from: a line of text, or another program's log."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.manifests.settings import parse_settings
from twinrun.predict.calibration import Run, Software, Subject
from twinrun.predict.memory import largest_microbatch
from twinrun.predict.parallel_layout import GIGABIT, Machines
from twinrun.predict.request import Asked, machines_of, with_sequence
from twinrun.predict.step import IDEAL

# What programs print of a step, and its seconds over the number; None where that is a rate of a device.
PRINTED = (
    (re.compile(r"elapsed time per iteration \(ms\): *([\d.,]+)"), 1e-3),
    (re.compile(r"\btps: *(?:\x1b\[\d+m)?([\d.,]+)"), None),
    (re.compile(r"throughput/device/tokens_per_sec: *([\d.,]+)"), None),
)
MOST_BYTES = 64 << 20
FORMS = "a record, a log of Megatron, torchtitan or Composer, or `tokens_per_second=13000 nodes=1 tensor=2`"


def run_of(text: str, asked: Asked, machines: Machines, software: Software) -> Run:
    """Return the run that a line says: `tokens_per_second` of a device, or `log`, and what was different.

    Args:
        machines: what it is asked for; a run is of one node of them where it does not say.

    Raises:
        InputError: no speed, a setting that is none, a layout that does not divide, or more than the peak.
    """
    path = Path(text)
    given = {"log": text} if "=" not in text and path.is_file() else parse_settings(tuple(text.split()))
    log, rate = given.pop("log", None), given.pop("tokens_per_second", None)
    seconds = None
    if log is not None:
        seconds, rate = _of_log(Path(str(log)))
    if seconds is None and (not isinstance(rate, int | float) or rate <= 0):
        raise InputError("a run has a speed", place="--measured", found=text, allowed=FORMS)
    network = None if machines.network is None else machines.network / GIGABIT
    place: dict[str, Any] = {"nodes": 1, "devices_per_node": machines.devices_per_node, "network": network}
    machines = machines_of(machines.gpu, **{key: given.pop(key, here) for key, here in place.items()})
    settings = asked.settings.with_settings(given)
    shape, layout = with_sequence(asked.shape, settings.sequence), settings.layout(software)
    layout.check(shape.work(), machines)
    if settings.microbatch == "auto":
        layout = layout.with_microbatch(largest_microbatch(shape.work(), machines, layout) or 1)
    subject = Subject(shape, machines, layout, software)
    if seconds is None:
        seconds = layout.global_batch * shape.sequence / machines.devices / float(rate or 0)
    least = subject.time(IDEAL).seconds
    if seconds < least:
        raise InputError(
            "more than the data sheet allows: another unit of devices, a sparse peak, or another model",
            place="--measured",
            found=f"{seconds:.4g} s a step",
            allowed=f"at least {least:.4g} s",
        )
    return Run(subject, seconds)


def _of_log(path: Path) -> tuple[float | None, float | None]:
    """Return the seconds of a step, or tokens a second of a device: the median of a log's later half."""
    try:
        text = path.read_bytes()[-MOST_BYTES:].decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError("no such log", place="--measured", found=str(error), allowed=FORMS) from error
    for pattern, factor in PRINTED:
        found = [float(one.replace(",", "").rstrip(".")) for one in pattern.findall(text)]
        if found:
            middle = median(found[len(found) // 2 :])
            return (factor * middle, None) if factor else (None, middle)
    raise InputError("the log says no speed", place=f"--measured {path}", found=text[:60], allowed=FORMS)
