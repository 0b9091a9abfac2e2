"""A run as a Workflow Run RO-Crate: its files in a folder, and the metadata that say what made them.

The profile is version 0.5 of https://w3id.org/ro/wfrun/workflow. The recipe is the workflow, each setting an
input, and the record what came out.
"""

from __future__ import annotations

import mimetypes
import re
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rocrate.model.contextentity import ContextEntity
from rocrate.rocrate import ROCrate

from twinrun.foundation.files import copy_regular, demand_absent
from twinrun.foundation.redaction import demand_clean
from twinrun.report.words import headline
from twinrun.results.judged import Judged, hardware
from twinrun.results.reading import FinishedRun

PROFILES = {
    "https://w3id.org/ro/wfrun/process/0.5": {"name": "Process Run Crate", "version": "0.5"},
    "https://w3id.org/ro/wfrun/workflow/0.5": {"name": "Workflow Run Crate", "version": "0.5"},
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0": {"name": "Workflow RO-Crate", "version": "1.0"},
}
WORKFLOW_PROFILE = "https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE"
LICENSE = "https://spdx.org/licenses/Apache-2.0"
METADATA, WORKFLOW = "ro-crate-metadata.json", "recipe/recipe.toml"
# Files of a recipe that say what ran, beside its script.
RECIPE_FILES = ("recipe.toml", "published.toml", "README.md")
FILES = {
    "record.json": "Every circumstance and sample of the run, from which its numbers and verdicts follow",
    "plan.json": "The whole run as data, as it was before anything started",
    "metrics.jsonl": "A line for each step",
    "report.html": "The run as a page",
}
MEDIA_TYPES = {".toml": "application/toml", ".jsonl": "application/jsonl"}


