"""Recipes baked from the template into a checkout of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from cookiecutter.main import cookiecutter

from tests.contracts.tree import ROOT
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project

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
