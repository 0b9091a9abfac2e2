"""What an engine is, and the commands and folders that it is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import LocalProcess, read_output
from twinrun.manifests.cluster import Bind, Site
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor
from twinrun.protocol.job import STOPPED_FILE

# The word that stands for the stack's interpreter in every command of a stack.
PYTHON = "python"
# Is told what happens, a line each.
Say = Callable[[str], None]
_POLL_SECONDS = 0.1
# Between two calls of `waiting`.
_WAITING_SECONDS = 30.0


class Workspace(Frozen):
    """The folders of this machine that a run uses."""

    root: Path
    """The project, read only."""
    run: Path
    """The run's own folder."""
    data: Path
    """Prepared data sets."""
    packages: tuple[Path, ...] = ()
    """Folders of the project that ranks import from, beside its own package."""
    recipe: Path | None = None
    """A recipe that lies outside the project, read only."""
    nodes: Site | None = None
    """The site whose nodes start the commands; None where this machine does."""
    source: Path | None = None
    """Checkpoints of another run, or a run folder with them, that ranks go on from."""
    place: Path | None = None
    """A folder outside the run that ranks save checkpoints in."""

    def binds(self, inside: Callable[[Path], str], *, data: bool) -> tuple[Bind, ...]:
        """Return what a container sees, the outer of two folders first; `data`: it may write to data sets."""
        writable = {self.run, self.place, *([self.data] if data else [])}
        own = [
            Bind(host=str(one), inside=inside(one), mode="rw" if one in writable else "ro")
            for one in self.folders.values()
        ]
        return (*own, *(self.nodes.bound if self.nodes else ()))

    @property
    def folders(self) -> dict[str, Path]:
        """What processes see, by what it is."""
        named = {"project": self.root, "data": self.data, "run": self.run, "recipe": self.recipe}
        named |= {"source": self.source, "checkpoints": self.place}
        return {name: folder for name, folder in named.items() if folder}

    @property
    def search_path(self) -> tuple[Path, ...]:
        """Return all folders of the project that ranks import from."""
        return (self.root / "src", *self.packages)


def point_folder(run: Path, point: str) -> Path:
    """Return the folder that the ranks of `point` write to."""
    return run / "points" / point


def stop_file(run: Path, point: str) -> Path:
    """Return the file in which the ranks of `point` say that they were told to end, and have saved."""
    return point_folder(run, point) / STOPPED_FILE


def log_folder(run: Path, point: str) -> Path:
    """Return the folder for the logs of the launcher and the ranks of `point`."""
    return run / "log" / point


class Command(Frozen):
    """One process of a stack: an argument list, never a shell string."""

    arguments: tuple[str, ...]
    """The first is PYTHON; paths are as the process sees them."""
    variables: dict[str, str]
    """Added to the environment."""
    writes_data: bool = False
    """Whether it prepares data sets; all others only read them."""
    reaches_nodes: bool = False
    """Whether it talks to other nodes; all others are without a network where the engine can do that."""


class Container(Frozen):
    """A container that runs one command under the image's interpreter."""

    program: str
    image: str
    arguments: tuple[str, ...]
    """After the interpreter."""
    variables: dict[str, str]
    mounts: tuple[Bind, ...]
    groups_of: tuple[str, ...] = ()
    """Patterns of files whose groups a script on the node adds: it alone knows their numbers."""
    cgroup: tuple[str, str, str]
    """Template of the program's `info`, the answer with which a container can be put into the control group
    of its job, and the words that do it; `$parent` is that group."""


class NodeCommand(Frozen):
    """One process of a node, which any shell there can start: what an engine makes of a command."""

    arguments: tuple[str, ...]
    variables: dict[str, str]
    """Added to the environment."""
    folder: Path
    """Working directory."""
    container: Container | None = None
    """The same as data, of an engine that makes a container for each command."""
    srun_options: tuple[str, ...] = ()
    """With which srun starts it inside the stack; nothing else can start it then."""
    srun_variables: dict[str, str] = Field(default_factory=dict)
    """What srun then needs in its own environment."""


class Engine:
    """How a stack becomes processes: it writes commands, and starts them here once it is open."""

    RUNS_IMAGES = False
    """Whether the stack is an image, with its kernels inside."""
    ADDS_GROUPS = False
    """Whether ranks get the groups of the device files, also where the user who starts them has not."""
    image_digest: str | None = None
    """What really runs, where it is an image; known once it is open."""

    @classmethod
    def unusable(cls, *, stack: LoadedStack, vendor: Vendor) -> str | None:
        """Return why the stack cannot be provisioned here, as far as a glance tells, or None."""
        return None

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Engine:
        """Return what writes the engine's commands, without provisioning anything."""
        raise NotImplementedError

    @classmethod
    def open_engine(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Engine:
        """Provision the stack and return the engine; raises MachineError."""
        return cls.renderer(stack=stack, vendor=vendor, workspace=workspace)

    def inside(self, path: Path) -> str:
        """Return `path` as processes of this engine see it."""
        return str(path)

    def render(self, command: Command) -> NodeCommand:
        """Return what starts `command` on a node; pure."""
        raise NotImplementedError

    def changed_files(self) -> dict[str, str]:
        """Return what happened to files of an environment since it was installed; an image has its digest."""
        return {}

    def start(self, command: NodeCommand, log: Path) -> LocalProcess:
        """Start on this machine what `render` returned, with its output in `log`."""
        return LocalProcess(command.arguments, variables=command.variables, folder=command.folder, log=log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        return read_output(rendered.arguments, variables=rendered.variables, folder=rendered.folder)


def run_to_end(engine: Engine, command: Command, *, log: Path, waiting: Callable[[int], object] = int) -> int:
    """Run `command` with its output in `log` and return its exit status; nothing of it is left behind.

    Args:
        waiting: called every 30 s with the seconds since the start.
    """
    started = time.monotonic()
    due = started + _WAITING_SECONDS
    running = engine.start(engine.render(command), log)
    try:
        while (status := running.poll()) is None:
            time.sleep(_POLL_SECONDS)
            if time.monotonic() >= due:
                waiting(round(due - started))
                due += _WAITING_SECONDS
    finally:
        running.stop()
    return status