def write_crate(out: Path, run: FinishedRun) -> Path:
    """Write the crate of a run to the folder `out`, whole or not at all, and return its metadata file.

    Raises:
        InputError: there is something at `out`.
    """
    recipe, root = run.record.recipe, run.record.project.root
    script = recipe.recipe.script
    sources = {
        f"recipe/{name}": root / recipe.file(name) for name in (*RECIPE_FILES, *filter(None, [script]))
    }
    sources |= {name: run.folder / name for name in FILES} | {"record.json": run.file}
    demand_absent(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
        made = Path(folder) / out.name
        (made / "recipe").mkdir(parents=True)
        names = [name for name, source in sources.items() if source.is_file()]
        for name in names:
            copy_regular(sources[name], made / name)
            demand_clean((made / name).read_text(encoding="utf-8", errors="replace"), name)
        _crate(made, sorted(names), run.record).metadata.write(made)
        made.rename(out)
    return out / METADATA


def _crate(made: Path, names: list[str], record: Judged) -> ROCrate:
    """Return the crate of the files `names` of a folder, each with what it is."""
    crate, recipe = ROCrate(version="1.1"), record.recipe.recipe
    inputs, outputs = _inputs(crate, record), dict[str, ContextEntity]()
    files = {}
    for name in names:
        kind = mimetypes.guess_type(name)[0] or "text/plain"
        about: dict[str, Any] = {"name": name, "encodingFormat": MEDIA_TYPES.get(Path(name).suffix, kind)}
        if name in FILES:
            outputs[name] = _parameter(crate, f"#output-{name}", name, "File", FILES[name])
            outputs[name]["workExample"] = {"@id": name}
            about |= {"description": FILES[name], "exampleOfWork": outputs[name]}
        kinds = ["SoftwareSourceCode"] * (name.endswith(".py") or name == WORKFLOW)
        kinds += ["ComputationalWorkflow"] * (name == WORKFLOW)
        about |= {"@type": ["File", *kinds]} if kinds else {}
        files[name] = crate.add_file(made / name, name, properties=about, record_size=True)
    libraries = ", ".join(f"{name} {version}" for name, version in record.record.libraries.items())
    scripts = [one for name, one in files.items() if name.endswith(".py")]
    about = {"name": "Apache License 2.0", "identifier": "Apache-2.0"}
    terms = _entity(crate, LICENSE, "CreativeWork", about)
    language = _entity(crate, "#recipe", "ComputerLanguage", {"name": "recipe of twinrun, in TOML"})
    about = {"name": "twinrun", "version": record.record.twinrun, "description": f"with {libraries}"}
    software = _entity(crate, "#twinrun", "SoftwareApplication", about)
    workflow, root = files[WORKFLOW], crate.root_dataset
    about = {"name": recipe.name, "description": recipe.title, "version": str(recipe.version)}
    about |= {"conformsTo": {"@id": WORKFLOW_PROFILE}, "programmingLanguage": language, "hasPart": scripts}
    about |= {"input": [one for one, _ in inputs], "output": [*outputs.values()], "license": terms}
    _describe(workflow, about | {"softwareRequirements": software})
    results = [one for name, one in files.items() if not name.startswith("recipe/")]
    said, values = headline(record), [value for _, value in inputs]
    about = {"name": f"Run {record.run} of {recipe.name} on {hardware(record)}", "description": said}
    about |= {"endTime": record.created, "actionStatus": "http://schema.org/CompletedActionStatus"}
    action = crate.add_action(workflow, "#run", object=values, result=results, properties=about)
    profiles = [_entity(crate, url, "CreativeWork", one) for url, one in PROFILES.items()]
    about = {"name": f"{recipe.name}, run {record.run}", "description": said, "datePublished": record.created}
    about |= {"license": terms, "mainEntity": workflow, "mentions": action, "conformsTo": profiles}
    _describe(root, about | {"variableMeasured": _measurements(crate, record)})
    crate.metadata["conformsTo"] = [{"@id": crate.metadata.profile}, {"@id": [*PROFILES][-1]}]
    return crate


def _describe(entity: Any, about: dict[str, Any]) -> None:
    for name, value in about.items():
        entity[name] = value


def _entity(crate: ROCrate, identifier: str, kind: str, about: dict[str, Any]) -> ContextEntity:
    return crate.add(ContextEntity(crate, identifier, properties={"@type": kind, **about}))


def _parameter(crate: ROCrate, identifier: str, name: str, kind: str, description: str) -> ContextEntity:
    return crate.add_formal_parameter(re.sub(r"\W", "_", name), kind, identifier, description)


def _inputs(crate: ROCrate, record: Judged) -> list[tuple[ContextEntity, ContextEntity]]:
    """Add what was asked for, each as a parameter with its value."""
    plan, found = record.plan, []
    settings = {name: getattr(plan, name) for name in ("scale", "stack", "engine", "launcher", "scheduler")}
    for group, values in record.description.configuration:
        settings |= {f"{group.lower()}.{name}": value for name, value in values.items()}
    for number, (name, value) in enumerate(settings.items()):
        parameter = _parameter(crate, f"#input-{number}", name, "Text", f"`{name}` of the plan")
        about = {"name": name, "value": value, "exampleOfWork": parameter}
        parameter["workExample"] = _entity(crate, f"#value-{number}", "PropertyValue", about)
        found.append((parameter, parameter["workExample"]))
    return found


def _measurements(crate: ROCrate, record: Judged) -> list[ContextEntity]:
    """Add the numbers of the record, each with its unit and the range of its samples."""
    found = []
    for point in record.points:
        for one in point.measurements:
            name = f"#measured-{quote(point.id)}-{quote(one.id)}"
            about: dict[str, Any] = {"name": f"{one.id} at {point.id}, per {one.per}", "value": one.median}
            about |= {"minValue": one.low, "maxValue": one.high, "unitText": one.unit}
            about |= {"propertyID": one.metric}
            found.append(_entity(crate, name, "PropertyValue", about))
    return found
