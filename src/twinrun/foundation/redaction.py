"""What a log must not tell: passwords in addresses, and the values of variables that look secret."""

from __future__ import annotations

import os
import re

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
_NAME = re.compile(r"TOKEN|SECRET|PASS|KEY|CREDENTIAL|AUTH|PROXY|INDEX", re.IGNORECASE)
# A shorter value is more likely a word of the log.
_SHORTEST = 6


def redacted(text: str) -> str:
    """Return `text` without the secrets of this process's environment."""
    text = _ADDRESS.sub(r"\g<scheme>***@", text)
    secrets = {value for name, value in os.environ.items() if _NAME.search(name) and len(value) >= _SHORTEST}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text
