"""Claims between records: the mean over several records of one side's numbers over another side's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.restatements import Restatement
from twinrun.manifests.source import Source
from twinrun.protocol.measurements import Per


class ClaimSide(Frozen):
    """What the records of one side have in common."""

    gpu: str
    """Row of images/gpus.toml."""
    stack: str
    """Stack of images/stacks/."""

    def __str__(self) -> str:
        return f"{self.gpu} with {self.stack}"


class RecordClaim(Frozen):
    """A published mean of ratios that no one run can give: of two GPUs, or of two stacks."""

    kind: ClassVar[str] = "between records"
    hardware: ClassVar[None] = None
    """Each side has its own."""
    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    statement: str
    """The claim in one sentence."""
    metric: str
    """Row of recipes/metrics.toml."""
    per: Per
    """What one number of a side counts."""
    formula: str | None = None
    """Identifier in the formulas; required where the metric has any."""
    point: str
    """The point that every record has."""
    over: ClaimSide
    under: ClaimSide
    mean_over: dict[str, tuple[str, ...]]
    """One setting, such as the model, and its values: each side has a record of each."""
    value: Annotated[float, Field(gt=0)]
    better: Literal["higher", "lower"]
    """Direction of goodness, that of the metric."""
    tolerance: Annotated[float, Field(gt=0, lt=1)]
    """Relative to `value`."""
    because: str
    """Why this tolerance."""
    source: Source
    here: Restatement | None = None
    """What it says of other GPUs of the vendors that the two sides have."""
    why_none: str | None = None
    """Why there is no restatement, where there is none."""

    @model_validator(mode="after")
    def _complete(self) -> RecordClaim:
        if self.over == self.under:
            raise ValueError(f"claim `{self.id}`: `over` and `under` are one side")
        if len(self.mean_over) != 1 or not all(self.mean_over.values()):
            raise ValueError(f"claim `{self.id}`: `mean_over` names one setting and its values")
        if (self.here is None) == (self.why_none is None):
            raise ValueError(f"claim `{self.id}` needs either a table `here` or a reason `why_none`")
        return self

    @property
    def setting(self) -> str:
        """Name of what differs between the records of a side."""
        return next(iter(self.mean_over))

    @property
    def values(self) -> tuple[str, ...]:
        """The settings that the mean is over."""
        return self.mean_over[self.setting]
