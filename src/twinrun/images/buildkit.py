"""One stage of the Dockerfile, built without a network by BuildKit or Podman: its progress and errors."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, NoReturn

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.progress import LiveProgress
from twinrun.foundation.text import redacted
from twinrun.machine import daemon

if TYPE_CHECKING:
    from docker import DockerClient

# BuildKit writes a step in one of these forms, Podman in the other.
_STEP = re.compile(r"(?:#(?P<number>\d+) |(?=\[\d+/\d+\] STEP ))\[(?P<step>[^\]]*\d+/\d+)\] (?P<command>.*)")
_LINE = re.compile(r"#(?P<number>\d+) (?:[0-9.]+ )?(?P<text>.*)")
# Checksums, and the instruction that the Dockerfile has.
_NOISE = re.compile(r"sha256:|\[[^\]]+\] ")
_COMMAND = re.compile(r"^ERROR: .*(?=exit code: \d+)")
_DISK_FULL = "no space left on device"
_MOUNT = re.compile(r"--mount=\S+ ")
_KEPT_LINES = 400
_FIRST_MAJOR_WITH_PLUGIN = 23
# The engine's address, and nothing that could reach a layer: no proxies, tokens or user's configuration.
_INHERITED = re.compile(r"PATH|LANG|LC_ALL|DOCKER_HOST|DOCKER_TLS_VERIFY|DOCKER_CERT_PATH|XDG_RUNTIME_DIR")
_MEGABYTE = 1_000_000
_SHOWN_CHARACTERS = 110


class StageBuild:
    """Running build of one stage; writes its output to `log` and passes each step to `say`."""

    def __init__(self, arguments: list[str], *, home: str, log: IO[str], say: Callable[[str], None]) -> None:
        self._log = log
        self._say = say
        self._steps: dict[str, str] = {}
        self._lines: deque[tuple[str, str]] = deque(maxlen=_KEPT_LINES)
        self._failed: str | None = None
        try:
            self._process = subprocess.Popen(
                arguments,
                env=_environment(home),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start: {error.strerror}", place=arguments[0]) from None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def tar(self) -> IO[bytes]:
        """Return the stream of the exported tar; empty when the stage becomes an image."""
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = redacted(raw.decode(errors="replace").rstrip())
            self._log.write(f"{line}\n")
            step = _STEP.match(line)
            numbered = _LINE.match(line)
            if step and step["number"] not in self._steps:
                self._steps[step["number"]] = step["step"]
                self._say(f"{step['step']}  {' '.join(_MOUNT.sub('', step['command']).split())}")
            if numbered and numbered["text"].startswith("ERROR: "):
                self._failed = numbered["number"]
            self._lines.append((numbered["number"], numbered["text"]) if numbered else ("", line))
        self._log.flush()

    def finish(self, stage: str) -> None:
        """Wait for the end.

        Raises:
            OSError: the engine's disk is full.
            RunError: a step failed; names it and its last lines.
        """
        status = self._process.wait()
        self._reader.join()
        if status == 0:
            return
        text = "\n".join(line for _, line in self._lines)
        if _DISK_FULL in text.lower():
            raise OSError(28, "No space left on device", "the engine")
        number = self._failed
        step = [line for of, line in self._lines if number and of == number]
        printed = [_COMMAND.sub("", line) for line in step if not _NOISE.match(line)]
        raise RunError(
            "a step of the image failed",
            place=f"images/Dockerfile [{self._steps.get(number or '', stage)}]",
            found=last_lines("\n".join(printed) or text),
            hint=f"the whole log is {self._log.name}",
        )

    def close(self) -> None:
        """Stop the build here and in the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                self._reader.join(5)
                stream.close()


def build_arguments(*, stage: str, context: str, variables: dict[str, str], export_tar: bool) -> list[str]:
    """Return the options that build one stage, of every client.

    Args:
        export_tar: write the stage to stdout. Without it the stage becomes an image and its ID a file of the
            context: of a large stage the engine exports a container many times as fast.
    """
    output = ("--output", "type=tar,dest=-") if export_tar else ("--iidfile", f"{context}/{stage}.id")
    options = [part for name, value in variables.items() for part in ("--build-arg", f"{name}={value}")]
    return [
        *("build", "--network", "none", "--target", stage),
        *(*output, *options, "--file", f"{context}/Dockerfile", context),
    ]


class EngineClient(NamedTuple):
    """Command-line client that builds on an engine."""

    command: tuple[str, ...]
    exports_tar: bool
    """It can write a stage to stdout."""


def find_client(client: DockerClient) -> EngineClient:
    """Return what builds on the engine; raises MachineError."""
    if daemon.is_podman(client):
        # Its Docker-compatible socket has no BuildKit.
        program = shutil.which("podman") or _no_client([], "install podman beside its service")
        address = os.environ.get("DOCKER_HOST", f"unix://{daemon.SOCKET}")
        return EngineClient((program, "--url", address), exports_tar=False)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if (path := shutil.which("docker", path=folder))]
    for program in found:
        if _can_build(program):
            return EngineClient((program,), exports_tar=True)
    return _no_client(found, "install docker.io, or docker-ce-cli with docker-buildx-plugin")


def _no_client(found: list[str], hint: str) -> NoReturn:
    raise MachineError(
        "no command-line client of the engine that can build", place="PATH", found=found, hint=hint
    )


def _can_build(program: str) -> bool:
    """Say whether a client has BuildKit; from 23 on it is the plugin buildx."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    major = re.search(r"version (\d+)\.", version)
    if major and int(major[1]) < _FIRST_MAJOR_WITH_PLUGIN:
        return True
    return subprocess.run([program, "buildx", "version"], capture_output=True, check=False).returncode == 0


def _environment(home: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    configuration = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    plugins = Path(home) / "cli-plugins"
    if (configuration / "cli-plugins").is_dir() and not plugins.is_symlink():
        plugins.symlink_to(configuration / "cli-plugins")
    # The user's configuration, such as proxies, would reach every step; an attestation would be no layer.
    own = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    return inherited | own | {"DOCKER_CONFIG": home, "HOME": home}


class BuildProgress(LiveProgress):
    """Progress of one build."""

    def __init__(self) -> None:
        super().__init__(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.description:9}", markup=False),
            TextColumn("{task.fields[size]:>10}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        self._started: dict[str, float] = {}

    def start_layer(self, layer: str) -> None:
        """Show that the build of a layer has started."""
        self._started[layer] = time.monotonic()
        self._tasks[layer] = self._progress.add_task(layer, total=1, size="", status="")

    def step(self, layer: str, text: str) -> None:
        """Show the instruction of the Dockerfile that runs."""
        self._progress.update(self._tasks[layer], status=text[: max(20, self.console.width - 40)])
        if not self.console.is_terminal:
            self.say(f"{layer}: {text[:_SHOWN_CHARACTERS]}")

    def update_size(self, layer: str, size: int) -> None:
        """Show the size of a layer so far, in bytes."""
        self._progress.update(self._tasks[layer], size=megabytes(size))

    def finish_layer(self, layer: str, *, size: int, digest: str) -> None:
        """Show that a layer is complete."""
        status = digest.removeprefix("sha256:")[:12]
        self._progress.update(self._tasks[layer], size=megabytes(size), status=status, completed=1)
        if not self.console.is_terminal:
            seconds = time.monotonic() - self._started[layer]
            self.say(f"{layer}: {megabytes(size)}  {seconds:.1f} s  {status}")


def megabytes(size: int) -> str:
    """Return a size in bytes as megabytes."""
    return f"{size / _MEGABYTE:,.1f} MB"
