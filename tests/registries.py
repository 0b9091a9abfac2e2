"""A real registry on this machine, and what cuts its answers."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path


class RunningRegistry:
    """docker-registry serving one folder on a free port of the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self.host = f"127.0.0.1:{free_port()}"
        settings = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}, "delete": {"enabled": True}},
            "http": {"addr": self.host, "secret": "of a test"},
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
