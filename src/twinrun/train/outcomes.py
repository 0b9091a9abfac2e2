"""How ranks tell each other the outcomes of checks: files in the folder of the job. Imports without torch."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.protocol.checks import ChecksJob, CheckSpec
from twinrun.protocol.measurements import Check
from twinrun.train import rank

# Beyond the timeouts: ranks do not start at once, and a shared file system shows a file late.
GRACE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Outcomes:
    """The outcomes of all ranks, each posted by its rank as soon as it is known."""

    def __init__(self, job: ChecksJob) -> None:
        self.rank, self.ranks = rank.variable("RANK", 0), rank.variable("WORLD_SIZE", 1)
        if self.ranks != job.world_size:
            raise InputError(
                "wrong number of ranks", place=job.point, found=self.ranks, allowed=job.world_size
            )
        # An earlier attempt may have left files in the folder.
        self._folder = Path(job.out) / f"outcomes-{job.attempt}"
        # No rank is later than this: each check before ended within its timeout.
        self._patience = GRACE_SECONDS
        self._ended = 0
        self._write(self._name, "")

    @property
    def _name(self) -> str:
        """The check that this rank has ended last; 0 is its start."""
        return f"check-{self._ended}"

    @property
    def _over(self) -> Path:
        """One file of all ranks: asked often, by each."""
        return self._folder / f"over-{self._ended}"

    def share_port(self) -> int:
        """Return a port that is free on the first rank's host, the same on all ranks; after `meet`."""
        name = f"port-{self._ended}"
        if self.rank == 0:
            with contextlib.closing(socket.create_server(("", 0))) as server:
                self._write(name, str(server.getsockname()[1]))
        self._wait_for(name, {0})
        return int(self._file(name, 0).read_text())

    def is_over(self) -> bool:
        """Say whether a rank has ended the check that this one is at without passing it."""
        return self._over.exists()

    def post(self, spec: CheckSpec, outcome: Check | None) -> None:
        """Say what this rank found, None where it takes no part."""
        if outcome and outcome.outcome != "pass":
            write_atomically(self._over, "")
        self._ended += 1
        self._write(self._name, outcome.model_dump_json() if outcome else "")
        self._patience += spec.timeout

    def collect(self, spec: CheckSpec) -> dict[int, Check]:
        """Return by rank what the check posted last has found; `unknown` for a rank that is silent."""
        missing, found = self.meet(), {}
        for number in range(self.ranks):
            if number in missing:
                place, reason = f"rank {number}", "this rank reported nothing"
                found[number] = Check(id=spec.id, outcome="unknown", place=place, reason=reason)
            elif self._file(self._name, number).stat().st_size:
                found[number] = load_json(self._file(self._name, number), Check)
        return found

    def meet(self) -> list[int]:
        """Wait until every rank has ended the check before; return the ranks that did not."""
        return sorted(self._wait_for(self._name, set(range(self.ranks))))

    def _wait_for(self, name: str, ranks: set[int]) -> set[int]:
        """Wait for the file of each rank; return the ranks without one when patience ends."""
        deadline = time.monotonic() + self._patience
        while missing := {rank for rank in ranks if not self._file(name, rank).exists()}:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        return missing

    def _write(self, name: str, text: str) -> None:
        write_atomically(self._file(name, self.rank), text)

    def _file(self, name: str, rank: int) -> Path:
        return self._folder / f"{name}.{rank}"
