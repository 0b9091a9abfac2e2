"""Forms and submissions: what is sent in with a record of hardware that a recipe has no record of."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import visible
from twinrun.machine.doctor import diagnose
from twinrun.report.words import headline
from twinrun.results.finished_run import FinishedRun
from twinrun.results.judged import Judged, gpus_of, hardware
from twinrun.results.submission import FILE, write_submission

_MARKUP = re.compile(r"[|<>&\[\]()`*@!\\~]")
# Where answers go that no probe gives.
QUESTIONS = (
    "Power limit and cooling of the card, as far as they are not the factory's",
    "What else ran on the machine meanwhile",
    "Partitioning or virtualisation of the device",
    "May the record be published under the project's licence, with your name or without",
)


def offer(run: FinishedRun) -> str:
    """Keep a form, and the file that goes with it, for a GPU that the recipe has no record of.

    Returns:
        The form, why there is none, or nothing for a GPU that is known and for a processor.
    """
    if not run.record.devices or _is_known(run):
        return ""
    try:
        send(run, run.folder / FILE)
    except InputError as reason:
        return f"The results have no such GPU yet, and cannot take this run: {reason.message}\n"
    text = form(run.record)
    write_atomically(run.folder / "form.md", text)
    return text


def send(run: FinishedRun, out: Path) -> Path:
    """Write the submission of a run to `out` and return it; raises InputError where no results take it."""
    node, allocation = run.record.node, run.record.record.allocation
    here = (allocation.nodes[0], node.kernel) == (platform.node(), platform.release())
    doctor = diagnose(run.record.project.root).model_dump(mode="json") if here else None
    write_submission(out, run.record, run.file, run.folder, doctor=doctor)
    return out


def form(record: Judged) -> str:
    """Return a form in Markdown to send in a record of a GPU with."""
    model = gpus_of(record)
    lines = [f"# {_plain(model)} for recipes/{record.plan.recipe}", "", *_facts(record), ""]
    lines += [
        f"Attach `{FILE}`, which lies beside this form: record, heads of the logs and what the machine is,"
    ]
    lines += ["without names of hosts and folders. Who takes it runs", ""]
    lines += [f"    invoke report recipes/{record.plan.recipe} --add {FILE}", ""]
    lines += ["Please answer:", "", *(f"- {question}:" for question in QUESTIONS)]
    return "\n".join(lines) + "\n"


def _is_known(run: FinishedRun) -> bool:
    """Say whether a committed record is of the same GPU model, by which its file is named."""
    gpu = run.record.gpu
    committed = (file.name for file in run.record.project.results(run.record.recipe))
    return gpu is not None and any(name.startswith(f"{gpu.id}x") for name in committed)


def _facts(record: Judged) -> Iterator[str]:
    node = record.node
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(record.record.libraries.items()))
    facts = {
        "hardware": hardware(record),
        "architecture": (node.devices[0].arch if node.devices else None) or "not known",
        "driver": node.driver or "not known",
        "kernel": node.kernel,
        "stack": f"{record.plan.stack}, engine {record.plan.engine}",
        "libraries": libraries,
        "commit": record.record.revision.commit or "none",
        "changes, SHA-256": record.record.revision.changes_sha256 or "none",
        "verdicts": headline(record),
        "record, SHA-256": record.record.digest(),
    }
    yield "| | |"
    yield "| --- | --- |"
    yield from (f"| {name} | {_plain(str(value))} |" for name, value in facts.items())


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is: no table, link, image or mention comes out of it."""
    one_line = " ".join(visible(text).split())
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", one_line)
