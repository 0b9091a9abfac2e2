"""A site measured in the engine and stack that runs use there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.execution.site_qualification import Qualification, qualify
from twinrun.foundation.cache import runs_folder
from twinrun.foundation.errors import InputError
from twinrun.manifests.cluster import load_site
from twinrun.planning.project import Project
from twinrun.runs.prepared import prepare
from twinrun.runs.selection import Request, Selection, select


def qualified(
    project: Project, site: str, *, key: Path | None, say: Callable[[str], None], engine: str | None = None
) -> Qualification:
    """Measure a site with a stack that any recipe has for it, and return what was found.

    Raises:
        InputError: no such site, no recipe has a stack for it, or the key does not sign.
        MachineError: the engine cannot start there.
    """
    prepared = prepare(project, _selection(project, site, engine), out=runs_folder(project.root))
    selection, run = prepared.selection, prepared.run
    assert selection.site is not None
    run.mkdir(parents=True)
    prepared.workspace.data.mkdir(parents=True, exist_ok=True)
    opened = selection.engine.open_engine(
        stack=selection.stack, vendor=selection.vendor, workspace=prepared.workspace, say=say
    )
    told = prepared.opened(opened, folders={}, variables={"NCCL_DEBUG": "INFO"})
    accelerator = selection.accelerator
    return qualify(selection.site, ranks=told.ranks, accelerator=accelerator, key=key)


def _selection(project: Project, site: str, engine: str | None) -> Selection:
    """Return a plan for nodes of a site with a stack that any recipe has for them; raises InputError."""
    nodes = min(load_site(project.root, site).site.nodes, 2)
    error: InputError | None = None
    for name in project.recipe_names:
        request = Request(recipe=name, cluster=site, engine=engine, set=(f"nodes={nodes}",))
        try:
            return select(project, request)
        except InputError as refused:
            error = error or refused
    assert error is not None, "a project has a recipe"
    raise error
