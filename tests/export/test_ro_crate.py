"""A run as an RO-Crate, validated by the package for it."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import invoke
from tests.export.runs import record_with_power, write_run
from tests.records import PROJECT, ROOT, TRAINING
from twinrun.results.judged import Judged

CONTEXT = "https://w3id.org/ro/crate/1.1/context"
# Terms whose address is another in version 1.3 of the context, which comes with the package rocrate.
TERMS = {
    "ComputationalWorkflow": "https://bioschemas.org/ComputationalWorkflow",
    "FormalParameter": "https://bioschemas.org/FormalParameter",
    "input": "https://bioschemas.org/ComputationalWorkflow#input",
    "output": "https://bioschemas.org/ComputationalWorkflow#output",
}
RECORDED = [name for name in PROJECT.recipe_names if PROJECT.results(PROJECT.recipe(name))]


@pytest.fixture(scope="module")
def crate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("run"), record_with_power())
    done = invoke(ROOT, "report", str(run), "--crate")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run}/crate/ro-crate-metadata.json\n"
    return run / "crate"


def entities(crate: Path) -> dict[str, Any]:
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    found = {one["@id"]: one for one in graph}
    assert len(found) == len(graph)
    # Every entity that is named is described.
    named = set().union(*map(references, found.values()))
    assert {name for name in named - found.keys() if not name.startswith("https://")} == set()
    return found


def references(value: object) -> set[str]:
    if isinstance(value, dict):
        return {value["@id"]} if {*value} == {"@id"} else set().union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_the_crate_has_the_run_and_its_recipe(crate: Path) -> None:
    files = {file.relative_to(crate).as_posix() for file in crate.rglob("*") if file.is_file()}
    recipe = {f"recipe/{name}" for name in ("recipe.toml", "published.toml", "README.md")}
    assert files >= {"record.json", "report.html", "ro-crate-metadata.json", *recipe}
    for name in recipe:
        source = ROOT / "recipes" / TRAINING / Path(name).name
        assert (crate / name).read_bytes() == source.read_bytes()
    assert (crate / "record.json").read_bytes() == (crate.parent / "record.json").read_bytes()


def test_what_was_measured_and_what_was_set_are_entities(crate: Path) -> None:
    found = entities(crate)
    measured = found["#measured-nodes%3D1-power"]
    assert (measured["value"], measured["unitText"]) == (pytest.approx(250.0), "W")
    record: Judged = record_with_power()
    inputs = {one["name"]: one["value"] for name, one in found.items() if name.startswith("#value-")}
    assert inputs["training.model"] == record.plan.part.training.model
    assert inputs["model.width"] == str(record.plan.part.shape.width)


# Of rdflib, about its own.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.needs("rocrate", "rocrate_validator")
def test_the_profile_of_workflow_runs_holds(crate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests
    from rocrate_validator import services
    from rocrate_validator.models import Severity, ValidationSettings
    from rocrate_validator.utils.http import HttpRequester

    bundled = importlib.resources.files("rocrate") / "data" / "ro-crate.jsonld"
    context = json.loads(bundled.read_text(encoding="utf-8"))
    context["@context"] |= TERMS

    def answer(_self: object, url: str, **_: object) -> requests.Response:
        assert url == CONTEXT
        response = requests.Response()
        response.status_code, response._content = 200, json.dumps(context).encode()
        response.headers["Content-Type"] = "application/ld+json"
        return response

    monkeypatch.setattr(HttpRequester, "get", answer, raising=False)
    monkeypatch.setattr(HttpRequester, "head", answer, raising=False)
    settings = ValidationSettings(
        rocrate_uri=str(crate),
        profile_identifier="workflow-run-crate-0.5",
        requirement_severity=Severity.REQUIRED,
    )
    found = services.validate(settings)
    assert found.passed(), [(one.check.identifier, one.message) for one in found.get_issues()]


def test_a_crate_is_never_written_over(crate: Path) -> None:
    done = invoke(ROOT, "report", str(crate.parent), "--crate")
    assert done.returncode == 2
    assert "there is something already" in done.stderr
    assert not list(crate.parent.glob(".crate-*"))


@pytest.mark.parametrize("recipe", RECORDED)
def test_every_committed_record_can_be_a_crate(recipe: str, tmp_path: Path) -> None:
    record = PROJECT.results(PROJECT.recipe(recipe))[-1]
    done = invoke(ROOT, "report", str(record), "--crate", "--out", str(tmp_path / "crate"))
    assert done.returncode == 0, done.stderr
    assert entities(tmp_path / "crate")


def test_a_crate_is_of_one_run(tmp_path: Path) -> None:
    done = invoke(ROOT, "report", f"recipes/{TRAINING}", "--crate", "--out", str(tmp_path / "crate"))
    assert done.returncode == 2
    assert "no such record" in done.stderr
    both = invoke(ROOT, "report", f"recipes/{TRAINING}", "--crate", "--form")
    assert both.returncode == 2
    assert "--form" in both.stderr


@pytest.mark.parametrize("name", ["report.html", "metrics.jsonl", "plan.json", "record.json"])
def test_a_link_in_the_run_is_not_followed(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path, record_with_power())
    private = tmp_path / "id_ed25519"
    (run / name).touch()
    (run / name).rename(private)
    (run / name).symlink_to(private)
    done = invoke(ROOT, "report", str(run), "--crate")
    assert done.returncode == 2
    assert f"{name}: not a file of this folder\n  found: a link" in done.stderr
    assert not (run / "crate").exists()
