"""A wheel of the package index by its digest, of which files are read and nothing is installed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import last_lines
from twinrun.protocol.evaluation import PackageSource


def fetch_wheel(source: PackageSource, folder: Path, *, say: Callable[[str], None]) -> Path:
    """Return the wheel in `folder`, downloading it where it is not there; it has the digest of `source`.

    pip reads its own configuration of indexes, proxies and certificates.

    Raises:
        MachineError: pip failed, or the index has another wheel; nothing was left behind.
    """
    for found in sorted(folder.glob("*.whl")):
        if sha256_of_file(found) == source.sha256:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    say(f"fetching {source.package} {source.version}: {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as name:
        partial = Path(name)
        requirement = partial / "requirements.txt"
        requirement.write_text(
            f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8"
        )
        arguments = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"),
            *("--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"),
            *("--dest", str(partial), "--requirement", str(requirement)),
        ]
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        wheels = list(partial.glob("*.whl"))
        if done.returncode or not wheels:
            raise MachineError(
                "the package cannot be had",
                place=f"{source.package}=={source.version}",
                found=last_lines(done.stderr),
                allowed=f"its wheel with sha256 {source.sha256}",
                hint="check the network and the index that pip is configured for",
            )
        return wheels[0].replace(folder / wheels[0].name)
