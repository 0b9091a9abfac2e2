"""uv as a program: what it downloads is counted while it installs, and what it says is kept for the error."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from uv import find_uv_bin

from twinrun.foundation.errors import MachineError
from twinrun.foundation.processes import last_lines, readable
from twinrun.foundation.text import plural, redacted, size

# Hints by the words that uv prints; the numbers are EPERM, EACCES, ENOTDIR, EFBIG, ENOSPC, EROFS and EDQUOT.
_HINTS = (
    (
        "Hash mismatch",
        "a file is not the one that was locked, and was not installed; `invoke lock --check` says more",
    ),
    (
        r"\(os error (1|13|20|27|28|30|122)\)",
        "free some space, or set TWINRUN_CACHE and UV_CACHE_DIR to folders that you can write to",
    ),
    ("", "check the network, or carry the cache folder over from a machine that has the environment"),
)
# It announces each wheel of more than a MiB, and says when it has it.
_BEGUN = re.compile(r"^Downloading (\S+) \(([\d.]+)(KiB|MiB|GiB)\)")
_ENDED = re.compile(r"^ Downloaded (\S+)")
_PHASE = re.compile(r"^(?:Resolved|Prepared|Installed) \d+ packages? in .+")
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Nothing is said for longer than this; and a line for each tenth of the bytes.
_SILENT_SECONDS = 15.0
_STEPS = 10
UV_TIMEOUT_S = 30


@dataclass
class Downloads:
    """The wheels that uv has announced, and those that it has."""

    total_bytes: int | None = None
    """Bytes of all files, where they are known before."""
    announced: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def read(self, line: str) -> bool:
        """Take a line of uv; say whether it is worth a line of ours."""
        before = self._tenths()
        if begun := _BEGUN.match(line):
            self.announced[begun[1]] = round(float(begun[2]) * _UNITS[begun[3]])
        elif ended := _ENDED.match(line):
            self.ended.add(ended[1])
        return self._tenths() > before

    def __str__(self) -> str:
        total = self._total()
        share = self._done() / total if total else 0.0
        bar = f"[{'#' * int(share * _STEPS):.<{_STEPS}}]"
        text = f"{bar} {size(self._done())} of {size(total)}, {plural(len(self.ended), 'large package')}"
        waiting = sorted(self.announced.keys() - self.ended, key=lambda name: -self.announced[name])
        if not waiting:
            return text
        others = f" and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        return f"{text}; on its way: {waiting[0]} ({size(self.announced[waiting[0]])}){others}"

    def _done(self) -> int:
        return sum(self.announced.get(name, 0) for name in self.ended)

    def _total(self) -> int:
        return max(self.total_bytes or 0, sum(self.announced.values()))

    def _tenths(self) -> int:
        return _STEPS * self._done() // self._total() if self._total() else 0


def uv_cache() -> Path:
    """Return the folder of uv's cache, whose files environments on the same disk are links to."""
    command = [os.fspath(find_uv_bin()), "cache", "dir"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=UV_TIMEOUT_S)
    return Path(answer.stdout.strip() or "/")


def run_uv(*arguments: str, say: Callable[[str], None], total_bytes: int | None = None) -> None:
    """Run uv to its end, saying how far its downloads are.

    Args:
        total_bytes: of all downloads, where that is known before.

    Raises:
        MachineError: it cannot be started, or fails; has its last lines.
    """
    try:
        process = subprocess.Popen(
            [os.fspath(find_uv_bin()), *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise MachineError(
            f"cannot start uv: {error.strerror}", hint="install twinrun with pip; it brings uv"
        ) from None
    with process:
        try:
            text = _followed(process, say, Downloads(total_bytes))
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise MachineError(
            "the environment cannot be installed",
            place=f"uv {arguments[0]} {arguments[1]}",
            found=redacted(last_lines(text, 6)),
            hint=next(hint for pattern, hint in _HINTS if re.search(pattern, text)),
        )


def _followed(process: subprocess.Popen[bytes], say: Callable[[str], None], downloads: Downloads) -> str:
    """Return all that uv prints, once it has ended."""
    assert process.stderr
    descriptor, text, rest = process.stderr.fileno(), b"", b""
    began = said = time.monotonic()
    while True:
        arrived = readable(descriptor, seconds=1.0)
        part = os.read(descriptor, 1 << 16) if arrived else b""
        if arrived and not part:
            return text.decode(errors="replace")
        text += part
        *lines, rest = (rest + part).split(b"\n")
        shown = [line.decode(errors="replace") for line in lines]
        telling = [line for line in shown if _PHASE.match(line)]
        worth = [downloads.read(line) for line in shown]
        if any(worth):
            telling.append(str(downloads))
        elif downloads.announced and time.monotonic() - said > _SILENT_SECONDS:
            telling.append(f"{downloads}; {time.monotonic() - began:.0f} s")
        for line in telling:
            say(line)
            said = time.monotonic()
