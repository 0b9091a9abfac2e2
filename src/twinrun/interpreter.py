"""Commands under a Python interpreter of this machine, as the engines without a container run them."""

from __future__ import annotations

import os
from pathlib import Path

from twinrun.engine import PYTHON, Command, Site
from twinrun.process import LocalProcess, read_output


class Interpreter:
    """An engine whose commands run under one interpreter of this machine."""

    image_digest: str | None = None

    def __init__(self, *, python: str, site: Site, search_path: str = "") -> None:
        """Take the interpreter at `python`; `search_path` goes behind the project in PYTHONPATH."""
        self._python = python
        self._site = site
        self._search_path = search_path

    def inside(self, path: Path) -> str:
        """Return `path` itself: nothing is mounted."""
        return str(path)

    def start(self, command: Command, *, log: Path) -> LocalProcess:
        """Start `command` with its output in `log`."""
        return LocalProcess(
            self._arguments(command), variables=self._variables(command), folder=self._site.root, log=log
        )

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output."""
        return read_output(
            self._arguments(command), variables=self._variables(command), folder=self._site.root
        )

    def _arguments(self, command: Command) -> list[str]:
        assert command.arguments[0] == PYTHON
        return [self._python, *command.arguments[1:]]

    def _variables(self, command: Command) -> dict[str, str]:
        own = (self._site.root / "src", *self._site.packages)
        # Without bytecode files a read-only checkout works, and the checkout stays clean.
        return {
            "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, own), self._search_path])),
            "PYTHONDONTWRITEBYTECODE": "1",
            **command.variables,
        }
