"""Signatures by SSH keys: `ssh-keygen -Y` makes and checks them, over the digest of what is signed.

A digest covers a record or a manifest wholly, and stays the same where the file is moved or sent in.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import read_regular

SUFFIX = ".sig"
UNSIGNED = "unsigned"
# A signature for another purpose, such as of a commit, does not count here.
_NAMESPACE = "twinrun"
_SIGNERS = "allowed_signers"
_VARIABLE = "TWINRUN_SIGNERS"
_MAX_BYTES = 1 << 16
_SECONDS = 60


def signers_of(root: Path) -> Path:
    """Return the file that says whose key is whose: $TWINRUN_SIGNERS, or `allowed_signers` of the project."""
    return Path(os.environ.get(_VARIABLE) or root / _SIGNERS)


def signature_of(digest: str, *, key: Path) -> str:
    """Return the signature over `digest` by the private key at `key`, or by its agent.

    Raises:
        InputError: there is no such key, or it cannot sign.
        MachineError: ssh-keygen is not installed.
    """
    if not key.is_file():
        raise InputError("no such key", place="--key", found=str(key), hint="for example ~/.ssh/id_ed25519")
    done = _ssh_keygen("sign", "-f", str(key), "-n", _NAMESPACE, digest=digest)
    if done.returncode:
        raise InputError("the key does not sign", place=str(key), found=done.stderr.strip())
    return done.stdout


def signed_by(digest: str, signature: Path, *, signers: Path) -> str:
    """Return who signed `digest`, in words: `signed by NAME`, or by which key that nobody's name is on.

    Args:
        signature: file that holds it.

    Raises:
        InputError: it is no signature, it is over something else, or its key may not sign any more.
        MachineError: ssh-keygen is not installed.
    """
    try:
        read_regular(signature, limit=_MAX_BYTES)
    except OSError as error:
        raise InputError("no signature", place=str(signature), found=error.strerror) from None
    file = ("-s", str(signature))
    valid = _ssh_keygen("check-novalidate", "-n", _NAMESPACE, *file, digest=digest)
    key = re.search(r"SHA256:[\w+/]+", valid.stdout)
    if valid.returncode or key is None:
        raise _refused("the signature does not match", signature, valid)
    names: list[str] = []
    if signers.is_file():
        found = _ssh_keygen("find-principals", "-f", str(signers), *file, digest=digest)
        names = found.stdout.splitlines() if not found.returncode else []
    for name in names:
        held = _ssh_keygen("verify", "-f", str(signers), "-I", name, "-n", _NAMESPACE, *file, digest=digest)
        if held.returncode:
            raise _refused(f"the key of {name} may not sign this", signature, held)
    if names:
        return f"signed by {', '.join(names)}"
    return f"signed with the key {key[0]}, which {signers.name} does not vouch for"


def _refused(message: str, signature: Path, done: subprocess.CompletedProcess[str]) -> InputError:
    said = (done.stderr or done.stdout).strip().splitlines()
    hint = "get file and signature again from who signed them; remove the signature to read it as unsigned"
    return InputError(message, place=str(signature), found=said[0] if said else None, hint=hint)


def _ssh_keygen(action: str, *arguments: str, digest: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["ssh-keygen", "-Y", action, *arguments],
            input=f"{digest}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except OSError as error:
        raise MachineError(
            f"cannot start ssh-keygen: {error.strerror}", hint="signatures need OpenSSH 8.2 or newer"
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(
            "ssh-keygen does not answer", hint="add the key to an agent: ssh-add KEY"
        ) from None
