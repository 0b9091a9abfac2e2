"""Text for people: numbers in words, the same on every surface, and no secrets."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Sequence

GIB, MIB, TERA = 1 << 30, 1 << 20, 1e12
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/?#\s]+@")
# An address with a host; a key is no address.
_HOST = re.compile(
    r"(?P<scheme>https?://)(?:[^/?#\s]*@)?(?P<host>(?:[\w.-]+|\[[\da-f:.]+\])(?::\d+)?)(?=[/?#]|$)",
    re.IGNORECASE,
)
_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PROXY|INDEX", re.IGNORECASE)
# A shorter value is more likely a word of the log.
_SHORTEST = 6
# Handler of errors, for streams whose encoding lacks a character: what looks or means alike, else `?`.
LIKENESS = "twinrun-likeness"
_ALIKE = dict(zip("✓✗≠○·\N{MULTIPLICATION SIGN}µ…→", "+x~o-xu.>", strict=True))


def number(value: float) -> str:
    """Return four significant digits, thousands separated."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"


def percent(share: float) -> str:
    """Return a share of one in percent."""
    return f"{share:.1%}"


def plain(value: str | int | float | bool | tuple[str | int | float | bool, ...]) -> str:
    """Return a value of a configuration, thousands separated; of several, any of them."""
    if isinstance(value, tuple):
        return " or ".join(plain(one) for one in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Return a number of bytes in MiB, or in GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Return a time as a person would say it: seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# Characters that move a cursor, hide text or turn its order: controls but for tab and newline, marks of
# direction, separators that some programs take for a newline, what has no width, and halves of characters.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` with what a terminal or a browser would obey, and not show, written as its number."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


# How keys of well known services begin, a token in three parts, and a private key in its armour.
_CREDENTIAL = re.compile(
    r"\b(?:sk|pk|rk|gh[a-z]|github_pat|glpat|hf|xox[a-z]|npm|pypi|dckr_pat|wandb_v1)[-_][\w-]{8,}"
    r"|\bA[KS]IA[0-9A-Z]{12,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|$)"
    r"|(?P<name>(?i:(?:(?<!per-)token|secret|passw(?:or)?d|credential|(?:api|access|private)[-_]?key)(?![a-z])(?:_\w+)?"
    r"['\"]?\s*[=:]\s*['\"]?(?!null|none|true|false)"
    r"|--[\w-]*(?:token|secret|passw(?:or)?d|key)\s+|\b(?:bearer|basic)\s+))[^\s,;&'\"]+",
    re.DOTALL,
)
# A run of letters and digits that no person typed; digests of files, which are no secret, are longer.
_RANDOM = re.compile(r"(?<![\w/+-])(?=[\w+=]*\d)(?=[\w+=]*[a-z])(?=[\w+=]*[A-Z])[\w+=]{24,}(?![\w/-])")


def without_credentials(text: str) -> str:
    """Return `text` without what looks like a password, a token or a key, wherever it came from."""
    hidden = _CREDENTIAL.sub(lambda found: f"{found['name'] or ''}***", redacted(text))
    return _RANDOM.sub("***", hidden)


def redacted(text: str) -> str:
    """Return `text` without the secrets of this process's environment; hosts of addresses stay."""
    secrets = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, host_alone(secret))
    return _ADDRESS.sub(r"\g<scheme>***@", text)


def host_alone(address: str) -> str:
    """Return scheme and host of an address: user, password, path and query may be secrets."""
    found = _HOST.match(address)
    if found is None:
        return "***"
    host = f"{found['scheme']}{found['host']}"
    return host if host == address.rstrip("/") else f"{host}/***"


def _alike(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_ALIKE.get(one, "?") for one in error.object[error.start : error.end]), error.end


codecs.register_error(LIKENESS, _alike)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
