"""What to send in with a record of hardware that a recipe has no record of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from twinrun.foundation.text import visible
from twinrun.report.words import headline
from twinrun.results.record import Record, hardware
from twinrun.results.submission import FILE

_MARKUP = re.compile(r"[|<>&\[\]()`*@!\\~]")
# Where answers go that no probe gives.
QUESTIONS = (
    "Power limit and cooling of the card, as far as they are not the factory's",
    "What else ran on the machine meanwhile",
    "Partitioning or virtualisation of the device",
    "May the record be published under the project's licence, with your name or without",
)


def form(record: Record, known: Sequence[Record]) -> str | None:
    """Return a form to send `record` in with, in Markdown; None without a GPU, or when `known` has it."""
    if not record.machine.devices or _model(record) in {_model(one) for one in known}:
        return None
    lines = [f"# {_plain(_model(record))} for recipes/{record.plan.recipe}", "", *_facts(record), ""]
    lines += [
        f"Attach `{FILE}`, which lies beside this form: record, heads of the logs and what the machine is,"
    ]
    lines += ["without names of hosts and folders. Who takes it runs", ""]
    lines += [f"    invoke report recipes/{record.plan.recipe} --add {FILE}", ""]
    lines += ["Please answer:", "", *(f"- {question}:" for question in QUESTIONS)]
    return "\n".join(lines) + "\n"


def _model(record: Record) -> str:
    return record.gpu.name if record.gpu else record.machine.devices[0].name if record.machine.devices else ""


def _facts(record: Record) -> Iterator[str]:
    machine, environment = record.machine, record.environment
    libraries = ", ".join(f"{name} {version}" for name, version in sorted(environment.libraries.items()))
    facts = {
        "hardware": hardware(record),
        "architecture": machine.devices[0].arch or "not probed",
        "driver": machine.driver or "not probed",
        "kernel": machine.kernel,
        "stack": f"{record.plan.stack}, engine {record.plan.engine}",
        "libraries": libraries,
        "commit": record.revision.commit or "none",
        "changes, SHA-256": record.revision.changes_sha256 or "none",
        "verdicts": headline(record),
        "record, SHA-256": record.digest(),
    }
    yield "| | |"
    yield "| --- | --- |"
    yield from (f"| {name} | {_plain(str(value))} |" for name, value in facts.items())


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is: no table, link, image or mention comes out of it."""
    one_line = " ".join(visible(text).split())
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", one_line)
