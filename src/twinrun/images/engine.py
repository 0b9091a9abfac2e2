"""What builds on an engine, and the images that go into it, out of it and to a registry."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.redaction import redacted
from twinrun.machine import daemon

if TYPE_CHECKING:
    from docker import DockerClient

# BuildKit writes a step in one of these forms, Podman in the other.
_STEP = re.compile(r"(?:#(?P<number>\d+) |(?=\[\d+/\d+\] STEP ))\[(?P<step>[^\]]*\d+/\d+)\] (?P<command>.*)")
_LINE = re.compile(r"#(?P<number>\d+) (?:[0-9.]+ )?(?P<text>.*)")
# Checksums, and the instruction that the Dockerfile has.
_NOISE = re.compile(r"sha256:|\[[^\]]+\] ")
_COMMAND = re.compile(r"^ERROR: .*(?=exit code: \d+)")
_MOUNT = re.compile(r"--mount=\S+ ")
_DISK_FULL = "no space left on device"
_KEPT_LINES = 400
_CLIENTS = "install podman beside its service; or docker.io, or docker-ce-cli with docker-buildx-plugin"
# The engine's address, and nothing that could reach a layer: no proxies, tokens or user's configuration.
_INHERITED = re.compile(
    r"PATH|LANG|LC_ALL|DOCKER_HOST|DOCKER_TLS_VERIFY|DOCKER_CERT_PATH|XDG_RUNTIME_DIR|CONTAINERS_(?:STORAGE_)?CONF"
)
# The engine unpacks, compresses or sends gigabytes before it answers.
_TIMEOUT_SECONDS = 3600


def find_client(client: DockerClient) -> str:
    """Return the command-line client that builds on the engine; raises MachineError."""
    # Podman's Docker-compatible socket writes no archive, and its client needs no service.
    name = "podman" if daemon.is_podman(client) else "docker"
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    found = [path for folder in folders if (path := shutil.which(name, path=folder))]
    for program in found:
        if name == "podman" or _can_build(program):
            return program
    message = "no command-line client of the engine that can build"
    raise MachineError(message, place="PATH", found=found, hint=_CLIENTS)


def _can_build(program: str) -> bool:
    """Say whether a client has BuildKit; from 23 on it is the plugin buildx."""
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    major = re.search(r"version (\d+)\.", version)
    if major and int(major[1]) < 23:
        return True
    return subprocess.run([program, "buildx", "version"], capture_output=True, check=False).returncode == 0


def run_build(arguments: list[str], *, home: Path, log: IO[str], say: Callable[[str], None]) -> None:
    """Run a build to its end; each step is told to `say`, every line goes to `log`.

    Args:
        home: empty folder for the client's own files, none of them the user's.

    Raises:
        OSError: the engine's disk is full.
        MachineError: the client cannot be started, or the engine went away.
        RunError: a step failed; names it and its last lines.
    """
    try:
        process = subprocess.Popen(
            arguments,
            env=_environment(home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise MachineError(f"cannot start: {error.strerror}", place=arguments[0]) from None
    steps: dict[str, str] = {}
    lines: deque[tuple[str, str]] = deque(maxlen=_KEPT_LINES)
    failed = ""
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = redacted(raw.rstrip())
            log.write(f"{line}\n")
            step, numbered = _STEP.match(line), _LINE.match(line)
            if step and (step["number"] or step["step"]) not in steps:
                steps[step["number"] or step["step"]] = step["step"]
                say(f"{step['step']}  {' '.join(_MOUNT.sub('', step['command']).split())}")
            if numbered and numbered["text"].startswith("ERROR: "):
                failed = numbered["number"]
            lines.append((numbered["number"], numbered["text"]) if numbered else ("", line))
        status = process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        log.flush()
    if status:
        _fail(steps, list(lines), failed, log.name)


def _fail(steps: dict[str, str], lines: list[tuple[str, str]], failed: str, log: str) -> NoReturn:
    text = "\n".join(line for _, line in lines)
    if _DISK_FULL in text.lower():
        raise OSError(28, "No space left on device", "the engine")
    printed = [
        _COMMAND.sub("", line) for of, line in lines if failed and of == failed if not _NOISE.match(line)
    ]
    raise RunError(
        "a step of the image failed" if failed else "the engine did not build the image",
        place=f"images/Dockerfile [{steps.get(failed, 'archive')}]",
        found=last_lines("\n".join(printed) or text),
        hint=f"nothing was tagged; the whole log is {log}",
    )


def _environment(home: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    configuration = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    plugins = home / "cli-plugins"
    if (configuration / "cli-plugins").is_dir() and not plugins.is_symlink():
        plugins.symlink_to(configuration / "cli-plugins")
    # The user's configuration, such as proxies, would reach every step; an attestation would be no layer.
    own = {"DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    # Podman knows a step by its text, whatever files it is given, and writes no archive of one that it knows.
    return inherited | own | {"BUILDAH_LAYERS": "false", "DOCKER_CONFIG": str(home), "HOME": str(home)}


@contextlib.contextmanager
def _request(client: DockerClient, what: str) -> Iterator[None]:
    """Raise the timeout and turn errors into MachineError; a full disk stays an OSError."""
    from docker.errors import DockerException

    timeout, client.api.timeout = client.api.timeout, _TIMEOUT_SECONDS
    try:
        yield
    except (DockerException, OSError) as error:
        text = str(getattr(error, "explanation", None) or error)
        if "no space left" in text.lower():
            raise OSError(28, "No space left on device", "the engine") from None
        raise MachineError(f"the engine cannot {redacted(what)}", found=redacted(text)[:300]) from None
    finally:
        client.api.timeout = timeout


def _checked(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield events of the engine; raises DockerException for an error among them."""
    from docker.errors import DockerException

    for event in events:
        if "error" in event:
            raise DockerException(event["error"])
        yield event


def load(client: DockerClient, archive: Path, *, name: str) -> str:
    """Load an archive, tag its image `name` and return what the engine calls it.

    Raises:
        MachineError, OSError: the engine refused, or its disk is full.
    """
    with _request(client, "load the image"), archive.open("rb") as stream:
        events = client.api.load_image(stream, quiet=True)  # type: ignore[no-untyped-call]
        lines = [str(event.get("stream", "")) for event in _checked(events)]
        loaded = next((line.strip() for line in lines if "Loaded image" in line), "").partition(": ")[2]
        image = client.images.get(loaded or name)
        image.tag(*name.rsplit(":", 1))
        return str(image.id)


def push(client: DockerClient, image: str, repository: str, tag: str) -> str:
    """Push an image to a repository and return its digest there; raises MachineError."""
    tagged = f"{repository}:{tag}" in client.images.get(image).tags
    with _request(client, f"push to {repository}"):
        client.images.get(image).tag(repository, tag)
        try:
            events = _checked(client.api.push(repository, tag=tag, stream=True, decode=True))
            digests = [event["aux"]["Digest"] for event in events if "Digest" in event.get("aux", {})]
        finally:
            if not tagged:
                client.api.remove_image(f"{repository}:{tag}", noprune=True)
    return str(digests[-1])


def pull(client: DockerClient, reference: str) -> str:
    """Pull an image, `repository@sha256:...`, and return what the engine calls it; raises MachineError."""
    with _request(client, f"pull {reference}"):
        return str(client.images.pull(reference).id)
