"""What a recipe of checks says beside what every recipe says, and the part of a plan that follows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import Scale, ScaledTables, Sweep
from twinrun.protocol.checks import CheckSpec


class ChecksScale(Scale):
    """One size at which the checks run."""

    sweep: Sweep


class Checks(Frozen):
    """The named checks of a recipe; its script has a function for each."""

    check: Annotated[tuple[CheckSpec, ...], Field(min_length=1)]
    only: tuple[str, ...] = ()
    """Checks to run; all when empty."""

    @model_validator(mode="after")
    def _distinct(self) -> Checks:
        names = [one.id for one in self.check]
        if len(names) != len(set(names)):
            raise ValueError("two checks have the same id")
        unknown = set(self.only) - set(names)
        if unknown:
            raise ValueError(f"`only` names no check: {', '.join(sorted(unknown))}")
        return self

    @property
    def chosen(self) -> tuple[CheckSpec, ...]:
        """The checks that run."""
        return tuple(one for one in self.check if not self.only or one.id in self.only)


class ChecksTables(ScaledTables[ChecksScale]):
    """Tables of recipe.toml."""

    checks: Checks


class ChecksPlan(Frozen):
    """What decides a run of checks."""

    checks: tuple[CheckSpec, ...]


class ChecksPoint(Frozen):
    """Nothing beside the placement."""
