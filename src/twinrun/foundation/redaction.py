"""What must not leave a machine: one redaction for submissions, crates, forms, trackers and fault logs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.text import without_credentials

# An absolute path, or that of a socket, whose last name is kept; network addresses have slashes elsewhere.
_PATH = re.compile(r"(?:(?<![\w.:/~-])|(?<=\bunix://))/(?:[\w.+@~=-]+/)+")
# IPv6, and addresses of network cards, which look the same.
_LONG_ADDRESS = re.compile(
    r"(?<![\w:.])(?:[0-9a-f]{1,4}:){5,7}[0-9a-f]{1,4}(?![\w:])"
    r"|(?<![\w:.])(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*(?![\w:])"
    r"|(?<![\w:.])::(?:[0-9a-f]{1,4}:){0,6}[0-9a-f]{1,4}(?![\w:])",
    re.IGNORECASE,
)
_HOME = re.compile(r"(?<![\w/])~[\w.-]*/(?:[\w.+@~=-]+/)*")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
# Names of users that tell nobody, and that are words of logs.
_NOBODY = frozenset(("", "root", "user", "nobody", "runner", "ubuntu", "slurm", "admin"))


class HiddenNames:
    """Hides what leaves this machine must not say: hosts, users, folders, addresses and credentials."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._labels = {host: f"node-{number}" for number, host in enumerate(filter(None, hosts), 1)}
        # Collectives print a host without its domain, and schedulers with it.
        for host, label in list(self._labels.items()):
            short = host.partition(".")[0]
            self._labels.setdefault(host if short.isdigit() else short, label)
        longest = sorted(self._labels, key=len, reverse=True)
        names = "|".join(map(re.escape, longest))
        users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")} | {
            Path(os.environ.get("HOME", "")).name
        }
        own = "|".join(
            re.escape(one) for one in sorted(users - _NOBODY, key=len, reverse=True) if len(one) > 2
        )
        self._users = re.compile(rf"(?<![\w-])(?:{own})(?![\w-])") if own else None
        self._hosts = re.compile(rf"(?<![\w.-])({names})(?:\.[A-Za-z][\w-]*)*(?![\w-])")

    def text(self, text: str) -> str:
        """Return a text without names of hosts, users and folders, and without credentials."""
        hidden = self._hosts.sub(lambda found: self._labels[found[1]], without_credentials(text))
        hidden = _LONG_ADDRESS.sub("removed", hidden)
        hidden = _MAIL.sub("removed", _PATH.sub("…/", _HOME.sub("…/", hidden)))
        return self._users.sub("user", hidden) if self._users else hidden

    def value(self, value: Any) -> Any:
        """Return a JSON value whose texts and keys are without them."""
        return cleaned(value, self.text)


def cleaned(value: Any, clean: Callable[[str], str] = without_credentials) -> Any:
    """Return a JSON value whose texts and keys went through `clean`."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(key): cleaned(one, clean) for key, one in value.items()}
    return [cleaned(one, clean) for one in value] if isinstance(value, (list, tuple)) else value


def demand_clean(text: str, place: str) -> None:
    """Raise InputError where a text that is sent as it is, since it is sealed, has a credential in it."""
    for number, line in enumerate(text.splitlines(), start=1):
        if without_credentials(line) != line:
            raise InputError(
                "this looks like a password, a token or a key",
                place=f"{place}:{number}",
                allowed="no credentials in what leaves this machine",
                hint="take it out of the command, the environment or the site, and run again",
            )
