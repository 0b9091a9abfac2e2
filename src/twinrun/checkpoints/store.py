"""What lies in a place of checkpoints: names of its files, and those that say which is the newest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from twinrun.foundation.errors import RunError

# The folder of a step.
STEP = "step-{:08d}"
MANIFEST = "manifest.json"
LATEST = "latest.json"
# Beside a manifest: the signature of who vouches for it.
SIGNATURE = f"{MANIFEST}.sig"
WRITER, QUARANTINE = "writer.json", "quarantine"
# Neither an index nor the description of a part is larger, written or read: 200,000 ranks, or tensors of one.
MAX_MANIFEST_BYTES = 64 << 20
# `latest.json` and `writer.json` have one line.
MAX_STATE_BYTES = 1 << 16


class DamagedError(RunError):
    """A checkpoint, or a part of it, is not what was written; names the file and both contents."""


def demand_readable(size: int, *, place: str, what: str) -> None:
    """Refuse to write a description of `size` bytes that no run could read again; raises RunError."""
    if size > MAX_MANIFEST_BYTES:
        raise RunError(
            f"{what} would be too large to be read again; nothing was written",
            place=place,
            found=f"{size} bytes",
            allowed=f"at most {MAX_MANIFEST_BYTES} bytes",
            hint="save fewer tensors a rank, or on fewer ranks",
        )


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Append `data`."""


class ReadableFile(Protocol):
    """A file that is being read, by several threads at once."""

    size: int

    def read_into(self, room: memoryview, begin: int) -> int:
        """Fill `room` from byte `begin` on; return how many bytes there were. Raises DamagedError."""


class Latest(NamedTuple):
    """What a place says was published last."""

    step: int
    sha256: str | None
    """Digest of its manifest; None where the place does not say."""


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint called `name`; None for a name that no checkpoint has."""
    match = re.fullmatch(r"step-([0-9]{8,})", name)
    return int(match[1]) if match and STEP.format(int(match[1])) == name else None


def latest_of(state: Mapping[str, Any]) -> Latest | None:
    """Return what `latest.json` says, None where it is not whole."""
    step, digest = state.get("step"), state.get("sha256")
    if not isinstance(step, int):
        return None
    return Latest(step, digest if isinstance(digest, str) else None)


def newest_token(*known: Mapping[str, Any]) -> int:
    """Return the newest token of what a place says, 0 where nothing of it says one: files may be damaged."""
    tokens = (one.get("token") for one in known)
    return max([0, *(token for token in tokens if isinstance(token, int))])


def fenced_off(place: str, writer: Mapping[str, Any], *, ours: int) -> RunError:
    """Return what to say when a run is no longer the writer of a place, which says that `writer` is."""
    if "token" not in writer:
        return RunError(
            "this place was emptied, or is gone, since this run began; nothing was written",
            place=place,
            found="no writer",
            allowed=f"this run, writer {ours}",
            hint="bring it back; the same command with --resume goes on",
        )
    return RunError(
        "another run writes its checkpoints here; nothing was overwritten",
        place=place,
        found=f"writer {writer['token']} ({writer.get('run', 'unknown')})",
        allowed=f"this run, writer {ours}",
        hint="give each run a place of its own",
    )
