"""Signatures by SSH keys: `ssh-keygen -Y` makes and checks them, over the digest of what is signed.

A digest covers a record or a manifest wholly, and stays the same where the file is moved or sent in.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import read_regular

SUFFIX = ".sig"
UNSIGNED = "unsigned"
_SIGNED = "signed by "
# A line of the file of signers, where nothing without a signature of theirs is read.
POLICY = "# twinrun: require-signature"
# A signature for another purpose, such as of a commit, does not count here.
_NAMESPACE = "twinrun"
_SIGNERS = "allowed_signers"
# Beside the file of signers: keys, or a KRL of ssh-keygen, that nobody signs with any more.
_REVOKED = "revoked_keys"
_VARIABLE = "TWINRUN_SIGNERS"
_MAX_BYTES = 1 << 20
_SECONDS = 60
_AGAIN = "get file and signature again from who signed them; remove the signature to read it as unsigned"


def signers_of(root: Path) -> Path:
    """Return the file that says whose key is whose: $TWINRUN_SIGNERS, or `allowed_signers` of the project."""
    return Path(os.environ.get(_VARIABLE) or root / _SIGNERS)


def is_demanded(root: Path, *, asked: bool) -> bool:
    """Say whether only what a known signer has signed is read: an option asks for it, or a line of the file.

    Raises:
        InputError: the file of signers cannot be read, or is missing where it was named.
    """
    return POLICY in map(str.strip, _signers_text(signers_of(root)).splitlines()) or asked


def demand_signed(signature: str, *, place: str, root: Path) -> None:
    """Raise InputError unless `signature`, as `signed_by` says it, is that of a known signer."""
    if not signature.startswith(_SIGNED):
        message = "a signature of a known signer is demanded"
        allowed = f"signed by a name of {signers_of(root)}"
        hint = f"`invoke sign` signs; --require-signature, or the line `{POLICY}` of that file, demands it"
        raise InputError(message, place=place, found=signature, allowed=allowed, hint=hint)


def _signers_text(signers: Path) -> str:
    """Return the file of signers, empty where there is none and none was named; raises InputError."""
    try:
        return read_regular(signers, limit=_MAX_BYTES, links=True).decode(errors="replace")
    except OSError as error:
        if isinstance(error, FileNotFoundError) and _VARIABLE not in os.environ:
            return ""
        hint = f"${_VARIABLE} names the file, or it is {_SIGNERS} of the checkout"
        message, found = "the signers cannot be read", error.strerror
        raise InputError(message, place=str(signers), found=found, allowed="a file", hint=hint) from None


def signature_of(digest: str, *, key: Path) -> str:
    """Return the signature over `digest` by the private key at `key`, or by its agent.

    Raises:
        InputError: there is no such key, or it cannot sign.
        MachineError: ssh-keygen is not installed.
    """
    if not key.is_file():
        raise InputError("no such key", place="--key", found=str(key), hint="for example ~/.ssh/id_ed25519")
    done = _ssh_keygen("sign", "-f", str(key), digest=digest, arguments=("-n", _NAMESPACE))
    if done.returncode:
        raise InputError("the key does not sign", place=str(key), found=done.stderr.strip())
    return done.stdout


def signature_in(file: Path) -> str:
    """Return the signature that a file holds, which is read once; raises InputError."""
    try:
        return read_regular(file, limit=_MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise InputError("no signature", place=str(file), found=error.strerror) from None


def signed_by(digest: str, signature: str, *, place: str, signers: Path, when: datetime | None = None) -> str:
    """Return who signed `digest`, in words: `signed by NAME`, or by which key that nobody's name is on.

    Args:
        place: what a message calls the signature.
        when: moment at which the key must have been valid, now where none is said.

    Raises:
        InputError: it is no signature, it is over something else, or its key might not sign at that time.
        MachineError: ssh-keygen is not installed.
    """
    # In the time of this machine, which every release reads.
    moment = ("-O", f"verify-time={(when or datetime.now(UTC)).astimezone():%Y%m%d%H%M%S}")
    with tempfile.NamedTemporaryFile("w", suffix=SUFFIX) as copy:
        copy.write(signature)
        copy.flush()

        asked = partial(_ssh_keygen, digest=digest, arguments=("-n", _NAMESPACE, "-s", copy.name))

        def demand(message: str, *action: str) -> str:
            done = asked(*action)
            if done.returncode:
                found, *_ = (done.stderr or done.stdout).strip().splitlines() or [""]
                raise InputError(message, place=place, found=found, hint=_AGAIN)
            return done.stdout

        known = demand("the signature does not match", "check-novalidate")
        names: list[str] = []
        if _signers_text(signers):
            found = asked("find-principals", "-f", str(signers), *moment)
            names = [] if found.returncode else found.stdout.splitlines()
            # The lines about the file begin with its name, and those about the key say when it is valid.
            told = re.search(rf"^{re.escape(str(signers))}:(.*)$", found.stderr, re.MULTILINE)
            if told and found.returncode:
                late = re.search("expired|not yet valid", told[1])
                message = "the key was not valid when it signed" if late else "not a line of a signer"
                raise InputError(message, place=str(signers), found=f"line {told[1]}")
        revoked = signers.with_name(_REVOKED)
        for name in names:
            who = ("verify", "-f", str(signers), "-I", name, *moment)
            demand(f"the key of {name} may not sign this", *who)
            if os.path.lexists(revoked):
                message = f"the key of {name} is revoked, or {revoked} cannot be read"
                demand(message, *who, "-r", str(revoked))
    if names:
        return f"{_SIGNED}{', '.join(names)}"
    key = re.search(r"SHA256:[\w+/]+", known)
    return f"signed with the key {key[0] if key else 'of nobody'}, which {signers.name} does not vouch for"


def _ssh_keygen(*action: str, digest: str, arguments: Iterable[str]) -> subprocess.CompletedProcess[str]:
    command, text = ["ssh-keygen", "-Y", *action, *arguments], f"{digest}\n"
    run = partial(subprocess.run, capture_output=True, text=True, errors="replace", check=False)
    try:
        return run(command, input=text, timeout=_SECONDS)
    except OSError as error:
        hint = "signatures need OpenSSH 8.9 or newer"
        raise MachineError(f"cannot start ssh-keygen: {error.strerror}", hint=hint) from None
    except subprocess.TimeoutExpired:
        hint = "add the key to an agent: ssh-add KEY"
        raise MachineError("ssh-keygen does not answer", hint=hint) from None
