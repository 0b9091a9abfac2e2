"""A real registry on this machine, with images written through its programming interface."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import signal
import socket
import socketserver
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIGURATION = "application/vnd.oci.image.config.v1+json"


class RunningRegistry:
    """docker-registry serving one folder on a free port of the loopback interface."""

    def __init__(self, folder: Path, *, auth: dict[str, Any] | None = None, login: str = "") -> None:
        self.host = f"127.0.0.1:{free_port()}"
        self.login = login
        settings = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}, "delete": {"enabled": True}},
            "http": {"addr": self.host, "secret": "of a test"},
            **({"auth": auth} if auth else {}),
        }
        file = folder / "registry.yml"
        # JSON is YAML.
        file.write_text(json.dumps(settings), encoding="utf-8")
        with (folder / "registry.log").open("wb") as log:
            self._process = subprocess.Popen(["docker-registry", "serve", str(file)], stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> RunningRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _wait(self) -> None:
        host, _, port = self.host.partition(":")
        for _ in range(200):
            with socket.socket() as attempt:
                if attempt.connect_ex((host, int(port))) == 0:
                    return
            assert self._process.poll() is None, "the registry has ended"
            time.sleep(0.05)
        raise AssertionError("the registry does not listen")

    def kill(self) -> None:
        """End it at once, with whatever it was sending."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def push_image(self, name: str, tag: str, platform: str = "linux/amd64", kind: str = MANIFEST) -> str:
        """Push an image without content, and return the SHA-256 of its manifest."""
        system, _, architecture = platform.partition("/")
        configuration = {
            "os": system,
            "architecture": architecture,
            "config": {"Labels": {"tag": tag}},
            "rootfs": {"type": "layers", "diff_ids": []},
        }
        content = _dump(configuration)
        manifest = {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": _CONFIGURATION,
                "digest": self.push_blob(name, content),
                "size": len(content),
            },
            "layers": [],
        }
        return self.push_manifest(name, tag, manifest)

    def push_index(self, name: str, tag: str, entries: dict[str, str], kind: str = INDEX) -> str:
        """Push an index of platforms and manifest digests, and return its SHA-256."""
        rows = [
            {
                "mediaType": MANIFEST if kind == INDEX else DOCKER,
                "digest": f"sha256:{digest}",
                "size": 1,
                "platform": dict(zip(("os", "architecture"), platform.split("/"), strict=True)),
            }
            for platform, digest in entries.items()
        ]
        return self.push_manifest(name, tag, {"schemaVersion": 2, "mediaType": kind, "manifests": rows})

    def push_manifest(self, name: str, tag: str, manifest: dict[str, Any]) -> str:
        content = _dump(manifest)
        self._send("PUT", f"/v2/{name}/manifests/{tag}", content, manifest["mediaType"])
        return hashlib.sha256(content).hexdigest()

    def push_blob(self, name: str, content: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        place = self._send("POST", f"/v2/{name}/blobs/uploads/", b"", "application/json")
        path = place.partition(self.host)[2] or place
        self._send("PUT", f"{path}&digest={digest}", content, "application/octet-stream")
        return digest

    def delete(self, name: str, sha256: str) -> None:
        self._send("DELETE", f"/v2/{name}/manifests/sha256:{sha256}", b"", "application/json")

    def _send(self, method: str, path: str, body: bytes, kind: str) -> str:
        request = urllib.request.Request(f"http://{self.host}{path}", data=body, method=method)
        request.add_header("Content-Type", kind)
        if self.login:
            request.add_header("Authorization", f"Basic {base64.b64encode(self.login.encode()).decode()}")
        with urllib.request.urlopen(request, timeout=20) as answer:
            location: str = answer.headers.get("Location") or ""
            return location


class RegistryProxy(socketserver.BaseRequestHandler):
    """Passes requests on to a registry, each on a connection of its own, and cuts what comes back."""

    target: str
    spoilt: bytes

    def handle(self) -> None:
        host, _, port = self.target.partition(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as behind:
            first = self.request.recv(65536)
            behind.sendall(first)
            sending = threading.Thread(target=_pass_on, args=(self.request, behind))
            sending.start()
            if first.startswith(self.spoilt):
                self.request.sendall(behind.recv(65536)[:20])
            else:
                _pass_on(behind, self.request)
            self.request.shutdown(socket.SHUT_RDWR)
            sending.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)


@contextlib.contextmanager
def wire(registry: RunningRegistry, spoilt: bytes) -> Iterator[str]:
    """Yield the address of a registry whose answers are cut where a request begins with `spoilt`."""
    handler = type("Handler", (RegistryProxy,), {"target": registry.host, "spoilt": spoilt})
    with serve(socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)) as port:
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def serve(server: socketserver.TCPServer) -> Iterator[int]:
    """Answer requests on a thread, which ends with the context whatever happens in it; yield the port."""
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    with server:
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def without_proxies(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep the user's proxies and logins out of a test."""
    for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DOCKER_CONFIG", str(folder / "engine"))


def _dump(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
