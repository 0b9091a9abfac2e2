"""What must not leave a machine: one door for errors, pages, submissions, crates and archives."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError

_USER = re.compile(r"(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/?#\s]+@")
# An address with a host; a key is no address.
_HOST = re.compile(
    r"(?P<scheme>https?://)(?:[^/?#\s]*@)?(?P<host>(?:[\w.-]+|\[[\da-f:.]+\])(?::\d+)?)(?=[/?#]|$)",
    re.IGNORECASE,
)
_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PROXY|INDEX", re.IGNORECASE)
# A shorter value is more likely a word of the log.
_SHORTEST = 6
# How keys of well known services begin, a token in three parts, a private key in its armour, and whatever
# stands behind a name that says what it is.
_CREDENTIAL = re.compile(
    r"\b(?:sk|pk|rk|gh[a-z]|github_pat|glpat|hf|xox[a-z]|npm|pypi|dckr_pat|wandb_v1)[-_][\w-]{8,}"
    r"|\b(?:gl[a-z]{2,4}|xapp|do[a-z]_v1|rpa|shp[a-z]{2}|lin_api|r8|tskey|GOCSPX|sq0[a-z]{3}|hvs|SG|pul)[-_.]"
    r"(?=[\w.-]*\d)[\w.-]{16,}|\bAIza[\w-]{30,}|\bya29\.[\w.-]{20,}|\bdapi[0-9a-f]{32}|\bkey-[0-9a-f]{32}"
    r"|\b(?:AC|SK)[0-9a-f]{32}\b|\bA[KS]IA[0-9A-Z]{12,}|\bAKCp\w{16,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|\b\d{8,10}:[\w-]{35}\b|\b[0-9a-f]{32}-us\d{1,2}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY.*?(?:-----END [A-Z ]*-----|$)"
    r"|(?P<name>(?i:(?:(?<!per-)token|secret|passw(?:or)?d|passphrase|credential|cookie"
    r"|(?:api|access|account|private|shared|storage)[-_]?(?:access[-_]?)?key)(?![a-z])(?:_\w+)?"
    r"['\"]?\s*[=:]\s*['\"]?(?!null|none|true|false)"
    r"|(?<!-)--[\w-]{0,40}(?:token|secret|passw(?:or)?d|key)[\s=]+|\b(?:bearer|basic)\s+|\btoken\s+(?=\S*\d)(?=\S{16})"
    r"|['\"]auth['\"]\s*:\s*['\"]|[?&](?:sig|signature|x-(?:amz|goog)-[\w-]+|access_?token|key|code)="
    r"|\bwandb\s+login\s+|\blogin\s+\S+\s+password\s+|\b(?:curl|wget)\b[^\n]{0,200}?\s(?:-u|--user)[\s=]+[^\s:]+:"
    r"|hooks\.slack\.com/\w+/|discord(?:app)?\.com/api/webhooks/\d+/))[^\s,;&'\"]+",
    re.DOTALL,
)
# A run of letters and digits that no person typed; digests of files, which are no secret, are longer.
_RANDOM = re.compile(
    r"(?<![\w/+-])(?=[\w+=]*\d)(?=[\w+=]*[a-z])(?=[\w+=]*[A-Z])[\w+=]{24,}(?![\w/-])"
    r"|(?<![\w/+=.-])(?=[\w/+]*\d)(?=[\w/+]*[a-z])(?=[\w/+]*[A-Z])[A-Za-z0-9/+]{40}(?![\w/+=.-])"
)
# Of detect-secrets: those that know a form. Words and entropy are judged above, addresses below.
_GUESSES = ("KeywordDetector", "HexHighEntropyString", "Base64HighEntropyString", "IPPublicDetector")
# An absolute path, or that of a socket, whose last name is kept; network addresses have slashes elsewhere.
_PATH = re.compile(r"(?:(?<![\w.:/~-])|(?<=\bunix://))/(?:[\w.+@~=-]+/)+")
_ADDRESS = re.compile(r"(?<![\w.=-])(?:\d{1,3}\.){3}\d{1,3}(?![\w.-]|\.\d)")
# IPv6, and addresses of network cards, which look the same.
_LONG_ADDRESS = re.compile(
    r"(?<![\w:.])(?:[0-9a-f]{1,4}:){5,7}[0-9a-f]{1,4}(?![\w:])"
    r"|(?<![\w:.])(?:[0-9a-f]{1,4}:){1,6}:[0-9a-f:]*(?![\w:])"
    r"|(?<![\w:.])::(?:[0-9a-f]{1,4}:){0,6}[0-9a-f]{1,4}(?![\w:])",
    re.IGNORECASE,
)
_QUERY = re.compile(r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]{0,30}://[^\s?#'\"<>]+)[?][^\s'\"<>]*", re.IGNORECASE)
_HOME = re.compile(r"(?<![\w/])~[\w.-]*/(?:[\w.+@~=-]+/)*")
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+\b")
# Names that every machine has for itself.
_LOOPBACK = re.compile(r"localhost|ip6-|.{0,2}$")
# Names of users that tell nobody, and that are words of logs.
_NOBODY = frozenset(("", "root", "user", "nobody", "runner", "ubuntu", "slurm", "admin"))


def redacted(text: str) -> str:
    """Return `text` without the secrets of this process's environment; hosts of addresses stay."""
    secrets = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, host_alone(secret))
    return _USER.sub(r"\g<scheme>***@", text)


