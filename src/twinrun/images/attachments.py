"""What goes to a registry beside an image: SBOM and provenance as its referrers, and a signature."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from twinrun import __version__
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import tool_output
from twinrun.foundation.tracked import tree_sha256
from twinrun.images.plan import BuildPlan
from twinrun.manifests.image_identity import rfc3339
from twinrun.manifests.stack import DOCKERFILE

SBOM = "sbom.cdx.json"
PROVENANCE = "provenance.json"
# File to the media type that tools look for.
TYPES = {SBOM: "application/vnd.cyclonedx+json", PROVENANCE: "application/vnd.in-toto+json"}
# Nothing goes to a public log of signatures: whoever verifies has the public key.
_SIGN = ("cosign", "sign", "--yes", "--tlog-upload=false", "--key")


def check_signer() -> None:
    """Refuse to begin what would end without a signature; raises MachineError."""
    if not shutil.which(_SIGN[0]):
        raise MachineError("cannot be signed", place="--sign", hint=f"install {_SIGN[0]}")


def attach(
    reference: str, folder: Path, *, plan: BuildPlan, root: Path, key: str | None, say: Callable[[str], None]
) -> None:
    """Attach the SBOM in `folder` and the provenance to an image in a registry, and sign the image.

    Args:
        reference: `repository@sha256:...`.
        key: file or address of cosign's key; None: no signature.

    Raises:
        MachineError: the registry refused, or the key is of no use.
    """
    if shutil.which("oras"):
        with tempfile.TemporaryDirectory() as parts:
            shutil.copyfile(folder / SBOM, Path(parts) / SBOM)
            text = json.dumps(provenance(reference, plan, root), indent=1)
            (Path(parts) / PROVENANCE).write_text(f"{text}\n", encoding="utf-8")
            # Otherwise each attempt would leave another one.
            created = f"org.opencontainers.image.created={rfc3339(plan.epoch)}"
            # Engines need no TLS at a loopback address; oras knows localhost alone.
            plain = ("--plain-http",) if reference.startswith(("127.", "[::1]")) else ()
            for name, kind in TYPES.items():
                options = (*plain, "--annotation", created, "--artifact-type", kind)
                _run("oras", "attach", *options, reference, f"{name}:{kind}", folder=Path(parts))
    else:
        say(f"{', '.join(TYPES)}: not attached, oras is not installed")
    if key:
        _run(*_SIGN, key, reference, folder=Path())


def provenance(reference: str, plan: BuildPlan, root: Path) -> dict[str, object]:
    """Return the SLSA provenance of an image: a function of the inputs, without a name of this machine."""
    name, _, digest = reference.partition("@sha256:")
    files = [DOCKERFILE, *(f"{plan.stack.folder}/{one}" for one in ("stack.toml", "image.lock"))]
    inputs = {one: sha256_of_file(root / one) for one in files}
    inputs |= {folder: tree_sha256(root, folder) for folder in plan.kernels}
    inputs |= {str(package): package.sha256 for package in plan.system.all()}
    # One of several files that may satisfy an entry has no digest of its own.
    wheels = {
        pin: hashes[0] if len(hashes) == 1 else "" for pin, hashes in (plan.python | plan.tools).items()
    }
    definition = {
        "buildType": "urn:twinrun:build",
        "externalParameters": {"stack": plan.stack.stack.name},
        "internalParameters": plan.variables(),
        "resolvedDependencies": [
            {"name": one} | ({"digest": {"sha256": value}} if value else {})
            for one, value in (inputs | wheels).items()
        ],
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": definition,
            "runDetails": {"builder": {"id": "urn:twinrun", "version": {"twinrun": __version__}}},
        },
    }


def _run(*arguments: str, folder: Path) -> None:
    tool_output(
        arguments,
        folder=folder,
        failure="the image is in the registry, but not what belongs to it",
        place=" ".join(arguments[:2]),
        hint="the same command tries again",
    )
