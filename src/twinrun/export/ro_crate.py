"""A run as a Workflow Run RO-Crate: its files in a folder, and the metadata that say what made them.

The profile is version 0.5 of https://w3id.org/ro/wfrun/workflow. The recipe is the workflow, each setting an
input, and the record what came out.
"""

from __future__ import annotations

import json
import mimetypes
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from twinrun.export.mlperf_log import mllog_lines
from twinrun.export.tracked_run import tracked_run
from twinrun.foundation.files import copy_regular, demand_absent, write_atomically
from twinrun.foundation.redaction import demand_clean
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.report.words import headline
from twinrun.results.finished_run import FinishedRun
from twinrun.results.judged import Judged, hardware

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
SPECIFICATION = "https://w3id.org/ro/crate/1.1"
PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": ("Process Run Crate", "0.5"),
    "https://w3id.org/ro/wfrun/workflow/0.5": ("Workflow Run Crate", "0.5"),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": ("Workflow RO-Crate", "1.0"),
}
PARAMETER_PROFILE = "https://bioschemas.org/profiles/FormalParameter/1.0-RELEASE"
WORKFLOW_PROFILE = "https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE"
LICENSE = "https://spdx.org/licenses/Apache-2.0"
METADATA, LOGS = "ro-crate-metadata.json", "mllog"
WORKFLOW = "recipe/recipe.toml"
# Files of a recipe that say what ran, beside its script.
RECIPE_FILES = ("recipe.toml", "published.toml", "README.md")
FILES = {
    "record.json": "Every circumstance and number of the run, with the verdicts on the published claims",
    "plan.json": "The whole run as data, as it was before anything started",
    "metrics.jsonl": "A line for each step",
    "report.html": "The run as a page",
}
MEDIA_TYPES = {".toml": "application/toml", ".jsonl": "application/jsonl", ".log": "text/plain"}

Entity = dict[str, Any]


def write_crate(out: Path, run: FinishedRun) -> Path:
    """Write the crate of a run to the folder `out`, whole or not at all, and return its metadata file.

    Raises:
        InputError: there is something at `out`.
    """
    record, recipe, tracked = run.record, run.record.recipe, tracked_run(run)
    demand_absent(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / out.name
        (made / "recipe").mkdir(parents=True)
        for file in _recipe_files(recipe, run.record.project.root):
            copy_regular(file, made / "recipe" / file.name)
        copy_regular(run.file, made / "record.json")
        for file in tracked.files:
            copy_regular(file, made / file.name)
        for point in tracked.points:
            if point.steps:
                text = mllog_lines(tracked, point, hardware=hardware(record))
                write_atomically(made / LOGS / f"{point.id}.log", text)
        for file in made.rglob("*"):
            if file.is_file():
                demand_clean(
                    file.read_text(encoding="utf-8", errors="replace"), file.relative_to(made).as_posix()
                )
        content = {"@context": CONTEXT, "@graph": list(_entities(made, record, recipe))}
        write_atomically(made / METADATA, json.dumps(content, indent=1) + "\n")
        made.rename(out)
    return out / METADATA


def _recipe_files(recipe: LoadedRecipe, root: Path) -> list[Path]:
    script = recipe.recipe.script
    files = [root / recipe.file(name) for name in (*RECIPE_FILES, *([script] if script else []))]
    return [file for file in files if file.is_file()]


def _entities(out: Path, record: Judged, recipe: LoadedRecipe) -> Iterator[Entity]:
    """Yield all that the metadata name, each with what it is."""
    names = sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.is_file())
    results = [name for name in names if not name.startswith("recipe/")]
    settings = list(_settings(record))
    yield _descriptor()
    yield _root(record, names)
    yield _workflow(recipe, names, settings)
    for name in names:
        if name != WORKFLOW:
            yield _file(out, name)
    for number, (name, value) in enumerate(settings):
        yield _input(number, name)
        yield _value(number, name, value)
    yield from _measurements(record)
    yield from (_output(name) for name in results if name in FILES)
    yield _action(record, results, len(settings))
    yield from _software(record)
    yield {"@id": LICENSE, "@type": "CreativeWork", "name": "Apache License 2.0", "identifier": "Apache-2.0"}
    for url, (title, version) in PROFILES.items():
        yield {"@id": url, "@type": "CreativeWork", "name": title, "version": version}


def _descriptor() -> Entity:
    return {
        "@id": METADATA,
        "@type": "CreativeWork",
        "about": {"@id": "./"},
        "conformsTo": [{"@id": SPECIFICATION}, {"@id": "https://w3id.org/workflowhub/workflow-ro-crate/1.0"}],
    }


def _root(record: Judged, names: list[str]) -> Entity:
    return {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{record.plan.recipe}, run {record.run}",
        "description": headline(record),
        "datePublished": record.created,
        "license": {"@id": LICENSE},
        "conformsTo": [{"@id": url} for url in PROFILES],
        "mainEntity": {"@id": WORKFLOW},
        "mentions": {"@id": "#run"},
        "hasPart": [{"@id": quote(name)} for name in names],
        "variableMeasured": [{"@id": one["@id"]} for one in _measurements(record)],
    }


