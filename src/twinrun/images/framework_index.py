"""The framework's own package index: which hash it gives for a wheel, read from its page of the package."""

from __future__ import annotations

import base64
import re
import urllib.error
import urllib.request
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from typing import Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import host_alone
from twinrun.manifests.attestation import Attestation

SECONDS = 20
_HASH = re.compile(r"sha256=([0-9a-f]{64})")

IndexState = Literal["verified", "differs", "without a hash", "missing"]


class IndexAnswer(Frozen):
    """What the index says of an attested wheel."""

    wheel: Attestation
    state: IndexState
    found: str | None
    """The hash that the index gives, where it gives one."""


class _Links(HTMLParser):
    """Collects the files of a page of PEP 503: the last part of each link's path, with its hash."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str | None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = urlsplit(dict(attrs).get("href") or "") if tag == "a" else None
        if address:
            found = _HASH.search(address.fragment)
            self.files[unquote(address.path.rpartition("/")[2])] = found[1] if found else None


def verify_index(attested: tuple[Attestation, ...], *, index: str) -> tuple[IndexAnswer, ...]:
    """Return what the index says of each attested wheel.

    Args:
        index: address of a package index as PEP 503 describes it.

    Raises:
        MachineError: the index is out of reach; credentials in its address are not shown.
    """
    pages = {package: _page(index, package) for package in sorted({one.package() for one in attested})}
    return tuple(_answer(wheel, pages[wheel.package()]) for wheel in attested)


def demand_answer(index: str) -> None:
    """Raise MachineError where nothing answers at an index: pip would try each package for minutes."""
    if not index.startswith(("http://", "https://")):
        return
    try:
        _open(index).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError, HTTPException) as error:
        raise _unreachable(index, error) from None


def _answer(wheel: Attestation, page: dict[str, str | None]) -> IndexAnswer:
    found = page.get(wheel.file)
    states: dict[bool, IndexState] = {True: "verified", False: "differs"}
    absent: IndexState = "without a hash" if wheel.file in page else "missing"
    return IndexAnswer(wheel=wheel, state=states[found == wheel.sha256] if found else absent, found=found)


def _page(index: str, package: str) -> dict[str, str | None]:
    """Return the files of a package by name, each with its SHA-256 where the index gives one."""
    address = f"{index.rstrip('/')}/{package}/"
    links = _Links()
    try:
        with _open(address) as answer:
            links.feed(answer.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {}
        raise _unreachable(address, error) from None
    except (OSError, ValueError, HTTPException) as error:
        raise _unreachable(address, error) from None
    return links.files


def _open(address: str) -> HTTPResponse:
    """Ask an index, with the user and the password that its address may have."""
    parts = urlsplit(address)
    login, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)))  # noqa: S310 - the user's index
    if login:
        encoded = base64.b64encode(unquote(login).encode()).decode()
        # Where the index sends us to another host, the password stays here.
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS)  # noqa: S310 - the user's index
    return answer


def _unreachable(address: str, error: Exception) -> MachineError:
    return MachineError(
        "the framework's package index is out of reach",
        place=host_alone(address),
        # The message that an address is wrong repeats parts of it.
        found=str(error) if isinstance(error, OSError) else "no valid address",
        hint="check the network, or name a mirror with --index or TWINRUN_INDEX",
    )