def host_alone(address: str) -> str:
    """Return scheme and host of an address: user, password, path and query may be secrets."""
    found = _HOST.match(address)
    if found is None:
        return "***"
    host = f"{found['scheme']}{found['host']}"
    return host if host == address.rstrip("/") else f"{host}/***"


def without_credentials(text: str) -> str:
    """Return `text` without what looks like a password, a token or a key; this needs no library."""
    hidden = _CREDENTIAL.sub(lambda found: f"{found['name'] or ''}***", redacted(text))
    return _RANDOM.sub("***", hidden)


def leaving(text: str) -> str:
    """Return `text` as others may see it: without credentials of any kind that a library knows as well."""
    lines = without_credentials(text).splitlines(keepends=True)
    return "".join(_without_known(line) if len(line) > _SHORTEST else line for line in lines)


def _without_known(line: str) -> str:
    for plugin in _plugins():
        for secret in plugin.analyze_string(line):
            line = line.replace(secret, "***") if "***" not in secret else line
    return line


@cache
def _plugins() -> tuple[Any, ...]:
    """Return the detectors of detect-secrets that know a form; none in a stack, which does not have it."""
    try:
        util = importlib.import_module("detect_secrets.core.plugins.util")
    except ImportError:
        return ()
    known = util.get_mapping_from_secret_type_to_class().values()
    forms = (one for one in known if isinstance(getattr(one, "denylist", None), (list, tuple)))
    return tuple(one() for one in forms if one.__name__ not in _GUESSES)


class HiddenNames:
    """Hides what leaves this machine must not say: hosts, users, folders, addresses and credentials."""

    def __init__(self, hosts: Iterable[str] = ()) -> None:
        """Hide `hosts`, and after them this machine and those that its /etc/hosts names."""
        own = [platform.node(), os.environ.get("HOSTNAME", "")]
        with contextlib.suppress(OSError):
            lines = Path("/etc/hosts").read_text(encoding="utf-8", errors="replace").splitlines()
            own += [name for line in lines for name in line.partition("#")[0].split()[1:]]
        named = dict.fromkeys(one for one in [*hosts, *own] if not _LOOPBACK.match(one))
        labels = {host: f"node-{number}" for number, host in enumerate(named, 1)}
        # Collectives print a host without its domain, and schedulers with it.
        short = {host: host.partition(".")[0] for host in labels}
        self._labels = {host if one.isdigit() else one: labels[host] for host, one in short.items()} | labels
        names = "|".join(map(re.escape, sorted(self._labels, key=len, reverse=True)))
        self._hosts = re.compile(rf"(?<![\w.-])({names})(?:\.[A-Za-z][\w-]*)*(?![\w-])")
        users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
        users.add(Path(os.environ.get("HOME", "")).name)
        # Where there is none, a pattern that is found nowhere.
        people = "|".join(re.escape(one) for one in users - _NOBODY if len(one) > 2) or "(?!)"
        self._users = re.compile(rf"(?<![\w-])(?:{people})(?![\w-])")

    def text(self, text: str) -> str:
        """Return a text without names of hosts, users and folders, addresses, queries and credentials."""
        hidden = _QUERY.sub(r"\1?***", leaving(text))
        hidden = self._hosts.sub(lambda found: self._labels[found[1]], hidden)
        hidden = _LONG_ADDRESS.sub("removed", hidden)
        hidden = hidden if _ADDRESS.fullmatch(hidden) else _ADDRESS.sub("removed", hidden)
        hidden = _MAIL.sub("removed", _PATH.sub("…/", _HOME.sub("…/", hidden)))
        return self._users.sub("user", hidden)

    def value(self, value: Any) -> Any:
        """Return a JSON value whose texts and keys are without them."""
        # A text that is an address alone may be a version of four parts, but for this key.
        plain = re.sub(r'("address": )"[\d.]+"', r'\1"removed"', json.dumps(value))
        return cleaned(json.loads(plain), self.text)


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
        if leaving(line) != line:
            message, allowed = "this looks like a password, a token or a key", "no credentials in what leaves"
            hint = "take it out of the command, the environment or the site, and run again"
            raise InputError(message, place=f"{place}:{number}", allowed=allowed, hint=hint)
