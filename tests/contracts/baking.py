"""Recipes baked from the template into a checkout of their own; as a program, a stranger's pull request."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from cookiecutter.main import cookiecutter

from tests.contracts.tree import ROOT
from tests.records import training_record
from twinrun.cli.records import sign
from twinrun.manifests.claims import PLACEHOLDER
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.results.judged import file_name
from twinrun.results.record import write_record
from twinrun.workloads import workload_names

TEMPLATE = ROOT / "templates" / "recipe"


def bake(root: Path, answers: Mapping[str, str]) -> LoadedRecipe:
    """Answer the template's questions and load what it makes in `root/recipes`."""
    # Without a configuration of its own, cookiecutter writes its replays to the user's home.
    folders = {"cookiecutters_dir": str(root.parent), "replay_dir": str(root.parent / "replays")}
    configuration = root.parent / "cookiecutter.json"
    configuration.write_text(json.dumps(folders), encoding="utf-8")
    made = cookiecutter(
        str(TEMPLATE),
        no_input=True,
        extra_context=dict(answers),
        output_dir=str(root / "recipes"),
        config_file=str(configuration),
    )
    return Project(root).recipe(Path(made).name)


def written(folder: Path) -> None:
    """Put words of a publication in place of the template's."""
    for path in (folder / "recipe.toml", folder / "published.toml", folder / "README.md"):
        text = path.read_text(encoding="utf-8")
        path.write_text(
            re.sub(rf'(?m)((?:^|= "){PLACEHOLDER})\b[: ]*', lambda one: one[1][: -len(PLACEHOLDER)], text)
        )


def with_signed_record(folder: Path, key: Path) -> Path:
    """Add a record of a played MI300X to a training's results, signed with a key that is made for it."""
    project = Project(folder.parents[1])
    sizes = {"devices=1": 300.0, "devices=2": 299.0, "devices=4": 298.0, "devices=8": 297.0}
    found = training_record(sizes, recipe=folder.name, gpu="mi300x", scale="node", project=project)
    path = folder / "results" / file_name(found)
    path.parent.mkdir(exist_ok=True)
    write_record(path, found.record)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True, timeout=60)
    sign(path, key=key)
    return path


if __name__ == "__main__":
    for workload in workload_names():
        written(ROOT / bake(ROOT, {"name": f"baked-{workload}", "workload": workload}).folder)
    with_signed_record(ROOT / "recipes/baked-training", ROOT.parent / "key")