def _workflow(recipe: LoadedRecipe, names: list[str], settings: list[tuple[str, str]]) -> Entity:
    return {
        "@id": WORKFLOW,
        "@type": ["File", "SoftwareSourceCode", "ComputationalWorkflow"],
        "name": recipe.recipe.name,
        "description": recipe.recipe.title,
        "version": str(recipe.recipe.version),
        "license": {"@id": LICENSE},
        "encodingFormat": MEDIA_TYPES[".toml"],
        "programmingLanguage": {"@id": "#twinrun-recipe"},
        "softwareRequirements": {"@id": "#twinrun"},
        "conformsTo": {"@id": WORKFLOW_PROFILE},
        "hasPart": [{"@id": quote(name)} for name in names if name.endswith(".py")],
        "input": [{"@id": f"#input-{number}"} for number in range(len(settings))],
        "output": [{"@id": f"#output-{name}"} for name in names if name in FILES],
    }


def _file(out: Path, name: str) -> Entity:
    found: Entity = {
        "@id": quote(name),
        "@type": ["File", "SoftwareSourceCode"] if name.endswith(".py") else "File",
        "name": name,
        "encodingFormat": MEDIA_TYPES.get(Path(name).suffix) or mimetypes.guess_type(name)[0] or "text/plain",
        "contentSize": str((out / name).stat().st_size),
    }
    if name in FILES:
        found |= {"description": FILES[name], "exampleOfWork": {"@id": f"#output-{name}"}}
    elif name.startswith(f"{LOGS}/"):
        found["description"] = "The steps of one point as lines of MLPerf's log format"
    return found


def _settings(record: Judged) -> Iterator[tuple[str, str]]:
    """Yield name and value of what was asked for."""
    plan = record.plan
    for name in ("scale", "stack", "engine", "launcher", "scheduler"):
        yield name, getattr(plan, name)
    for group, values in record.description.configuration:
        for name, value in values.items():
            yield f"{group.lower()}.{name}", value


def _input(number: int, name: str) -> Entity:
    return {
        "@id": f"#input-{number}",
        "@type": "FormalParameter",
        "name": re.sub(r"\W", "_", name),
        "description": f"`{name}` of the plan",
        "additionalType": "Text",
        "conformsTo": {"@id": PARAMETER_PROFILE},
        "workExample": {"@id": f"#value-{number}"},
    }


def _value(number: int, name: str, value: str) -> Entity:
    return {
        "@id": f"#value-{number}",
        "@type": "PropertyValue",
        "name": name,
        "value": value,
        "exampleOfWork": {"@id": f"#input-{number}"},
    }


def _output(name: str) -> Entity:
    return {
        "@id": f"#output-{name}",
        "@type": "FormalParameter",
        "name": re.sub(r"\W", "_", name),
        "description": FILES[name],
        "additionalType": "File",
        "conformsTo": {"@id": PARAMETER_PROFILE},
        "workExample": {"@id": name},
    }


def _measurements(record: Judged) -> Iterator[Entity]:
    """Yield the numbers of the record, each with its unit and the range of its samples."""
    for point in record.points:
        for one in point.measurements:
            yield {
                "@id": f"#measured-{quote(point.id)}-{quote(one.id)}",
                "@type": "PropertyValue",
                "name": f"{one.id} at {point.id}, per {one.per}",
                "propertyID": one.metric,
                "value": one.median,
                "minValue": one.low,
                "maxValue": one.high,
                "unitText": one.unit,
            }


def _action(record: Judged, results: list[str], settings: int) -> Entity:
    return {
        "@id": "#run",
        "@type": "CreateAction",
        "name": f"Run {record.run} of {record.plan.recipe} on {hardware(record)}",
        "description": headline(record),
        "instrument": {"@id": WORKFLOW},
        "object": [{"@id": f"#value-{number}"} for number in range(settings)],
        "result": [{"@id": quote(name)} for name in results],
        "endTime": record.created,
        "actionStatus": "http://schema.org/CompletedActionStatus",
    }


def _software(record: Judged) -> Iterator[Entity]:
    """Yield what ran, and what it ran on."""
    libraries = record.record.libraries
    yield {
        "@id": "#twinrun",
        "@type": "SoftwareApplication",
        "name": "twinrun",
        "version": record.record.twinrun,
        "softwareRequirements": [{"@id": f"#library-{quote(name)}"} for name in libraries],
    }
    for name, version in libraries.items():
        yield {
            "@id": f"#library-{quote(name)}",
            "@type": "SoftwareApplication",
            "name": name,
            "version": version,
        }
    yield {"@id": "#twinrun-recipe", "@type": "ComputerLanguage", "name": "recipe of twinrun, in TOML"}
