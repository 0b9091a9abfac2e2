"""A headless Chromium that tests drive over a pipe, by its own protocol."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

# The shell moves the ends of the pipes to where Chromium reads and writes its protocol.
MOVE = 'exec "$@" 3<&"$READS" 4>&"$WRITES"'
# The longest wait for an answer.
WAIT_SECONDS = 60
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
    "--remote-debugging-pipe",
)


class Browser:
    """One page of one browser."""

    def __init__(self, profile: Path) -> None:
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        environment, given = os.environ | {"READS": str(theirs), "WRITES": str(answers)}, (theirs, answers)
        command = ("bash", "-c", MOVE, "-", "chromium", *OPTIONS, f"--user-data-dir={profile}")
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, env=environment, pass_fds=given, stderr=quiet)
        for one in given:
            os.close(one)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        os.close(self._read)
        self._process.kill()
        self._process.wait(timeout=WAIT_SECONDS)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; raises RuntimeError where it has none."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def look(self, *, width: int, scheme: str) -> None:
        """Take a width in pixels and a colour scheme."""
        size: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def visit(self, page: Path) -> None:
        """Open a page and wait until it is loaded."""
        self.call("Page.navigate", url=page.as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Return what an expression of JavaScript gives, awaited."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], WAIT_SECONDS)[0]:
                raise RuntimeError(f"the browser said nothing for {WAIT_SECONDS} seconds")
            read = os.read(self._read, 1 << 16)
            if not read:
                raise RuntimeError("the browser ended")
            self._buffer += read
        first, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(first))
