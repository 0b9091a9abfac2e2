"""What to send in with a record of hardware that a recipe has no record of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.report.words import headline
from twinrun.results.record import Record, hardware

# Where answers go that no probe gives.
QUESTIONS = (
    "Power limit and cooling of the card, as far as they are not the factory's",
    "What else ran on the machine meanwhile",
    "Partitioning or virtualisation of the device",
    "May the record be published under the project's licence, with your name or without",
)
FILES = ("record.json", "metrics.jsonl", "plan.json", "report.html", "log/")


def form(record: Record, known: Sequence[Record]) -> str | None:
    """Return a form to send `record` in with, in Markdown; None without a GPU, or when `known` has it."""
    if not record.machine.devices or _model(record) in {_model(one) for one in known}:
        return None
    lines = [f"# {_model(record)} for recipes/{record.plan.recipe}", "", *_facts(record), ""]
    lines += ["Attach, as the run has written them:", "", *(f"- [ ] {name}" for name in FILES), ""]
    lines += [f"The record goes to `recipes/{record.plan.recipe}/results/{file_name(record)}`.", ""]
    lines += ["Please answer:", "", *(f"- {question}:" for question in QUESTIONS)]
    return "\n".join(lines) + "\n"


def file_name(record: Record) -> str:
    """Return the name under which a record is committed."""
    model = record.gpu.id if record.gpu else record.machine.vendor
    count = max((point.devices for point in record.points), default=0)
    return f"{model}x{count}_{record.plan.stack}_{record.created[:10]}.json"


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
    yield from (f"| {name} | {value} |" for name, value in facts.items())
