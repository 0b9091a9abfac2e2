"""What the ranks of a point have sniffed: the slow ones, each named once, by host."""

from __future__ import annotations

from pathlib import Path

from twinrun.execution.ranks import rank_reports
from twinrun.protocol.sniff import FILE, WINDOW, Sniff, alarms


class Nose:
    """Reads the sniffs of one point as they come."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a point."""
        self._folder = folder
        self._lines = 0
        self._told: set[tuple[int, str]] = set()

    def new(self) -> list[str]:
        """Return, in words, the slow ranks that nobody was told of."""
        file = self._folder / FILE
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        sniffs = [Sniff.model_validate_json(line) for line in lines if line.endswith("\n")]
        found = []
        for end in range(self._lines + 1, len(sniffs) + 1):
            for one in alarms(sniffs[max(0, end - WINDOW) : end]):
                if (one.rank, one.kind) not in self._told:
                    self._told.add((one.rank, one.kind))
                    found.append(one.text(self._host(one.rank)))
        self._lines = len(sniffs)
        return found

    def _host(self, rank: int) -> str:
        reports = {one.rank: one.host for one in rank_reports(self._folder)}
        return reports.get(rank, "a host that has not reported")
