"""A real registry on this machine, and what cuts its answers."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[str]:
    """Serve a folder by docker-registry and yield its host; it ends at once, with whatever it was sending."""
    port = free_port()
    settings = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "of a test"},
    }
    # JSON is YAML.
    (folder / "registry.yml").write_text(json.dumps(settings), encoding="utf-8")
    with (folder / "registry.log").open("wb") as log:
        command = ["docker-registry", "serve", str(folder / "registry.yml")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        while not _listens(port):
            assert process.poll() is None, "the registry has ended"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


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
def wire(registry: str, spoilt: bytes) -> Iterator[str]:
    """Yield the address of a registry whose answers are cut where a request begins with `spoilt`."""
    handler = type("Handler", (RegistryProxy,), {"target": registry, "spoilt": spoilt})
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
