"""Download of wheels by pip, and of sources that it builds wheels of; the caller verifies them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from twinrun.foundation.errors import MachineError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.text import redacted
from twinrun.images.building.artifacts import Artifact
from twinrun.images.building.wheel_tags import platforms
from twinrun.manifests.stack import SourcePackage, Stack, normalise

TARGETS = {"download": "--dest", "wheel": "--wheel-dir"}
# No source is compiled for a device here, and a wheel has no time or order of its own.
SAME_BYTES = {"DS_BUILD_OPS": "0", "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "1577836800"}


def download_wheels(
    artifacts: Iterable[Artifact], folder: Path, *, stack: Stack, index: str | None = None
) -> None:
    """Download wheels for the stack's platform to `folder` with pip; no code of theirs is run.

    A package that the index has as source alone is built, with the backend that stack.toml pins.

    pip reads its own configuration of indexes, proxies and certificates.

    Args:
        index: a further package index, for wheels that only the framework's own has.

    Raises:
        MachineError: pip failed; the message holds its last lines.
    """
    wanted = list(artifacts)
    sources = {normalise(one.package()): one for one in stack.source}
    for artifact in [one for one in wanted if one.name() in sources]:
        _pip_wheel(artifact, folder, sources[artifact.name()])
    for requirements in _pip_calls(one for one in wanted if one.name() not in sources):
        further = [f"--extra-index-url={index}"] if index else []
        _pip_download(requirements, folder, options=[*further, *_platform_options(stack)])


def _pip_calls(artifacts: Iterable[Artifact]) -> list[list[str]]:
    """Return requirements by call: pip refuses two versions of a package, or hashes for some only, in one."""
    calls: dict[tuple[bool, int], list[str]] = {}
    versions: Counter[str] = Counter()
    for requirement, artifact in {artifact.requirement(): artifact for artifact in artifacts}.items():
        calls.setdefault((bool(artifact.digests), versions[artifact.name()]), []).append(requirement)
        versions[artifact.name()] += 1
    return list(calls.values())


def _platform_options(stack: Stack) -> list[str]:
    options = [part for platform in platforms(stack) for part in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={stack.interpreter()}", *options]


def _pip_wheel(artifact: Artifact, folder: Path, source: SourcePackage) -> None:
    """Build the wheel of a source, both by the hashes of the lock: nothing in it depends on the machine."""
    with tempfile.TemporaryDirectory() as settings:
        backend = Path(settings) / "backend.txt"
        backend.write_text("\n".join(source.backend), encoding="utf-8")
        # pip reads the first since 25.3, and the second before.
        pinned = {"PIP_BUILD_CONSTRAINT": str(backend), "PIP_CONSTRAINT": str(backend)}
        _pip("wheel", [artifact.requirement()], folder, ["--no-binary=:all:"], pinned | SAME_BYTES)


def _pip_download(requirements: list[str], folder: Path, *, options: list[str]) -> None:
    # A user who requires hashes of every package has none for an unverified pin.
    _pip("download", requirements, folder, options, {"PIP_REQUIRE_HASHES": "0"})


def _pip(
    command: str, requirements: list[str], folder: Path, options: list[str], variables: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as partial:
        file = Path(partial) / "requirements.txt"
        file.write_text("\n".join(requirements), encoding="utf-8")
        arguments = [
            *(sys.executable, "-m", "pip", command, "--quiet", "--quiet", "--no-deps", "--no-input"),
            *(
                "--disable-pip-version-check",
                "--no-cache-dir",
                "--progress-bar=off",
                TARGETS[command],
                partial,
            ),
            *(*options, "--requirement", str(file)),
        ]
        done = subprocess.run(
            arguments, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise MachineError(
                "the Python packages cannot be fetched",
                place=f"pip {command}",
                found=redacted(last_lines(done.stderr or done.stdout, 6)),
                hint="check the network and pip's configuration, or carry them in with --wheelhouse",
            )
        for path in Path(partial).iterdir():
            if path != file:
                path.replace(folder / path.name)
