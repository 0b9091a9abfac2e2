"""Where a published number stands."""

from __future__ import annotations

from typing import Literal

from twinrun.foundation.manifest import Frozen


class Source(Frozen):
    """Where a number stands and how it was read."""

    document: str
    """Key of the publication, see the recipe's README."""
    where: str
    """Table, figure or sentence."""
    how: Literal["read from text", "read from a table", "digitised", "derived", "implied"]
    derivation: str | None = None
    """For derived and implied values: from what."""
