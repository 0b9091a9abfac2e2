"""Image registry: a tag resolved to the digest of its manifest for one platform."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError

from twinrun.foundation.errors import InputError, MachineError

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_SECONDS = 30
# The default registry has its API on another host.
_API_HOSTS = {"docker.io": "registry-1.docker.io"}
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]+){3}|\[::1\])(:[0-9]+)?")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
# Manifests hold names and digests; the largest allowed by registries is 4 MiB.
_MAX_BYTES = 4 << 20


class Registry:
    """One repository of one registry."""

    def __init__(self, repository: str) -> None:
        """Take `host/path`; a path of one word on the default registry is an official image."""
        host, _, path = repository.partition("/")
        self._repository = repository
        self._name = f"library/{path}" if host in _API_HOSTS and "/" not in path else path
        # Engines too ask for no certificate on the loopback interface.
        scheme = "http" if _LOOPBACK.fullmatch(host) else "https"
        self._address = f"{scheme}://{_API_HOSTS.get(host, host)}/v2/{self._name}"
        self._credentials = _credentials(host)
        self._authorization: str | None = None

    def digest(self, tag: str, platform: str) -> str:
        """Return the SHA-256 of the manifest of `tag` for `platform`, for example `linux/amd64`.

        Raises:
            InputError: no such tag, or not for this platform.
            MachineError: the registry is out of reach, refuses, or sends bytes of another digest.
        """
        digest, manifest = self._manifest(tag)
        if manifest.get("mediaType") in _INDEXES or "manifests" in manifest:
            return self._platform_digest(manifest, tag, platform)
        configuration = self._json(f"blobs/{manifest['config']['digest']}", accept="*/*")[1]
        found = f"{configuration.get('os')}/{configuration.get('architecture')}"
        if found != platform:
            raise self._wrong_platform(tag, platform, [found])
        return digest

    def has_manifest(self, sha256: str) -> bool:
        """Say whether the registry still has the manifest with this digest; raises MachineError."""
        try:
            self._manifest(f"sha256:{sha256}")
        except InputError:
            return False
        return True

    def _manifest(self, reference: str) -> tuple[str, dict[str, Any]]:
        return self._json(f"manifests/{reference}", accept=", ".join((*_INDEXES, *_MANIFESTS)))

    def _platform_digest(self, index: Mapping[str, Any], tag: str, platform: str) -> str:
        """Return the digest that an image index has for the platform."""
        offered: dict[str, str] = {}
        for entry in index["manifests"]:
            one = entry.get("platform", {})
            offered.setdefault(f"{one.get('os')}/{one.get('architecture')}", entry["digest"])
        if platform not in offered:
            # Attestations are listed as the platform unknown/unknown.
            raise self._wrong_platform(tag, platform, sorted(offered.keys() - {"unknown/unknown"}))
        return offered[platform].removeprefix("sha256:")

    def _wrong_platform(self, tag: str, platform: str, offered: list[str]) -> InputError:
        return InputError(
            "the image is not built for this platform",
            place=f"{self._repository}:{tag}",
            found=platform,
            allowed=offered,
        )

    def _json(self, path: str, *, accept: str) -> tuple[str, dict[str, Any]]:
        """Return digest and content of `path`, verified by the digest in the path or in the header."""
        body, header = self._get(path, accept)
        digest = hashlib.sha256(body).hexdigest()
        expected = path.rpartition("sha256:")[2] if "sha256:" in path else header.removeprefix("sha256:")
        if expected and digest != expected:
            raise MachineError(
                "the registry sent other bytes than its digest says",
                place=f"{self._repository}: {path}",
                found=digest,
                allowed=expected,
            )
        try:
            content = json.loads(body)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise MachineError("the registry sent no manifest", place=f"{self._repository}: {path}")
        return digest, content

    def _get(self, path: str, accept: str) -> tuple[bytes, str]:
        """Return the body and the digest header; answers one authentication challenge."""
        for attempt in range(2):
            request = urllib.request.Request(f"{self._address}/{path}", headers={"Accept": accept})  # noqa: S310
            if self._authorization:
                # Not sent to where a blob is redirected: such URLs carry their own authorization.
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                return self._read(request)
            except HTTPError as error:
                with error:
                    challenge = error.headers.get("WWW-Authenticate", "")
                    if error.code != http.HTTPStatus.UNAUTHORIZED or attempt or not challenge:
                        raise self._refused(path, error.code) from None
                self._authorization = self._authorize(challenge)
        raise AssertionError("the second attempt returns or raises")

    def _read(self, request: urllib.request.Request) -> tuple[bytes, str]:
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:  # noqa: S310
                body: bytes = answer.read(_MAX_BYTES)
                if answer.length:
                    raise http.client.IncompleteRead(body, answer.length)
                return body, answer.headers.get("Docker-Content-Digest") or ""
        except HTTPError:
            raise
        except (URLError, OSError, http.client.HTTPException) as error:
            raise MachineError(
                "the registry is out of reach",
                place=self._repository,
                found=str(getattr(error, "reason", None) or error) or type(error).__name__,
                hint="the old lock stays; run `invoke lock` on a machine that reaches the registry",
            ) from None

    def _authorize(self, challenge: str) -> str:
        """Return the Authorization header for a challenge; public images need no credentials."""
        if challenge.lower().startswith("basic") and self._credentials:
            return f"Basic {self._credentials}"
        parameters = dict(_PARAMETER.findall(challenge))
        realm = urllib.parse.urlsplit(parameters.get("realm", ""))
        secure = realm.scheme == "https" or (realm.scheme == "http" and _LOOPBACK.fullmatch(realm.netloc))
        if not challenge.lower().startswith("bearer") or not secure:
            raise self._refused("", http.HTTPStatus.UNAUTHORIZED)
        query = {key: parameters[key] for key in ("service", "scope") if key in parameters}
        request = urllib.request.Request(f"{realm.geturl()}?{urllib.parse.urlencode(query)}")  # noqa: S310
        if self._credentials:
            request.add_unredirected_header("Authorization", f"Basic {self._credentials}")
        try:
            body, _ = self._read(request)
        except HTTPError as error:
            with error:
                raise self._refused("", error.code) from None
        answer = json.loads(body)
        return f"Bearer {answer.get('token') or answer['access_token']}"

    def _refused(self, path: str, code: int) -> InputError | MachineError:
        if code == http.HTTPStatus.NOT_FOUND:
            return InputError("the registry has no such image", place=f"{self._repository}: {path}")
        hints: dict[int, str] = {
            http.HTTPStatus.UNAUTHORIZED: "log in with `docker login`",
            http.HTTPStatus.FORBIDDEN: "log in with `docker login`",
            http.HTTPStatus.TOO_MANY_REQUESTS: "wait, or log in with `docker login`",
        }
        return MachineError(
            "the registry refuses",
            place=self._repository,
            found=f"HTTP {code}",
            hint=hints.get(code, "the old lock stays; try again later"),
        )


def _credentials(host: str) -> str | None:
    """Return user and password of the engine's login, base64-encoded; None without a login."""
    from docker import auth

    try:
        found = auth.resolve_authconfig(auth.load_config(), None if host in _API_HOSTS else host)
    except (OSError, ValueError, KeyError):
        return None
    if not found or not found.get("username"):
        return None
    return base64.b64encode(f"{found['username']}:{found['password']}".encode()).decode()
