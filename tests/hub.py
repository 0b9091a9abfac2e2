"""A server on this machine that answers as the Hugging Face Hub does, and fails as its attributes say."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from tests.registries import serve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
    """Serves the files of one data set and one model, whatever they are called."""

    cut_after: int | None = None
    """Close the connection after this many bytes, and each later one before any."""
    flip, ranges = False, True
    """Change the first byte of each file; answer parts."""
    answer: bytes | None = None
    """Say this to everything."""

    def __init__(self, **files: dict[str, bytes]) -> None:
        """Take files by path, for `datasets` and `models`."""
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files, self.endpoint = files, f"http://127.0.0.1:{self.server_port}"
        # Paths and Range headers of the requests, and Authorization headers that came.
        self.asked: list[tuple[str, str | None]] = []
        self.authorised: list[str] = []

    @contextlib.contextmanager
    def serving(self) -> Iterator[Hub]:
        """Answer until the end of the block."""
        with serve(self):
            yield self


class HubHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        """Describe a file as the hub does: its commit, its digest and its size."""
        if (found := self.file()) is not None:
            listed = entry("", found)
            digest, size = listed["lfs"]["oid"] if "lfs" in listed else listed["oid"], str(len(found))
            revision = self.path.partition("/resolve/")[2].partition("/")[0]
            self.send(b"", 200, **{"X-Repo-Commit": revision, "ETag": f'"{digest}"', "Content-Length": size})

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        self.server.authorised += filter(None, [self.headers.get("Authorization")])
        path, _, page = self.path.partition("?page=")
        listing = re.fullmatch(r"/api/(\w+)/[\w-]+/[\w.-]+/tree/[0-9a-f]{40}/?(.*?)(\?.*)?", path)
        if self.server.answer is not None:
            self.send(self.server.answer)
        elif listing:
            # One entry a page, with a link to the next.
            entries: list[Any] = [{"type": "directory", "path": "en/more", "size": 0, "oid": "0" * 40}]
            files = self.server.files[listing[1]]
            entries += [entry(*one) for one in files.items() if one[0].startswith(listing[2])]
            at, address = int(page or 0), f"{self.server.endpoint}{path.partition('?')[0]}"
            more = {"Link": f'<{address}?page={at + 1}>; rel="next"'} if at + 1 < len(entries) else {}
            self.send(json.dumps(entries[at : at + 1]).encode(), 200, **more)
        elif (content := self.file()) is not None:
            content = bytes([content[0] ^ 1]) + content[1:] if self.server.flip else content
            start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if self.server.ranges else 0
            length = {"Content-Length": str(len(content) - start)}
            self.send(content[start:][: self.server.cut_after], 206 if start else 200, **length)
            self.server.cut_after = self.server.cut_after and 0

    def file(self) -> bytes | None:
        path = self.path.replace("%20", " ")
        kind = "datasets" if path.startswith("/datasets/") else "models"
        found = re.search(r"/resolve/[0-9a-f]{40}/(.*)", path)
        if not found or found[1] not in self.server.files.get(kind, {}):
            self.send_error(404)
            return None
        return self.server.files[kind][found[1]]

    def send(self, body: bytes, code: int = 200, /, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@cache
def entry(path: str, content: bytes) -> dict[str, Any]:
    """Return the listing's line of a file; large ones are named by SHA-256, small ones as git does."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    listed: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if len(content) > 20:
        listed["oid"] = "f" * 40
        listed["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return listed
