"""One stage of the Dockerfile, built by the engine without a network and handed over as a tar."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

from twinrun.building.secrets import redacted
from twinrun.errors import MachineError, RunError
from twinrun.process import last_lines

_STEP = re.compile(r"#(?P<number>\d+) \[(?P<step>[^\]]*\d+/\d+)\] (?P<command>.*)")
_LINE = re.compile(r"#(?P<number>\d+) (?:[0-9.]+ )?(?P<text>.*)")
# The command itself, which the Dockerfile has.
_NOISE = re.compile(r"sha256:|\[[^\]]+\] ")
_COMMAND = re.compile(r"^ERROR: .*(?=exit code: \d+)")
_FULL = "no space left on device"
_MOUNT = re.compile(r"--mount=\S+ ")
_KEPT_LINES = 400
_FIRST_WITH_PLUGIN = 23


class StageBuild:
    """A running build of one stage; what it prints is in the log, and its steps are told."""

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
        """Return what the stage exports, while it comes; nothing where it stays in the engine."""
        assert self._process.stdout is not None
        return self._process.stdout

    def _read(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = redacted(raw.decode(errors="replace").rstrip())
            self._log.write(f"{line}\n")
            step = _STEP.match(line)
            known = _LINE.match(line)
            if step and step["number"] not in self._steps:
                self._steps[step["number"]] = step["step"]
                self._say(f"{step['step']}  {' '.join(_MOUNT.sub('', step['command']).split())}")
            if known and known["text"].startswith("ERROR: "):
                self._failed = known["number"]
            self._lines.append((known["number"] if known else "", known["text"] if known else line))
        self._log.flush()

    def finish(self, stage: str) -> None:
        """Wait for the end.

        Raises:
            MachineError: the engine's disk is full.
            RunError: a step failed; names it and its last lines.
        """
        status = self._process.wait()
        self._reader.join()
        if status == 0:
            return
        text = "\n".join(line for _, line in self._lines)
        if _FULL in text.lower():
            raise OSError(28, "No space left on device", "the engine")
        number = self._failed
        told = [line for of, line in self._lines if number and of == number]
        own = [_COMMAND.sub("", line) for line in told if not _NOISE.match(line)]
        raise RunError(
            "a step of the image failed",
            place=f"images/Dockerfile [{self._steps.get(number or '', stage)}]",
            found=last_lines("\n".join(own) or text),
            hint=f"the whole log is {self._log.name}",
        )

    def stop(self) -> None:
        """End the build, also in the engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                self._reader.join(5)
                stream.close()


@contextlib.contextmanager
def build_stage(
    arguments: list[str], *, home: str, log: IO[str], say: Callable[[str], None]
) -> Iterator[StageBuild]:
    """Start the build of a stage; whatever happens, nothing of it goes on afterwards."""
    running = StageBuild(arguments, home=home, log=log, say=say)
    try:
        yield running
    finally:
        running.stop()


def stage_arguments(*, stage: str, context: str, variables: dict[str, str], alone: bool) -> list[str]:
    """Return the command that builds one stage.

    Args:
        alone: the stage is small and is written to stdout. Any other becomes an image, whose ID is written to
            a file of the context: what a container has, an engine hands over many times as fast.
    """
    result = ("--output", "type=tar,dest=-") if alone else ("--iidfile", f"{context}/{stage}.id")
    options = [part for name, value in variables.items() for part in ("--build-arg", f"{name}={value}")]
    return [
        *("docker", "build", "--network", "none", "--progress", "plain", "--target", stage),
        *(*result, *options, "--file", f"{context}/Dockerfile", context),
    ]


def client_program() -> str:
    """Return the first command-line client on the PATH that can build; raises MachineError."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if (path := shutil.which("docker", path=folder))]
    for program in found:
        if _can_build(program):
            return program
    raise MachineError(
        "no command-line client of the engine that can build",
        place="PATH",
        found=found,
        hint="install docker.io, or docker-ce-cli with docker-buildx-plugin",
    )


def _can_build(program: str) -> bool:
    """Say whether a client can build with BuildKit: from 23 on that takes a plugin."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    major = re.search(r"version (\d+)\.", version)
    if major and int(major[1]) < _FIRST_WITH_PLUGIN:
        return True
    return subprocess.run([program, "buildx", "version"], capture_output=True, check=False).returncode == 0


# Where the engine is, and nothing that could reach a layer: no proxies, no tokens, no user's configuration.
_PASSED = re.compile(r"PATH|LANG|LC_ALL|DOCKER_HOST|DOCKER_TLS_VERIFY|DOCKER_CERT_PATH|XDG_RUNTIME_DIR")


def _environment(home: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}
    # The user's own settings, such as proxies, would be handed to every step.
    return kept | {"DOCKER_BUILDKIT": "1", "DOCKER_CONFIG": home, "HOME": home}
