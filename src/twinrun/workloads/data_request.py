"""Prepared data that ranks read, and the folder that holds it."""

from __future__ import annotations

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.evaluation import PackageSource
from twinrun.protocol.training import DataSource

# Counts up when ranks ask for files that preparation did not write before; older folders are made anew.
DATA_FORMAT = 2


class DataRequest(Frozen):
    """Prepared data that the ranks read."""

    name: str
    source: DataSource | PackageSource
    sequence: int
    """Tokens of one sequence; 0 for documents, which are no sequences."""

    def folder(self, python: str = "") -> str:
        """Return the name of the folder of what is prepared, by all that decides it.

        Args:
            python: version of the interpreter, whose standard library differs from another's.
        """
        pinned = self.source.model_dump(mode="json", exclude={"source"})
        mark = sha256_of_bytes(canonical_json([DATA_FORMAT, pinned, self.sequence]).encode())[:12]
        kind = f"{self.name}-python{python}" if self.source.kind == "standard-library" else self.name
        return f"{kind}-{self.sequence}-{mark}"
